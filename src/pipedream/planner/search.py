"""The entry point of the planner: returns the requested plan, or the one that is predicted to be the fastest.

The predicted seconds are those of a full pipeline in which communication overlaps with compute. To reach them, a plan
may need the depth ``full`` (`core.plan.depth`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, partial
from math import inf, isqrt
from typing import Any, NamedTuple

from pipedream.core.errors import PlanError
from pipedream.core.hardware.cluster import Cluster
from pipedream.core.model.graph import LayerGraph
from pipedream.core.model.profile import Profile
from pipedream.core.plan.plan import Plan
from pipedream.core.units import format_excess
from pipedream.planner.cycles import shorten_cycle
from pipedream.planner.dynamic_program.pruning import prune_places, thin_out
from pipedream.planner.dynamic_program.recurrence import (
    DynamicProgram,
    Shortage,
    State,
    refuse,
    states_of_counts,
    straight_states,
    tie_break_key,
)
from pipedream.planner.spare_memory import search_with_message_memory
from pipedream.planner.tables.search_space import SearchSpace, apply_depth, with_positions, with_slower_links
from pipedream.planner.workers import WorkerLine, list_orders

SHAPES = ("any", "pipeline", "straight", "data-parallel")
"""The shapes that have a name. Replica counts, such as 2-1, are shapes too."""

_FEW_WORKERS = 8  # with more, only numbers of stages that leave no worker idle are finalists
_VERY_FEW_WORKERS = 4  # up to here all replica counts are
_SLOWER = (2.0, 4.0, 16.0)  # of random plans on up to 5 workers, these found the most that the other finalists lack

_LARGE = 1e8  # (layers times workers) squared, above which a search may take seconds

_MAX_WORK = 5e8
"""Comparisons of costs in all searches for one plan: about ten seconds."""

_MAX_ORDERS = 5_000

_MAX_CYCLES_WORK = 3e8
"""Comparisons in searches for a plan that repeats itself sooner, if each had the states of the first one."""

_MAX_STATES = 3e8
"""Comparisons in one dynamic program, about ten seconds; above this, neighbouring layers are joined first."""

_MAX_ANY_COUNT = 256
"""Workers up to which a stage may have any number of replicas; with more, a power of two or three times one."""


class _Family(NamedTuple):
    """What one dynamic program searches on each line of workers, see `DynamicProgram`."""

    space: SearchSpace
    states: tuple[State, ...]
    starts: tuple[State, ...] | None = None
    allow_single_stage: bool = False


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
    """

    space: SearchSpace
    all_workers: bool = False

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
            plan = self._on(with_slower_links(self.space, link_factor))._find_fitting(shape, inf)
            plan = replace(plan, cluster=self.space.cluster, bound_s=0.0)
        return plan if plan.slowest_stage_s > limit_s else apply_depth(self.space, plan, in_flight)

    def _on(self, space: SearchSpace) -> PlanSearch:
        return self if space is self.space else replace(self, space=space)

    def _find_fitting(self, shape: str | tuple[int, ...], limit_s: float) -> Plan:
        narrower_searches: list[Callable[[SearchSpace], Plan]] = []
        if shape in ("any", "pipeline"):
            # Plans of these shapes may fit where one that keeps the same memory free at every stage does not.
            sizes = (stages for stages in range(2, self._most_stages + 1) if self.workers % stages == 0)
            narrower_searches = [partial(self._search, shape=(self.workers // stages,) * stages) for stages in sizes]
            narrower_searches += [] if self.all_workers else [lambda space: self._on(space)._find_straight()]
        plan = search_with_message_memory(self.space, partial(self._search, shape=shape), narrower_searches, limit_s)
        # What keeps layers in one stage matters only where there could be several.
        if self.workers > 1 and shape != "data-parallel" and (together := self.space.profile.ties_in_words()):
            plan = replace(plan, note=f"{plan.note}; {together}")
        return plan

    def _search(self, space: SearchSpace, shape: str | tuple[int, ...]) -> Plan:
        search = self._on(space)
        if shape in ("any", "pipeline"):
            return search._find_fastest(as_pipeline=shape == "pipeline")
        if shape == "data-parallel":
            return search._find_with_counts((search.workers,), "data-parallel plans", "data parallelism was asked for")
        counts = (1,) * search.workers if shape == "straight" else parse_counts(shape)
        sizes = f" of {len(counts)} stages" if max(counts) == 1 else f" {_join_counts(counts)}"
        kind = "straight pipeline" if max(counts) == 1 else "plan"
        _check_counts(space, counts, f"a {kind}{sizes}")
        note = f"{'best found' if space.spare_bytes else 'optimal'} among {kind}s{sizes}{search._order_note}"
        return search._find_with_counts(counts, f"{kind}s{sizes}", note)

    def _find_with_counts(self, counts: tuple[int, ...], kinds: str, note: str) -> Plan:
        family = self._with_counts(counts)
        plan = self._find_best(family) or refuse(self._find_shortage(family), kinds)
        return _add_bound(replace(plan, note=note), self.space, self.space)

    def _find_fastest(self, as_pipeline: bool) -> Plan:
        """Returns the fastest plan; with `as_pipeline` of at least two stages, unless there can be only one."""
        longest, on_all = self._most_stages, f" on {self.workers} workers" if self.all_workers else ""
        kinds = f"pipelines of {'2' if longest == 2 else f'2 to {longest}'} stages{on_all}"
        if not as_pipeline:
            kinds = f"{'' if self.all_workers else 'one worker, '}data parallelism and {kinds}"
        rows: list[tuple[Plan | None, _Family]] = []  # what is found, and where memory is missing if nothing is
        if longest < 2 or not as_pipeline:  # a single stage sends nothing to another, so it comes first and wins ties
            counts = (self.workers,) if self.all_workers else range(1, self.workers + 1)
            rows.append((self._find_best(self._single_stages(*counts)), self._single_stages(self.workers)))
        if longest > 1:
            rows.append((self.best_pipeline, self._pipelines()))
        plans = [plan for plan, _ in rows if plan is not None]
        if not plans:
            shortages = (self._find_shortage(family) for _, family in rows)
            what = "plans of one stage" if longest < 2 else kinds if as_pipeline else f"plans ({kinds})"
            refuse(min(shortages, key=lambda shortage: shortage.missing_bytes), what)
        best = min(plans, key=lambda plan: plan.slowest_stage_s)
        best = replace(best, bound_s=min(plan.bound_s for plan in plans))
        if self.workers == 1:
            note = "one worker"
        elif longest < 2:
            note = "the model cannot be cut; fastest of its plans of one stage"
        elif as_pipeline:
            is_found = best.bound_s < best.slowest_stage_s or self.coarse_space is not self.space
            is_found |= self.space.spare_bytes > 0
            note = f"{'best found' if is_found else 'optimal'} among {kinds}{self._order_note}"
        else:
            note = f"fastest predicted among {kinds}{self._order_note}"
        return _add_bound(replace(best, note=note), self.space, self.coarse_space)

    def _find_straight(self) -> Plan:
        """Returns the fastest straight pipeline of at least two stages in `coarse_space`."""
        longest = min(len(self.coarse_space.positions) - 1, self.workers)
        plan = self._find_best(_Family(self.coarse_space, straight_states(longest))) if longest > 1 else None
        if plan is None:
            raise PlanError("no straight pipeline fits")
        note = f"{'best found' if self.space.spare_bytes else 'optimal'} among straight pipelines"
        return _add_bound(replace(plan, note=note), self.space, self.coarse_space)

    @property
    def workers(self) -> int:
        return self.space.cluster.workers

    @property
    def _most_stages(self) -> int:
        return min(len(self.space.positions) - 1, self.workers)

    @cached_property
    def coarse_space(self) -> SearchSpace:
        """The space in which pipelines of any shape are searched: with fewer places to cut if it is too large."""
        if _estimate_work(self.space) <= _MAX_STATES:
            return self.space
        groups = max(isqrt(int(_MAX_STATES / _count_states(self.workers))) - 1, 2)
        return replace(with_positions(self.space, thin_out(self.space, groups)), is_complete=False)

    @cached_property
    def _lines(self) -> tuple[list[WorkerLine], str]:
        """Lines of workers, those that win ties first, and in words which these are."""
        cluster, most = self.space.cluster, max(_MAX_WORK // _estimate_work(self.space), 1)
        orders, kind = list_orders(cluster, int(min(most, _MAX_ORDERS)))
        return [WorkerLine.of(cluster, order, self.space.terms) for order in orders], kind

    @property
    def _order_note(self) -> str:
        kind = self._lines[1]
        return "" if self.space.cluster.is_flat else f" on consecutive workers{f' {kind}' if kind else ''}"

    @cached_property
    def best_pipeline(self) -> Plan | None:
        """The best pipeline of at least two stages in `coarse_space`.

        Its cycle is one that can be proved, if possible (`planner.cycles`).
        """
        plan = self._find_best(self._pipelines())
        if plan is None:
            return None
        tried = max(int(_MAX_CYCLES_WORK // _estimate_work(self.coarse_space)), 1)
        plan = shorten_cycle(plan, self.workers, lambda cycle: self._find_best(self._pipelines(cycle)), tried)
        if self.coarse_space is not self.space:
            fine = self._find_best(self._with_counts(plan.replicas))  # the same replicas, cut between any two layers
            plan = min((plan, fine or plan), key=tie_break_key)
        return plan

    def _pipelines(self, cycle: int = 0) -> _Family:
        """Returns those of at least two stages; with a `cycle`, all counts divide it."""
        counts = [count for count in _list_counts(self.workers) if not cycle % count]
        states = tuple((w, count) for w in range(1, self.workers + 1) for count in counts if count <= w)
        starts = tuple(state for state in states if state[0] == self.workers) if self.all_workers else None
        return _Family(self.coarse_space, states, starts)

    def _single_stages(self, *counts: int) -> _Family:
        ends = with_positions(self.space, (0, self.space.positions[-1]))
        return _Family(ends, tuple((count, count) for count in counts), None, True)

    def _with_counts(self, counts: tuple[int, ...]) -> _Family:
        if len(counts) == 1:
            return self._single_stages(*counts)
        return _Family(self.space, states_of_counts(counts), ((sum(counts), counts[0]),), True)

    def _list_programs(self, family: _Family) -> list[DynamicProgram]:
        return [DynamicProgram(*family, line) for line in self._lines[0]]

    def _find_best(self, family: _Family) -> Plan | None:
        plans = (prune_places(program).best() for program in self._list_programs(family))
        best = min((plan for plan in plans if plan is not None), key=tie_break_key, default=None)  # the first wins
        return None if best is None else replace(best, bound_s=best.slowest_stage_s)

    def _find_shortage(self, family: _Family) -> Shortage:
        shortages = (prune_places(program).shortage for program in self._list_programs(family))
        return min(shortages, key=lambda shortage: shortage.missing_bytes)


def _estimate_work(space: SearchSpace) -> float:
    return _count_states(space.cluster.workers) * len(space.positions) ** 2


def _count_states(workers: int) -> float:
    return float(sum(workers + 1 - count for count in _list_counts(workers)))


def _list_counts(workers: int) -> list[int]:
    """Returns the numbers of replicas that a stage may have."""
    if workers <= _MAX_ANY_COUNT:
        return list(range(1, workers + 1))
    return [count for count in range(1, workers + 1) if count & -count in (count, count // 3)]


class SearchVariant(NamedTuple):
    """A search whose best plan is simulated: the search's own seconds ignore exposed messages, filling and draining.

    Attributes:
        link_factor: the links are taken to be slower by this factor, so that the plan sends less.
    """

    shape: str
    link_factor: float = 1.0

    def __str__(self) -> str:
        slower = f", as if links were {self.link_factor:g} times slower" if self.link_factor != 1 else ""
        return f"{self.shape}{slower}"


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
    counts += list_compositions(workers, workers) if workers <= _VERY_FEW_WORKERS else []
    single = ["data-parallel", *([] if all_workers or workers == 1 else ["1", *map(str, powers)])]
    several = (_join_counts(row) for row in counts if len(row) > 1)
    shapes = [shape, "pipeline", *(single if shape == "any" else []), *several]
    slower = [] if is_large else [SearchVariant("pipeline", factor) for factor in _SLOWER]
    return [*map(SearchVariant, dict.fromkeys(shapes)), *slower]


def list_compositions(total: int, most: int) -> list[tuple[int, ...]]:
    """Returns all rows of counts from 1 to `most` with this sum."""
    rows = (
        (first, rest) for first in range(1, min(total, most) + 1) for rest in list_compositions(total - first, most)
    )
    return [(first, *rest) for first, rest in rows] if total else [()]


def parse_counts(shape: str | tuple[int, ...]) -> tuple[int, ...]:
    """Returns the replica counts of a shape, '2-1' or (2, 1). Raises PlanError."""
    try:
        counts = tuple(int(part) for part in (shape.split("-") if isinstance(shape, str) else shape))
    except ValueError:
        counts = ()
    if not counts or min(counts) < 1:
        raise PlanError(f"unknown shape {shape!r}; give {', '.join(SHAPES)}, or the replicas of each stage, e.g. 2-1")
    return counts


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
