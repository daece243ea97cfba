"""Methods side by side on equal workers."""

from dataclasses import asdict, dataclass
from typing import Any

from pipedream.core.tabular import Tabular, align
from pipedream.core.units import format_seconds


@dataclass(frozen=True)
class MethodFigures:
    """A method on equal workers, simulated from an empty pipeline to an empty one.

    Attributes:
        activations, weights: of the fullest worker, in units of 1F1B's first stage (`schedules.first_stage_units`).
        messages: activations, gradients and weights sent, for each microbatch.
        staleness: of the stalest gradient, in updates; None without gradients.
        why: why there are no figures; else ''.
    """

    schedule: str
    microbatches: int = 0
    makespan_s: float | None = None
    bubble: float | None = None
    activations: float | None = None
    weights: float | None = None
    messages: float | None = None
    staleness: int | None = None
    why: str = ""


@dataclass(frozen=True, repr=False)
class MethodComparison(Tabular):
    """Methods side by side."""

    workers: int
    methods: tuple[MethodFigures, ...]

    def rows(self) -> list[dict[str, Any]]:
        """Returns a row for each method."""
        return [asdict(method) for method in self.methods]

    def __repr__(self) -> str:
        return f"<MethodComparison of {len(self.methods)} methods on {self.workers} workers>"

    def __str__(self) -> str:
        heads = ("microbatches", "makespan", "bubble", "activations", "weights", "messages", "staleness")
        rows: list[tuple[str, ...]] = [("method", *heads, "")]
        for method in self.methods:
            values = method.activations, method.weights, method.messages, method.staleness
            cells = (
                "-" if method.why else str(method.microbatches),
                "-" if method.makespan_s is None else format_seconds(method.makespan_s),
                "-" if method.bubble is None else f"{method.bubble:.1%}",
                *("-" if value is None else f"{value:.4g}" for value in values),
            )
            rows.append((method.schedule, *cells, f"({method.why})" * bool(method.why)))
        return (
            f"{align(rows, 'lrrrrrrrl')}\nactivations and weights: the fullest worker's, in units of the first stage's "
            "under 1F1B; messages: for each microbatch"
        )
