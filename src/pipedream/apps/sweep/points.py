"""One model with several methods, over worker counts and bandwidths."""

from dataclasses import asdict, dataclass
from typing import Any

from pipedream.core.tabular import Tabular, align
from pipedream.core.units import format_bytes, format_number, format_rate

DATA_PARALLEL = "data parallel"
"""Name of the row to which every method is compared."""


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
        """Returns a row for each point."""
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
