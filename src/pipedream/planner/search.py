"""The planner's front: of one worker, data parallelism and pipelines, whatever is asked for or predicted fastest.

The predicted seconds are those of a full pipeline whose messages are hidden behind compute, which takes
the depth ``full``; at the paper's depth more may show (`core.depth`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

from ..core.cluster import Cluster
from ..core.errors import PlanError
from ..core.plan import Plan
from ..core.profile import Profile
from ..core.units import format_seconds
from .dynamic import Pipelines, check_fits, of_counts, replicated, straights
from .space import Holds, Space, Versions, stash

__all__ = ["SHAPES", "counts_of", "plan"]

SHAPES = ("any", "pipeline", "straight", "data-parallel")
"""What may be asked for, beside replica counts."""


def plan(
    profile: Profile,
    cluster: Cluster,
    *,
    versions: Versions = stash,
    holds: Holds | None = None,
    microbatches: int = 1,
    depth: str | tuple[int, ...] = "noam",
    shape: str | tuple[int, ...] = "any",
    lag: int = 0,
    all_workers: bool = False,
) -> Plan:
    """Finds the plan with the smallest predicted seconds per minibatch.

    Equal seconds go to fewer bytes sent over boundaries, then fewer stages, then fewer workers, then the plan
    that is smallest, stage by stage, in (last layer, replicas).

    Args:
        versions: versions of the weights that a stage holds, from its count in flight and its lag.
        holds: what the method holds of what is admitted; None: all of it, in so many `versions`. Where this depends on
            the whole plan (vertical sync), the search takes the least, and the memory is checked again.
        microbatches: parts that a minibatch is split into.
        depth: applied to the plan found at the paper's depth; memory is checked again at it.
        shape: 'any' compares one worker, data parallelism and pipelines whose stages may be replicated;
            'pipeline' takes at least two stages, if the model and the workers allow them; 'straight' exactly
            one stage for each worker; 'data-parallel' one stage on all workers; and replica counts, as '2-1'
            or (2, 1), stages of these.
        lag: of the replicated stages of a pipeline: 1 puts their updates behind the next forward.
        all_workers: 'any' and 'pipeline' leave no worker without work.

    Raises:
        PlanError: an unknown shape, more stages than the model can be cut into, more workers than there are, or
            nothing fits the memory at this depth.
    """
    space = Space.of(profile, cluster, versions=versions, lag=lag, microbatches=microbatches, holds=holds)
    if shape in ("any", "pipeline"):
        found = _fastest(space, shape == "pipeline", all_workers)
    elif shape == "data-parallel":
        found = _parallel(space)
    elif shape == "straight":
        found = _of_counts(space, (1,) * cluster.workers)
    else:
        found = _of_counts(space, counts_of(shape))
    return space.at_depth(found, depth)


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


def _parallel(space: Space) -> Plan:
    workers = space.cluster.workers
    found = _or_refuse(_whole(space, workers), space, lambda: _whole_bytes(space), "data-parallel plans")
    return replace(found, note=f"data parallelism was asked{_beside(found, space, (1,))}")


def _of_counts(space: Space, counts: tuple[int, ...]) -> Plan:
    """The best plan with these replicas of its stages."""
    is_straight = max(counts) == 1
    kind, sizes = ("straight pipeline", f" of {len(counts)} stages") if is_straight else ("plan", f" {_config(counts)}")
    _check_counts(space, counts, f"a {kind}{sizes}")
    pipelines = Pipelines(space, of_counts(counts), ((sum(counts), counts[0]),))
    found = _or_refuse(pipelines.best(), space, lambda: pipelines.least_bytes, f"{kind}s{sizes}")
    rivals = [] if is_straight else [_straight(space)]
    return replace(found, note=f"optimal among {kind}s{sizes}{_beside(found, space, (space.cluster.workers,), rivals)}")


def _fastest(space: Space, as_pipeline: bool, all_workers: bool) -> Plan:
    """The fastest plan of all, or of those with several stages where there can be any."""
    workers = space.cluster.workers
    ones = [_whole(space, count) for count in ((workers,) if all_workers else range(1, workers + 1))]
    one = min((found for found in ones if found is not None), key=_seconds, default=None)  # of equals the first
    longest = min(len(space.positions) - 1, workers)
    if longest < 2:
        found = _or_refuse(one, space, lambda: _whole_bytes(space), "plans of one stage")
        if workers == 1:
            return replace(found, note="one worker")
        note = f"the model cannot be cut; fastest of its plans of one stage{_beside(found, space, (workers, 1))}"
        return replace(found, note=note)

    states = replicated(workers)
    starts = tuple(state for state in states if state[0] == workers) if all_workers else None
    pipelines = Pipelines(space, states, starts, whole=False)
    pipeline, straight = pipelines.best(), _straight(space)
    sizes = "2" if longest == 2 else f"2 to {longest}"
    kinds = f"pipelines of {sizes} stages{f' on {workers} workers' if all_workers else ''}"
    if as_pipeline:
        found = _or_refuse(pipeline, space, lambda: pipelines.least_bytes, kinds)
        return replace(found, note=f"optimal among {kinds}{_beside(found, space, (workers,), [straight])}")
    # One stage sends nothing over boundaries, so it comes first and wins ties.
    best = min((found for found in (one, pipeline) if found is not None), key=_seconds, default=None)
    kinds = f"{'' if all_workers else 'one worker, '}data parallelism and {kinds}"
    found = _or_refuse(best, space, lambda: min(_whole_bytes(space), pipelines.least_bytes), f"plans ({kinds})")
    beside = _beside(found, space, (workers, 1), [pipeline, straight])
    return replace(found, note=f"fastest predicted among {kinds}{beside}")


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


def _or_refuse(found: Plan | None, space: Space, least_bytes: Callable[[], int], what: str) -> Plan:
    if found is None:
        check_fits(min_need_bytes=least_bytes(), space=space, what=what)
    assert found is not None
    return found


def _straight(space: Space) -> Plan | None:
    """The fastest straight pipeline of at least two stages; None where there is none, or none fits."""
    longest = min(len(space.positions) - 1, space.cluster.workers)
    return Pipelines(space, straights(longest), whole=False).best() if longest > 1 else None


def _whole(space: Space, workers: int) -> Plan | None:
    limit = space.cluster.memory_bytes
    return None if limit is not None and _whole_bytes(space, workers) > limit else space.plan((), (workers,))


def _whole_bytes(space: Space, workers: int | None = None) -> int:
    count = space.cluster.workers if workers is None else workers
    return int(space.need_bytes(0, len(space.profile.layers), 1, replicas=count))


def _seconds(plan: Plan) -> float:
    return plan.slowest_stage_s


def _config(counts: tuple[int, ...]) -> str:
    return "-".join(map(str, counts))


def _beside(best: Plan, space: Space, ones: Iterable[int], pipelines: Iterable[Plan | None] = ()) -> str:
    """What the next best kinds would take: one stage on so many workers, and pipelines that were found."""
    rivals = {str(count): _whole(space, count) for count in ones}
    rivals |= {plan.config: plan for plan in pipelines if plan is not None}
    lines = [""]
    for config, plan in rivals.items():
        if config == best.config:
            continue
        counts = config.split("-")
        what = f"data parallelism on {config} workers" if len(counts) == 1 else f"the pipeline {config}"
        if set(counts) == {"1"}:
            what = "one worker" if len(counts) == 1 else f"a straight pipeline of {len(counts)} stages"
        if plan is None:
            lines.append(f"{what} does not fit the memory")
        else:
            lines.append(f"{what} is predicted at {format_seconds(plan.slowest_stage_s)} per minibatch")
    return "; ".join(lines)
