"""Sweeps over numbers of workers, bandwidths and methods, and where pipelines overtake data parallelism.

Each point is planned and then simulated to its steady state. Data parallelism is PipeDream's one-stage plan, whose
all-reduces start during the backward, as in PyTorch's DistributedDataParallel.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import inf, sqrt

from pipedream.core.errors import PipelineError, PlanError
from pipedream.core.hardware.cluster import Cluster
from pipedream.core.model.profile import Profile
from pipedream.core.sweep import DATA_PARALLEL, Crossover, Point, Sweep
from pipedream.schedules import canonical
from pipedream.workflows.methods import score, select_methods
from pipedream.workflows.plan import plan as make_plan

_SLOWEST, _FASTEST = 1e4, 1e14  # bytes per second, between which crossovers are searched
_NEAR = 1.01  # ratio of the two bandwidths at which the search stops


def sweep(
    profile: Profile,
    cluster: Cluster,
    *,
    workers: Sequence[int],
    bandwidths: Sequence[float],
    schedules: Sequence[str],
    microbatches: int | None = None,
    in_flight: str | tuple[int, ...] = "noam",
    shape: str = "pipeline",
    allow_asynchronous: bool = False,
    crossovers: bool = True,
) -> Sweep:
    """Predicts each method on each number of workers at each bandwidth.

    Args:
        cluster: of one level; its latency and memory apply to every point.
        bandwidths: in bytes per second.
        schedules: names of methods, or 'auto'.
        microbatches: m, for the methods that split minibatches.
        in_flight, shape, allow_asynchronous: see `workflows.plan.plan`.
        crossovers: search for them, which takes about twenty plans each.

    Raises:
        PlanError: no values, a worker count below one, or a cluster of several levels.
        ScheduleError: an unknown method.
    """
    if not (workers and bandwidths and schedules) or min(workers) < 1 or min(bandwidths) <= 0:
        raise PlanError("a sweep needs at least one worker count from 1 on, one bandwidth above 0 and one method")
    method_names = [name for name in schedules if name != "auto"]
    methods = select_methods(method_names) if method_names else {}  # raises for an unknown name, before any point
    whole = {DATA_PARALLEL, *(name for name in method_names if not methods[canonical(name)].splits_minibatch)}
    if not cluster.is_flat:
        raise PlanError(f"a sweep needs equal workers and one level of links, found {cluster}; give such a cluster")
    level = cluster.levels[0]

    def point(count: int, rate: float, schedule: str) -> Point:
        joined = replace(cluster, levels=(replace(level, width=count, bandwidth_bytes_per_s=rate, sizes=()),))
        parallel = schedule == DATA_PARALLEL
        empty = Point(count, rate, schedule)
        try:
            plan = make_plan(
                profile,
                joined,
                schedule="pipedream" if parallel else schedule,
                microbatches=None if schedule in whole else microbatches,
                in_flight="noam" if parallel else in_flight,
                shape="data-parallel" if parallel else shape,
                allow_asynchronous=allow_asynchronous,
            )
            result = score(plan)
        except PipelineError as error:
            return replace(empty, why=str(error))
        return replace(
            empty,
            config=plan.config,
            microbatches=plan.microbatches,
            samples_per_s=plan.batch / result.period_s if result.period_s else inf,
            bubble=result.bubble,
            peak_bytes=max(stage.peak_bytes for stage in plan.stages),
        )

    names = (DATA_PARALLEL, *dict.fromkeys(schedules))
    points = [point(*row) for row in ((w, b, name) for w in workers for b in bandwidths for name in names)]
    changes = []
    for count in (count for count in workers if count > 1 and crossovers):
        for name in names[1:]:
            if not any(row.samples_per_s for row in points if (row.workers, row.schedule) == (count, name)):
                continue

            def lead(rate: float, count: int = count, name: str = name) -> float:
                ours, theirs = point(count, rate, name).samples_per_s, point(count, rate, DATA_PARALLEL).samples_per_s
                return (ours or 0.0) - (theirs or 0.0)

            changes.append(_find_crossover(count, name, lead))
    return Sweep(profile.model, tuple(points), tuple(changes))


def _find_crossover(workers: int, schedule: str, lead: Callable[[float], float]) -> Crossover:
    """Bisects the logarithm of the bandwidth where the lead changes."""
    low, high = _SLOWEST, _FASTEST
    below, above = lead(low) > 0, lead(high) > 0
    if below == above:
        return Crossover(workers, schedule, None, below)
    while high / low > _NEAR:
        middle = sqrt(low * high)
        if (lead(middle) > 0) == below:
            low = middle
        else:
            high = middle
    return Crossover(workers, schedule, sqrt(low * high), below)
