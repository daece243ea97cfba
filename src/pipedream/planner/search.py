"""The planner's front: of one worker, data parallelism and pipelines, whatever is asked for or predicted fastest.

The predicted seconds are those of a full pipeline whose messages are hidden behind compute, which takes
the depth ``full``; at the paper's depth more may show (`core.plan.depth`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial

from pipedream.core.errors import PlanError, ShortageError
from pipedream.core.hardware.cluster import Cluster
from pipedream.core.model.profile import Profile
from pipedream.core.plan.plan import Plan
from pipedream.core.units import format_bytes, format_seconds
from pipedream.planner.bound import with_bound
from pipedream.planner.dynamic_program.recurrence import check_recompute
from pipedream.planner.dynamic_program.shortage import refuse
from pipedream.planner.pipelines import PipelineSearch
from pipedream.planner.tables.method_occupancy import MethodOccupancy, VersionsRule, stash
from pipedream.planner.tables.search_space import Space

__all__ = ["SHAPES", "counts_of", "plan"]

SHAPES = ("any", "pipeline", "straight", "data-parallel")
"""What may be asked for, beside replica counts."""

_STEPS = 4  # towards the least memory that must be kept free for messages


def plan(
    profile: Profile,
    cluster: Cluster,
    *,
    versions: VersionsRule = stash,
    holds: MethodOccupancy | None = None,
    microbatches: int = 1,
    depth: str | tuple[int, ...] = "noam",
    shape: str | tuple[int, ...] = "any",
    update_delay: int = 0,
    all_workers: bool = False,
    recompute: str = "never",
) -> Plan:
    """Finds the plan with the smallest predicted seconds per minibatch.

    Equal seconds go to fewer bytes sent over boundaries, then fewer stages, then fewer workers, then the plan
    that is smallest, stage by stage, in (last layer, replicas).

    Stages take consecutive workers of the cluster, idle ones in front of them. Where workers or machines are unlike,
    several orders of them are tried, and the note says which. A model of many layers on many workers is planned by
    bisection (`planner.bisection.bisection`); the plan's bound then says how far from the best it may be.

    Args:
        versions: versions of the weights that a stage holds, from its count in flight and its update delay.
        holds: what the method holds of what is admitted; None: all of it, in so many `versions`. Where this depends on
            the whole plan (vertical sync), the search takes the least, and the memory is checked again.
        microbatches: parts that a minibatch is split into.
        depth: applied to the plan found at the paper's depth; memory is checked again at it.
        shape: 'any' compares one worker, data parallelism and pipelines whose stages may be replicated;
            'pipeline' takes at least two stages, if the model and the workers allow them; 'straight' exactly
            one stage for each worker; 'data-parallel' one stage on all workers; and replica counts, as '2-1'
            or (2, 1), stages of these.
        update_delay: of the replicated stages of a pipeline: 1 puts their updates behind the next forward.
        all_workers: 'any' and 'pipeline' leave no worker without work.
        recompute: which stages keep only their input between forward and backward, and do the forward again:
            'never' any, 'auto' those that do not fit the memory otherwise, 'always' all.

    Raises:
        PlanError: an unknown shape, more stages than the model can be cut into, more workers than there are, or
            nothing fits the memory at this depth.
    """
    check_recompute(recompute)
    space = Space.of(
        profile, cluster, versions=versions, update_delay=update_delay, microbatches=microbatches, holds=holds
    )

    def alike(space: Space, counts: tuple[int, ...]) -> Plan:
        return with_bound(_of_counts(PipelineSearch.of(space, recompute), counts), space)

    def straight(space: Space) -> Plan:
        found = PipelineSearch.of(space, recompute).straight()
        if found is None:
            raise PlanError("no straight pipeline fits")
        best = "best found" if space.spare_bytes else "optimal"
        return with_bound(replace(found, note=f"{best} among straight pipelines"), space)

    def search(space: Space) -> Plan:
        lines = PipelineSearch.of(space, recompute)
        if shape in ("any", "pipeline"):
            found = _fastest(lines, shape == "pipeline", all_workers)
        elif shape == "data-parallel":
            found = _parallel(lines)
        elif shape == "straight":
            found = _of_counts(lines, (1,) * cluster.workers)
        else:
            found = _of_counts(lines, counts_of(shape))
        return with_bound(found, space)

    workers, longest = cluster.workers, len(space.positions) - 1
    others: list[Callable[[Space], Plan]] = []
    if shape in ("any", "pipeline"):
        sizes = (stages for stages in range(2, min(longest, workers) + 1) if workers % stages == 0)
        others = [partial(alike, counts=(workers // stages,) * stages) for stages in sizes]
        others += [] if all_workers else [straight]
    try:
        found = _fitting(space, search, others)
    except ShortageError as error:
        raise PlanError(f"{error}{_enough(space, (search, *others), error.need_bytes)}") from None
    return space.at_depth(found, depth)


def _enough(space: Space, searches: Iterable[Callable[[Space], Plan]], need_bytes: int) -> str:
    """Names a plan that would fit a little more memory than the least that a search knows of; '' if it finds none."""

    def more(memory_bytes: int | None) -> int | None:
        return None if memory_bytes is None else max(memory_bytes, need_bytes)

    larger = replace(space, cluster=space.cluster.with_memory(more))
    found: list[tuple[int, Plan]] = []
    for search in searches:
        with suppress(PlanError):
            plan = larger.with_bytes(search(larger))
            sites = zip(plan.stages, plan.sites, strict=True)
            found.append((max(stage.peak_bytes for stage, site in sites if site.memory_bytes is not None), plan))
    if not found:
        return ""
    most, plan = min(found, key=lambda row: row[0])
    return f"; the plan {_short(plan.config)} would fit {format_bytes(most)} ({most} bytes)"


def _fitting(space: Space, search: Callable[[Space], Plan], others: Sequence[Callable[[Space], Plan]]) -> Plan:
    """The plan of a search, with the messages that it makes a worker hold: known of a whole plan only.

    Where they are too much, the search is made again with some memory left free for them (`_spared`); and `others`,
    narrower searches, are made too, for what is left free is the same at every stage. The first search still tells how
    fast a plan could be.
    """
    least = space.with_bytes(search(space))
    if least.overfull is None:
        return least
    found = [plan for how in (search, *others) for plan in _spared(space, how)]
    fitting = [plan for plan in found if plan.overfull is None]
    if not fitting:  # the depth of the one that comes nearest is refused, by what it needs
        return min((least, *found), key=lambda plan: _missing_bytes(space, plan))
    best = min(fitting, key=lambda plan: (plan.period_s, plan.slowest_stage_s))
    return replace(best, bound_s=min(least.bound_s, best.slowest_stage_s))


def _spared(space: Space, search: Callable[[Space], Plan]) -> Iterator[Plan]:
    """Yields plans of a search, with more and more memory left free for messages until one fits, then less.

    Free is first what is missing, then twice as much each time; where nothing is found so, less.
    """

    def tried(spare_bytes: int) -> Plan | None:
        try:
            found = space.with_bytes(search(replace(space, spare_bytes=spare_bytes)))
        except PlanError:
            return None
        free = f"; {format_bytes(spare_bytes)} of a worker's memory were kept free for messages"
        return replace(found, note=f"{found.note}{free if spare_bytes else ''}")

    too_little, enough, found = 0, 0, tried(0)
    while found is not None and found.overfull is not None:
        yield found
        too_little, enough = enough, enough + max(enough, _missing_bytes(space, found))
        found = tried(enough)
    if found is not None:
        yield found
    for _ in range(_STEPS if enough else 0):
        middle = (too_little + enough) // 2
        found = tried(middle)
        if found is not None:
            yield found
        if found is not None and found.overfull is not None:
            too_little = middle
        else:
            enough = middle


def _missing_bytes(space: Space, plan: Plan) -> int:
    limits = [space.memory_bytes(plan, s) for s in range(len(plan.stages))]
    return max(stage.peak_bytes - (limit or stage.peak_bytes) for stage, limit in zip(plan.stages, limits, strict=True))


def counts_of(shape: str | tuple[int, ...]) -> tuple[int, ...]:
    """Reads replica counts: '2-1' or (2, 1). Raises PlanError."""
    try:
        counts = tuple(int(part) for part in (shape.split("-") if isinstance(shape, str) else shape))
    except ValueError:
        counts = ()
    if not counts or min(counts) < 1:
        raise PlanError(
            f"shape {shape!r} is not known; write {', '.join(SHAPES)} or the replicas of each stage as in 2-1"
        )
    return counts


def _parallel(lines: PipelineSearch) -> Plan:
    workers = lines.workers
    found = lines.whole((workers,)) or refuse(lines.shortage_of_counts((workers,)), "data-parallel plans")
    return replace(found, note=f"data parallelism was asked{_beside(found, lines, (1,))}")


def _of_counts(lines: PipelineSearch, counts: tuple[int, ...]) -> Plan:
    """The best plan with these replicas of its stages."""
    is_straight = max(counts) == 1
    kind, sizes = ("straight pipeline", f" of {len(counts)} stages") if is_straight else ("plan", f" {_config(counts)}")
    _check_counts(lines.space, counts, f"a {kind}{sizes}")
    found = lines.of_counts(counts) or refuse(lines.shortage_of_counts(counts), f"{kind}s{sizes}")
    rivals = [] if is_straight else [lines.straight()]
    kinds = f"{kind}s{sizes}{lines.where}"
    best = "best found" if lines.space.spare_bytes else "optimal"
    return replace(found, note=f"{best} among {kinds}{_beside(found, lines, (lines.workers,), rivals)}")


def _fastest(lines: PipelineSearch, as_pipeline: bool, all_workers: bool) -> Plan:
    """The fastest plan of all, or of those with several stages where there can be any."""
    workers = lines.workers
    one = lines.whole((workers,) if all_workers else range(1, workers + 1))
    longest = min(len(lines.space.positions) - 1, workers)
    if longest < 2:
        found = one or refuse(lines.shortage_of_counts((workers,)), "plans of one stage")
        if workers == 1:
            return replace(found, note="one worker")
        note = f"the model cannot be cut; fastest of its plans of one stage{_beside(found, lines, (workers, 1))}"
        return replace(found, note=note)

    pipeline, straight = lines.pipeline(all_workers), lines.straight()
    sizes = "2" if longest == 2 else f"2 to {longest}"
    kinds = f"pipelines of {sizes} stages{f' on {workers} workers' if all_workers else ''}"
    if as_pipeline:
        found = pipeline or refuse(lines.shortage_of_pipelines(all_workers), kinds)
        best = f"{lines.best} among {kinds}{lines.where}"
        return replace(found, note=f"{best}{_beside(found, lines, (workers,), [straight])}")
    # One stage sends nothing over boundaries, so it comes first and wins ties.
    best_of_all = min((found for found in (one, pipeline) if found is not None), key=_seconds, default=None)
    kinds = f"{'' if all_workers else 'one worker, '}data parallelism and {kinds}"
    if best_of_all is None:
        short = min(
            lines.shortage_of_counts((workers,)),
            lines.shortage_of_pipelines(all_workers),
            key=lambda shortage: shortage.missing_bytes,
        )
        refuse(short, f"plans ({kinds})")
    bounds = [found.bound_s for found in (one, pipeline) if found is not None]
    found = replace(best_of_all, bound_s=min(bounds))
    beside = _beside(found, lines, (workers, 1), [pipeline, straight])
    return replace(found, note=f"fastest predicted among {kinds}{lines.where}{beside}")


def _check_counts(space: Space, counts: tuple[int, ...], what: str) -> None:
    workers, longest = space.cluster.workers, len(space.positions) - 1
    if sum(counts) > workers:
        raise PlanError(
            f"{what} was asked, it takes {sum(counts)} workers, the cluster has {workers}; ask for fewer or give more "
            "workers"
        )
    if len(counts) > longest:
        raise PlanError(
            f"{what} was asked, the model's {len(space.profile.layers)} layers can be cut at {longest - 1} places; ask "
            f"for at most {longest} stages, or profile it in finer layers"
        )


def _seconds(plan: Plan) -> float:
    return plan.slowest_stage_s


def _config(counts: tuple[int, ...]) -> str:
    return "-".join(map(str, counts))


def _beside(best: Plan, lines: PipelineSearch, ones: Iterable[int], pipelines: Iterable[Plan | None] = ()) -> str:
    """What the next best kinds would take: one stage on so many workers, and pipelines that were found."""
    rivals = {str(count): lines.whole((count,)) for count in ones}
    rivals |= {plan.config: plan for plan in pipelines if plan is not None}
    told = [""]
    for config, plan in rivals.items():
        if config == best.config:
            continue
        counts = config.split("-")
        what = f"data parallelism on {config} workers" if len(counts) == 1 else f"the pipeline {_short(config)}"
        if set(counts) == {"1"}:
            what = "one worker" if len(counts) == 1 else f"a straight pipeline of {len(counts)} stages"
        if plan is None:
            told.append(f"{what} does not fit the memory")
        else:
            told.append(f"{what} is predicted at {format_seconds(plan.slowest_stage_s)} per minibatch")
    return "; ".join(told)


def _short(config: str) -> str:
    return config if len(config) <= 60 else f"{config[:57]}..."
