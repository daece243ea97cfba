"""The Sweep: one model with several methods, numbers of workers and bandwidths."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from pipedream.core.display import Tabular
from pipedream.core.units import format_bytes, format_number, format_rate

DATA_PARALLEL = "data parallel"
"""Name of the row that every method is compared with."""


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
        below: the pipeline is faster below that bandwidth, otherwise above it, or else everywhere or nowhere.
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
        head = f"{'workers':>7}  {'bandwidth':>10}  {'method':<24}  {'plan':<12}  {'m':>3}  {'samples/s':>9}  "
        lines = [f"{head}{'bubble':>6}  {'peak':>9}"]
        for point in self.points:
            start = f"{point.workers:>7}  {format_rate(point.bandwidth_bytes_per_s):>10}  {point.schedule:<24}  "
            if point.samples_per_s is None or point.bubble is None:
                lines.append(f"{start}-  ({point.why.split(';')[0]})")
            else:
                lines.append(
                    f"{start}{point.config:<12}  {point.microbatches:>3}  {format_number(point.samples_per_s):>9}  "
                    f"{point.bubble:>6.1%}  "
                    f"{format_bytes(point.peak_bytes):>9}"
                )
        return "\n".join([*lines, "", *map(str, self.crossovers)])
