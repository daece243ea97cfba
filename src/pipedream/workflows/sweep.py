"""Sweeps over numbers of workers, bandwidths and methods, and where pipelines overtake data parallelism.

Each point is planned and then simulated to its steady state. Data parallelism is PipeDream's one-stage plan, whose
all-reduces start during the backward, as in PyTorch's DistributedDataParallel.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import inf, sqrt

from pipedream.core.errors import PipelineError, PlanError
from pipedream.core.model.profile import Profile
from pipedream.core.progress import progress
from pipedream.core.sweep import DATA_PARALLEL, Crossover, Point, Sweep
from pipedream.plan_request import AUTO, PlanRequest
from pipedream.schedules import canonical
from pipedream.workflows.methods import score, select_methods
from pipedream.workflows.plan import make_plan

_SLOWEST, _FASTEST = 1e4, 1e14  # bytes per second, between which crossovers are searched
_NEAR = 1.01  # ratio of the two bandwidths at which the search stops


def sweep(
    profile: Profile,
    request: PlanRequest,
    *,
    workers: Sequence[int],
    bandwidths: Sequence[float],
    schedules: Sequence[str],
    crossovers: bool = True,
) -> Sweep:
    """Predicts each method on each number of workers at each bandwidth.

    Args:
        request: for every point. Its cluster has one level, whose latency and memory count; microbatches are for the
            methods that split minibatches.
        bandwidths: in bytes per second.
        schedules: names of methods, or 'auto'.
        crossovers: search for them, which takes about twenty plans each.

    Raises:
        PlanError: no values, a worker count below one, or a cluster of several levels.
        ScheduleError: an unknown method.
    """
    if not (workers and bandwidths and schedules) or min(workers) < 1 or min(bandwidths) <= 0:
        raise PlanError("a sweep needs at least one worker count from 1 on, one bandwidth above 0 and one method")
    method_names = [name for name in schedules if name != AUTO]
    methods = select_methods(method_names) if method_names else {}  # raises for an unknown name, before any point
    if not request.workers_and_links.is_flat:
        raise PlanError(
            f"a sweep needs equal workers and one level of links, found {request.cluster}; give such a cluster"
        )
    unsplit = {name for name in method_names if not methods[canonical(name)].splits_minibatch}
    predictor = _Predictor(profile, request, frozenset(unsplit))
    names = (DATA_PARALLEL, *dict.fromkeys(schedules))
    points, changes = [], []
    pairs = list(product([count for count in workers if count > 1 and crossovers], names[1:]))
    with progress("sweeping", len(workers) * len(bandwidths) * len(names) + len(pairs)) as advance:
        for setting in product(workers, bandwidths, names):
            points.append(predictor.predict(*setting))
            advance()
        for count, name in pairs:
            if any(point.samples_per_s for point in points if (point.workers, point.schedule) == (count, name)):
                changes.append(predictor.find_crossover(count, name))
            advance()
    return Sweep(profile.model, tuple(points), tuple(changes))


@dataclass(frozen=True)
class _Predictor:
    """Plans and simulates points.

    Attributes:
        unsplit: methods that do not split minibatches.
    """

    profile: Profile
    request: PlanRequest
    unsplit: frozenset[str]

    def predict(self, workers: int, bytes_per_s: float, schedule: str) -> Point:
        point = Point(workers, bytes_per_s, schedule)
        try:
            plan = make_plan(self.profile, self._make_request(workers, bytes_per_s, schedule))
            result = score(plan)
        except PipelineError as error:
            return replace(point, why=str(error))
        return replace(
            point,
            config=plan.config,
            microbatches=plan.microbatches,
            samples_per_s=plan.batch / result.period_s if result.period_s else inf,
            bubble=result.bubble,
            peak_bytes=max(stage.peak_bytes for stage in plan.stages),
        )

    def find_crossover(self, workers: int, schedule: str) -> Crossover:
        """Bisects the logarithm of the bandwidth where the method's lead over data parallelism changes its sign."""

        def leads(bytes_per_s: float) -> bool:
            pipeline, parallel = (
                self.predict(workers, bytes_per_s, name).samples_per_s for name in (schedule, DATA_PARALLEL)
            )
            return (pipeline or 0.0) > (parallel or 0.0)

        low, high = _SLOWEST, _FASTEST
        below = leads(low)
        if below == leads(high):
            return Crossover(workers, schedule, None, below)
        while high / low > _NEAR:
            middle = sqrt(low * high)
            if leads(middle) == below:
                low = middle
            else:
                high = middle
        return Crossover(workers, schedule, sqrt(low * high), below)

    def _make_request(self, workers: int, bytes_per_s: float, schedule: str) -> PlanRequest:
        cluster = self.request.workers_and_links
        level = replace(cluster.levels[0], width=workers, bandwidth_bytes_per_s=bytes_per_s, sizes=())
        cluster = replace(cluster, levels=(level,))
        if schedule == DATA_PARALLEL:
            return PlanRequest(cluster, shape="data-parallel")
        return replace(
            self.request,
            cluster=cluster,
            schedule=schedule,
            microbatches=None if schedule in self.unsplit else self.request.microbatches,
            allow_asynchronous=self.request.allow_asynchronous and schedule == AUTO,
        )
