"""The entry point of the planner: returns the requested plan, or the one that is predicted to be the fastest.

The predicted seconds are those of a full pipeline in which communication overlaps with compute. To reach them, a plan
may need the depth ``full`` (`core.plan.depth`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property, partial
from math import inf
from typing import Any, NamedTuple, TypeVar

from pipedream.core.errors import PlanError, ShortageError
from pipedream.core.hardware.cluster import Cluster
from pipedream.core.model.graph import LayerGraph
from pipedream.core.model.profile import Profile
from pipedream.core.plan.plan import Plan
from pipedream.core.units import format_bytes, format_excess, format_seconds
from pipedream.planner.dynamic_program.recurrence import refuse
from pipedream.planner.pipeline_search import PipelineSearch
from pipedream.planner.tables.search_space import SearchSpace, apply_depth, with_slower_links

_Space = TypeVar("_Space", bound=SearchSpace)

SHAPES = ("any", "pipeline", "straight", "data-parallel")
"""The shapes that have a name. Replica counts, such as 2-1, are shapes too."""

_FEW_WORKERS = 8  # with more, only numbers of stages that leave no worker idle are finalists
_VERY_FEW_WORKERS = 4  # up to here all replica counts are
_SLOWER = (2.0, 4.0, 16.0)  # of random plans on up to 5 workers, these found the most that the other finalists lack

_LARGE = 1e8  # (layers times workers) squared, above which a search may take seconds
_SPARE_STEPS = 4  # of the bisection for the least memory to keep free for messages; each is a search


@dataclass(frozen=True, eq=False)
class PlanSearch:
    """The searches of one space for plans of several shapes, each with the smallest predicted seconds per minibatch.

    Ties go to fewer bytes sent between stages, then fewer stages, then fewer workers, then the plan that is smallest,
    stage by stage, in (last layer, replicas).

    Stages take consecutive workers of the cluster, after any idle ones. If workers differ, several orders of them are
    tried. A model with many layers on many workers is planned with neighbouring layers joined, and says so; the
    plan's bound then says how far from optimal it may be.

    Attributes:
        all_workers: 'any' and 'pipeline' leave no worker idle.
        describes_alternatives: notes say what other plans take, which takes longer.
    """

    space: SearchSpace
    all_workers: bool = False
    describes_alternatives: bool = True

    @classmethod
    def of(cls, profile: Profile, cluster: Cluster, *, all_workers: bool = False, **of_space: Any) -> PlanSearch:
        """`of_space` are arguments of `SearchSpace.of`."""
        return cls(SearchSpace.of(profile, cluster, **of_space), all_workers)

    def best(
        self,
        shape: str | tuple[int, ...] = "any",
        in_flight: str | tuple[int, ...] = "noam",
        link_factor: float = 1.0,
        limit_s: float = inf,
    ) -> Plan:
        """Returns the plan of a shape, at a depth.

        Args:
            shape: 'any' compares one worker, data parallelism and pipelines whose stages may be replicated; 'pipeline'
                has at least two stages, if the model and the workers allow them; 'straight' has one stage for each
                worker; 'data-parallel' has one stage on all workers; '2-1' or (2, 1) are the replicas of each stage.
            in_flight: the depth, which is applied to the plan found at the paper's depth; memory is checked again.
            link_factor: as in a `SearchVariant`.
            limit_s: seconds per minibatch above which a plan does not count; it is returned without its depth and
                bytes, which take longer.

        Raises:
            PlanError: an unknown shape, more stages than the model can be cut into, more workers than the cluster has,
                or nothing fits the memory at this depth.
        """
        if link_factor == 1:
            plan = self._find_fitting(shape, limit_s)
        else:  # on slower links neither the limit nor the bound means anything
            plan = replace(self, space=with_slower_links(self.space, link_factor))._find_fitting(shape, inf)
            plan = replace(plan, cluster=self.space.cluster, bound_s=0.0)
        return plan if plan.slowest_stage_s > limit_s else apply_depth(self.space, plan, in_flight)

    def _find_fitting(self, shape: str | tuple[int, ...], limit_s: float) -> Plan:
        space, profile = self.space, self.space.profile
        workers, longest = space.cluster.workers, len(space.positions) - 1
        narrower_searches: list[Callable[[SearchSpace], Plan]] = []
        if shape in ("any", "pipeline"):
            # Plans of these shapes may fit where one that keeps the same memory free at every stage does not.
            sizes = (stages for stages in range(2, min(longest, workers) + 1) if workers % stages == 0)
            narrower_searches = [partial(self._search, shape=(workers // stages,) * stages) for stages in sizes]
            narrower_searches += [] if self.all_workers else [self._plan_straight]
        plan = search_with_message_memory(space, partial(self._search, shape=shape), narrower_searches, limit_s)
        # What keeps layers in one stage matters only where there could be several.
        if workers > 1 and shape != "data-parallel" and (together := profile.ties_in_words()):
            plan = replace(plan, note=f"{plan.note}; {together}")
        return plan

    @cached_property
    def _base_searches(self) -> PipelineSearch:
        return self._make_new_searches(self.space)

    def _make_searches(self, space: SearchSpace) -> PipelineSearch:
        return self._base_searches if space is self.space else self._make_new_searches(space)

    def _make_new_searches(self, space: SearchSpace) -> PipelineSearch:
        return replace(PipelineSearch.of(space), describes_alternatives=self.describes_alternatives)

    def _plan_straight(self, space: SearchSpace) -> Plan:
        searches = self._make_searches(space)
        plan = searches.best_straight
        if plan is None:
            raise PlanError("no straight pipeline fits")
        best = "best found" if space.spare_bytes else "optimal"
        return _add_bound(replace(plan, note=f"{best} among straight pipelines"), space, searches.coarse_space)

    def _search(self, space: SearchSpace, shape: str | tuple[int, ...]) -> Plan:
        searches = self._make_searches(space)
        if shape in ("any", "pipeline"):
            how = shape == "pipeline", self.all_workers
            plan, pipeline = _find_fastest(searches, *how)
            plan = replace(plan, note=_describe_fastest(searches, *how, plan, pipeline))
        elif shape == "data-parallel":
            plan = _plan_data_parallel(searches)
        elif shape == "straight":
            plan = _plan_with_counts(searches, (1,) * space.cluster.workers)
        else:
            plan = _plan_with_counts(searches, parse_counts(shape))
        return _add_bound(plan, space, searches.coarse_space if shape in ("any", "pipeline") else space)


class SearchVariant(NamedTuple):
    """A search whose best plan is simulated: the search's own seconds ignore exposed messages, filling and draining.

    Attributes:
        link_factor: the links are taken to be slower by this factor, so that the plan sends less.
    """

    shape: str
    link_factor: float = 1.0

    def __str__(self) -> str:
        return (
            self.shape if self.link_factor == 1 else f"{self.shape}, as if links were {self.link_factor:g} times slower"
        )


def list_finalists(
    shape: str | tuple[int, ...], profile: Profile, workers: int, all_workers: bool = False
) -> list[SearchVariant]:
    """Returns the searches for 'any' or 'pipeline' whose plans are worth a simulation; any other shape is the only one.

    After the search's own best: one stage on all workers, on one, and on powers of two; pipelines of 2, 3, ... stages
    with equal replicas, like PipeDream-2BW's planner (ICML 2021, section 3.3), and without; with few workers pipelines
    of all replica counts; and the best plans for slower links. With many layers and workers only the plain ones of
    these, for a search may take seconds.
    """
    if shape not in ("any", "pipeline"):
        return [SearchVariant(shape if isinstance(shape, str) else _join_counts(parse_counts(shape)))]
    is_large = (len(profile.layers) * workers) ** 2 > _LARGE
    every = workers <= _FEW_WORKERS and not all_workers
    powers = [] if all_workers or is_large else [1 << power for power in range(1, (workers - 1).bit_length())]
    stages = [count for count in range(2, workers + 1) if every or workers % count == 0]
    counts = [(workers // count,) * count for count in stages] + [(1,) * count for count in powers]
    counts += _list_partitions(workers) if workers <= _VERY_FEW_WORKERS else []
    single = ["data-parallel", *([] if all_workers or workers == 1 else ["1", *map(str, powers)])]
    shapes = [
        str(shape),
        "pipeline",
        *(single if shape == "any" else []),
        *(_join_counts(row) for row in counts if len(row) > 1),
    ]
    link_factor = [] if is_large else [SearchVariant("pipeline", factor) for factor in _SLOWER]
    return [*map(SearchVariant, dict.fromkeys(shapes)), *link_factor]


def _list_partitions(workers: int) -> list[tuple[int, ...]]:
    return [
        (first, *rest)
        for first in range(1, workers + 1)
        for rest in (_list_partitions(workers - first) if workers > first else [()])
    ]


def _describe_sufficient(space: _Space, searches: Iterable[Callable[[_Space], Plan]], need_bytes: int) -> str:
    """Returns a plan that would fit with a little more memory, in words; '' if there is none."""

    def enlarged(memory_bytes: int | None) -> int | None:
        return None if memory_bytes is None else max(memory_bytes, need_bytes)

    larger = replace(space, cluster=space.cluster.with_memory(enlarged))
    rows: list[tuple[int, Plan]] = []
    for search in searches:
        with suppress(PlanError):
            plan = larger.with_bytes(search(larger))
            sites = zip(plan.stages, plan.costs.sites, strict=True)
            rows.append((max(stage.peak_bytes for stage, site in sites if site.memory_bytes is not None), plan))
    if not rows:
        return ""
    most, plan = min(rows, key=lambda row: row[0])
    return f"; the plan {_short(plan.config)} would fit {format_bytes(most)} ({most} bytes)"


def search_with_message_memory(
    space: _Space,
    search: Callable[[_Space], Plan],
    narrower_searches: Sequence[Callable[[_Space], Plan]],
    limit_s: float = inf,
) -> Plan:
    """Returns the plan of a search, whose messages fit too: only a whole plan determines their memory.

    If they do not fit, some memory is kept free for them on every stage, and the narrower searches are tried too. The
    bound is still that of the first search.

    Args:
        limit_s: seconds per minibatch above which a plan need not fit.

    Raises:
        ShortageError: nothing fits; names a plan that would fit with a little more memory.
    """
    try:
        least = search(space)
        if not space.cluster.is_limited or least.bound_s > limit_s:
            return least
        least = space.with_bytes(least)
        if least.first_stage_over_memory is None:
            return least
        plans = [*_spare_memory(space, search, least)]
        for narrower in narrower_searches:
            fitting_s = (plan.period_s for plan in plans if plan.first_stage_over_memory is None)
            plans += _spare_memory(space, narrower, rival_s=min(fitting_s, default=inf))
    except ShortageError as error:
        more = _describe_sufficient(space, (search, *narrower_searches), error.need_bytes)
        raise error.reworded(f"{error}{more}") from None
    fitting = [plan for plan in plans if plan.first_stage_over_memory is None]
    if not fitting:  # the caller refuses it, naming what it needs
        return min((least, *plans), key=_count_missing_bytes)
    best = min(fitting, key=lambda plan: (plan.period_s, plan.slowest_stage_s))
    return replace(best, bound_s=min(least.bound_s, best.slowest_stage_s))


def _spare_memory(
    space: _Space, search: Callable[[_Space], Plan], first: Plan | None = None, rival_s: float = inf
) -> Iterator[Plan]:
    """Yields plans with more and more memory kept free for messages until one fits, then less.

    Args:
        first: without any, if it is known.
        rival_s: seconds per minibatch of a plan that fits; none is sought that cannot take less.
    """

    def search_sparing(spare_bytes: int) -> Plan | None:
        try:
            plan = space.with_bytes(search(replace(space, spare_bytes=spare_bytes)))
        except PlanError:
            return None
        free = f"; {format_bytes(spare_bytes)} of a worker's memory were kept free for messages"
        return replace(plan, note=f"{plan.note}{free if spare_bytes else ''}")

    too_little, enough, plan = 0, 0, first or search_sparing(0)
    while plan is not None and plan.first_stage_over_memory is not None:
        if plan.bound_s >= rival_s:
            return
        yield plan
        # At least doubled, so that it ends: another plan may need more memory for its messages.
        too_little, enough = enough, enough + max(enough, _count_missing_bytes(plan))
        plan = search_sparing(enough)
    if plan is not None:
        yield plan
    for _ in range(_SPARE_STEPS if enough else 0):  # with less kept free, a faster plan may fit
        middle = (too_little + enough) // 2
        plan = search_sparing(middle)
        if plan is not None:
            yield plan
        if plan is not None and plan.first_stage_over_memory is not None:
            too_little = middle
        else:
            enough = middle


def _count_missing_bytes(plan: Plan) -> int:
    limits = [site.memory_bytes for site in plan.costs.sites]
    return max(stage.peak_bytes - (limit or stage.peak_bytes) for stage, limit in zip(plan.stages, limits, strict=True))


def parse_counts(shape: str | tuple[int, ...]) -> tuple[int, ...]:
    """Returns the replica counts of a shape, '2-1' or (2, 1). Raises PlanError."""
    try:
        counts = tuple(int(part) for part in (shape.split("-") if isinstance(shape, str) else shape))
    except ValueError:
        counts = ()
    if not counts or min(counts) < 1:
        raise PlanError(f"unknown shape {shape!r}; give {', '.join(SHAPES)}, or the replicas of each stage, e.g. 2-1")
    return counts


def _plan_data_parallel(searches: PipelineSearch) -> Plan:
    workers = searches.workers
    plan = searches.best_single_stage((workers,)) or refuse(
        searches.shortage_of_counts((workers,)), "data-parallel plans"
    )
    return replace(plan, note=f"data parallelism was asked for{_describe_rivals(plan, searches, (1,))}")


def _plan_with_counts(searches: PipelineSearch, counts: tuple[int, ...]) -> Plan:
    is_straight = max(counts) == 1
    kind, sizes = (
        ("straight pipeline", f" of {len(counts)} stages") if is_straight else ("plan", f" {_join_counts(counts)}")
    )
    _check_counts(searches.space, counts, f"a {kind}{sizes}")
    plan = searches.best_with_counts(counts) or refuse(searches.shortage_of_counts(counts), f"{kind}s{sizes}")
    kinds = f"{kind}s{sizes}{searches.order_note}"
    best = "best found" if searches.space.spare_bytes else "optimal"
    rivals = _describe_rivals(plan, searches, (searches.workers,), straight=not is_straight)
    return replace(plan, note=f"{best} among {kinds}{rivals}")


def _find_fastest(searches: PipelineSearch, as_pipeline: bool, all_workers: bool) -> tuple[Plan, Plan | None]:
    """Returns the fastest plan, and the best pipeline, with which it was compared.

    With `as_pipeline` it has at least two stages, unless the model cannot be cut or there is only one worker.
    """
    workers = searches.workers
    single = searches.best_single_stage((workers,) if all_workers else range(1, workers + 1))
    if _count_most_stages(searches) < 2:
        return single or refuse(searches.shortage_of_counts((workers,)), "plans of one stage"), None
    pipeline, kinds = searches.best_pipeline(all_workers), _name_kinds(searches, as_pipeline, all_workers)
    if as_pipeline:
        return pipeline or refuse(searches.shortage_of_pipelines(all_workers), kinds), pipeline
    # A single stage sends nothing to another, so it comes first and wins ties.
    plans = [plan for plan in (single, pipeline) if plan is not None]
    if not plans:
        shortages = searches.shortage_of_counts((workers,)), searches.shortage_of_pipelines(all_workers)
        refuse(min(shortages, key=lambda shortage: shortage.missing_bytes), f"plans ({kinds})")
    fastest = min(plans, key=lambda plan: plan.slowest_stage_s)
    return replace(fastest, bound_s=min(plan.bound_s for plan in plans)), pipeline


def _describe_fastest(
    searches: PipelineSearch, as_pipeline: bool, all_workers: bool, plan: Plan, pipeline: Plan | None
) -> str:
    """Returns the note of the plan that `_find_fastest` returns."""
    workers, kinds = searches.workers, _name_kinds(searches, as_pipeline, all_workers) + searches.order_note
    if workers == 1:
        return "one worker"
    if _count_most_stages(searches) < 2:
        rivals = _describe_rivals(plan, searches, (workers, 1))
        return f"the model cannot be cut; fastest of its plans of one stage{rivals}"
    if as_pipeline:
        best = "best found" if plan.bound_s < plan.slowest_stage_s else searches.optimality
        return f"{best} among {kinds}{_describe_rivals(plan, searches, (workers,), straight=True)}"
    return f"fastest predicted among {kinds}{_describe_rivals(plan, searches, (workers, 1), pipeline, straight=True)}"


def _name_kinds(searches: PipelineSearch, as_pipeline: bool, all_workers: bool) -> str:
    longest, on_all = _count_most_stages(searches), f" on {searches.workers} workers" if all_workers else ""
    pipelines = f"pipelines of {'2' if longest == 2 else f'2 to {longest}'} stages{on_all}"
    return pipelines if as_pipeline else f"{'' if all_workers else 'one worker, '}data parallelism and {pipelines}"


def _count_most_stages(searches: PipelineSearch) -> int:
    return min(len(searches.space.positions) - 1, searches.workers)


def _check_counts(space: SearchSpace, counts: tuple[int, ...], what: str) -> None:
    workers, longest = space.cluster.workers, len(space.positions) - 1
    if sum(counts) > workers:
        raise PlanError(
            f"{what} was asked for: it takes {sum(counts)} workers, the cluster has {workers}; ask for fewer or give "
            "more workers"
        )
    if len(counts) > longest:
        together = space.profile.ties_in_words()
        raise PlanError(
            f"{what} was asked for: the model's {len(space.profile.layers)} layers can be cut at {longest - 1} places; "
            f"ask for at most {longest} stages"
            f"{f'; {together}' if together else ', or profile the model in finer layers'}"
        )


def _join_counts(counts: tuple[int, ...]) -> str:
    return "-".join(map(str, counts))


def _describe_rivals(
    best: Plan, searches: PipelineSearch, ones: Iterable[int], pipeline: Plan | None = None, *, straight: bool = False
) -> str:
    if not searches.describes_alternatives:
        return ""
    pipelines = pipeline, searches.best_straight if straight else None
    rivals = {str(count): searches.best_single_stage((count,)) for count in ones}
    rivals |= {plan.config: plan for plan in pipelines if plan is not None}
    parts = [""]
    for config, plan in rivals.items():
        if config == best.config:
            continue
        counts = config.split("-")
        what = f"data parallelism on {config} workers" if len(counts) == 1 else f"the pipeline {_short(config)}"
        if set(counts) == {"1"}:
            what = "one worker" if len(counts) == 1 else f"a straight pipeline of {len(counts)} stages"
        if plan is None:
            parts.append(f"{what} does not fit the memory")
        else:
            parts.append(f"{what} is predicted at {format_seconds(plan.slowest_stage_s)} per minibatch")
    return "; ".join(parts)


def _short(config: str) -> str:
    return config if len(config) <= 60 else f"{config[:57]}..."


def _add_bound(plan: Plan, space: SearchSpace, searched: SearchSpace) -> Plan:
    """Returns the plan with a note on its bound: optimal, or how far from optimal it may be.

    If the searched space is not complete, the bound is `least_period_s`.

    Args:
        searched: `space`, or it with neighbouring layers joined.
    """
    graph, cuts = space.profile.graph, len(searched.positions) - 2
    period_s = plan.slowest_stage_s
    if searched.is_complete:
        if space.spare_bytes:
            return plan  # the best only of those that keep this memory free
        is_chain = graph.edges == LayerGraph.chain(graph.layers).edges
        if is_chain or plan.bound_s < period_s:  # all cuts of a chain are tried; a lower bound proves no optimum
            return plan
        return replace(plan, note=f"{plan.note}; optimal: the {cuts} cuts of the graph that can matter were all tried")
    bound_s = min(least_period_s(space), period_s)
    if bound_s == period_s:
        proved = "optimal, for no plan can be faster"
    else:
        proved = f"{format_excess(period_s / bound_s - 1)} of a proven bound" if bound_s else "nothing is proved"
    cuts_of = "the graph's cuts were tried"
    if searched is not space:
        cuts_of = f"{len(space.positions) - 2} cuts were tried, with layers joined between them to plan in seconds"
    return replace(plan, bound_s=bound_s, note=f"{plan.note}; {cuts} of {cuts_of}: {proved}")


def least_period_s(space: SearchSpace) -> float:
    """Returns seconds per minibatch that no plan can beat: all compute, divided by the workers' speeds."""
    end = len(space.profile.layers)
    seconds = (*space.passes_s(0, end), float(space.update_s(0, end)))
    return float(sum(seconds)) / sum(space.cluster.speeds)
