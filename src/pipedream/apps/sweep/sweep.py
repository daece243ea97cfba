"""Sweeps numbers of workers, bandwidths and methods, and finds where pipelines overtake data parallelism.

Each point is planned and then simulated to its steady state. Data parallelism is PipeDream's one-stage plan, whose
all-reduces start during the backward, as in PyTorch's DistributedDataParallel.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from math import inf, sqrt
from typing import Any

from pipedream.core.errors import PipelineError, PlanError
from pipedream.core.model.profile import Profile
from pipedream.core.progress import progress
from pipedream.core.tabular import Tabular, align
from pipedream.core.units import format_bytes, format_number, format_rate
from pipedream.plan_request import AUTO, PlanRequest
from pipedream.schedules import canonical
from pipedream.workflows.methods import score, select_methods
from pipedream.workflows.plan import make_plan

DATA_PARALLEL = "data parallel"
"""Name of the row to which every method is compared."""
_MIN_BYTES_PER_S, _MAX_BYTES_PER_S = 1e4, 1e14  # between which crossovers are searched
_STOP_RATIO = 1.01  # ratio of the two bandwidths at which the search stops


@dataclass(frozen=True)
class Point:
    """A method on a number of workers at a bandwidth.

    Attributes:
        config, microbatches: '' and 1 without a plan.
        samples_per_s, bubble: simulated; None without a plan.
        peak_bytes: peak of the fullest worker.
        why: why there is no plan; else ''.
    """

    workers: int
    bandwidth_bytes_per_s: float
    schedule: str
    config: str = ""
    microbatches: int = 1
    samples_per_s: float | None = None
    bubble: float | None = None
    peak_bytes: int = 0
    why: str = ""


@dataclass(frozen=True)
class Crossover:
    """The bandwidth at which a method's pipelines overtake data parallelism.

    Attributes:
        bandwidth_bytes_per_s: where both are equally fast; None if nowhere.
        below: the pipeline is faster below that bandwidth, else above it; without one, everywhere, else nowhere.
    """

    workers: int
    schedule: str
    bandwidth_bytes_per_s: float | None
    below: bool

    def __str__(self) -> str:
        faster = f"{self.workers} workers: {self.schedule} is faster than data parallelism"
        if self.bandwidth_bytes_per_s is not None:
            return f"{faster} {'below' if self.below else 'above'} {format_rate(self.bandwidth_bytes_per_s)}"
        return f"{faster} at {'every' if self.below else 'no'} bandwidth"


@dataclass(frozen=True, repr=False)
class Sweep(Tabular):
    """All points, and the crossovers of each worker count."""

    model: str
    points: tuple[Point, ...]
    crossovers: tuple[Crossover, ...]

    def rows(self) -> list[dict[str, Any]]:
        return [asdict(point) for point in self.points]

    def __repr__(self) -> str:
        methods = len({point.schedule for point in self.points})
        return f"<Sweep of {self.model}: {methods} methods, {len(self.points)} points>"

    def __str__(self) -> str:
        rows = [("workers", "bandwidth", "method", "plan", "m", "samples/s", "bubble", "peak", "")]
        for point in self.points:
            figures = ("-", "-", "-", "-", "-", f"({point.why.split(';')[0]})")
            if point.samples_per_s is not None and point.bubble is not None:
                rate, peak = format_number(point.samples_per_s), format_bytes(point.peak_bytes)
                figures = (point.config, str(point.microbatches), rate, f"{point.bubble:.1%}", peak, "")
            rows.append((str(point.workers), format_rate(point.bandwidth_bytes_per_s), point.schedule, *figures))
        return "\n".join([align(rows, "rrllrrrrl"), "", *map(str, self.crossovers)])


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
    points, crossings = [], []
    pairs = list(product([count for count in workers if count > 1 and crossovers], names[1:]))
    with progress("sweeping", len(workers) * len(bandwidths) * len(names) + len(pairs)) as advance:
        for setting in product(workers, bandwidths, names):
            points.append(predictor.predict(*setting))
            advance()
        for count, name in pairs:
            if any(point.samples_per_s for point in points if (point.workers, point.schedule) == (count, name)):
                crossings.append(predictor.find_crossover(count, name))
            advance()
    return Sweep(profile.model, tuple(points), tuple(crossings))


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

        def is_faster(bytes_per_s: float) -> bool:
            pipeline, parallel = (
                self.predict(workers, bytes_per_s, name).samples_per_s for name in (schedule, DATA_PARALLEL)
            )
            return (pipeline or 0.0) > (parallel or 0.0)

        low, high = _MIN_BYTES_PER_S, _MAX_BYTES_PER_S
        leads_at_low = is_faster(low)
        if leads_at_low == is_faster(high):
            return Crossover(workers, schedule, None, leads_at_low)
        while high / low > _STOP_RATIO:
            middle = sqrt(low * high)
            if is_faster(middle) == leads_at_low:
                low = middle
            else:
                high = middle
        return Crossover(workers, schedule, sqrt(low * high), leads_at_low)

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
