"""The DelayComparison: one recipe trained by several methods on one machine, each as stale as on several."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

from pipedream.core.display import Tabular, align
from pipedream.core.units import format_number, format_seconds


@dataclass(frozen=True)
class DelayedRun:
    """One method's training so far.

    Attributes:
        method: with its compensation, as a phase is written (`core.schedule.phase`).
        predicted_per_s: samples per second of its plan, by simulation.
        losses: one for each minibatch, each of which is an update.
        metrics: of the last evaluation; empty if there is no test loader.
        why: the error that ended it; else ''.
    """

    method: str
    flushes: bool
    predicted_per_s: float
    losses: tuple[float, ...] = ()
    metrics: dict[str, float] = field(default_factory=dict)
    is_finished: bool = False
    why: str = ""


@dataclass(frozen=True, repr=False)
class DelayComparison(Tabular):
    """The runs; the first flushes, so it trains as one process does.

    Attributes:
        batch: samples of a minibatch.
        link: description of the network.
    """

    recipe: str
    stages: int
    batch: int
    link: str
    runs: tuple[DelayedRun, ...]

    def predict_s(self, run: DelayedRun, updates: int) -> float:
        """Returns the predicted seconds of a number of updates."""
        return updates * self.batch / run.predicted_per_s

    def average_losses(self, run: DelayedRun) -> list[float]:
        """Returns the moving average of the losses, over a tenth of the first run's updates."""
        window = max(1, min(len(self.runs[0].losses) // 10, len(run.losses)))
        sums = list(accumulate(run.losses, initial=0.0))
        return [(after - before) / window for before, after in zip(sums, sums[window:], strict=False)]

    def reach_reference(self, run: DelayedRun) -> float | None:
        """Returns the predicted seconds until a run reaches the first run's final mean loss; None if it never does."""
        reference = self.average_losses(self.runs[0])[-1:]
        means = self.average_losses(run)
        first_index = next((i for i, mean in enumerate(means) if reference and mean <= reference[0]), None)
        return None if first_index is None else self.predict_s(run, len(run.losses) - len(means) + first_index + 1)

    def rows(self) -> list[dict[str, Any]]:
        """Returns a row for each run; its loss is the last mean."""
        return [
            {
                "method": run.method,
                "flushes": run.flushes,
                "updates": len(run.losses),
                "loss": means[-1] if (means := self.average_losses(run)) else None,
                "metrics": run.metrics,
                "predicted_per_s": run.predicted_per_s,
                "predicted_s": self.predict_s(run, len(run.losses)),
                "predicted_s_to_reference": self.reach_reference(run),
                "is_finished": run.is_finished,
                "why": run.why,
            }
            for run in self.runs
        ]

    @property
    def heads(self) -> tuple[str, ...]:
        """The columns of `cells`."""
        names = dict.fromkeys(f"test {name}" for run in self.runs for name in run.metrics)
        last = f"s to {self.runs[0].method}'s loss"
        return "method", "updates", "loss", *names, "predicted samples/s", "s", last

    def cells(self) -> list[tuple[str, ...]]:
        """Returns the rows in words; '-' where a figure is not known."""
        names = [head.removeprefix("test ") for head in self.heads[3:-3]]
        return [
            (
                row["method"],
                str(row["updates"]),
                *map(format_number, (row["loss"], *map(row["metrics"].get, names))),
                *(format_number(row[key]) for key in ("predicted_per_s", "predicted_s", "predicted_s_to_reference")),
            )
            for row in self.rows()
        ]

    @property
    def verdict(self) -> str:
        """One sentence: which method is predicted to reach the first run's loss first."""
        if not all(run.is_finished for run in self.runs):
            return "Not all methods have finished: the same command, with this folder as --out, continues."
        seconds = {run.method: s for run in self.runs if (s := self.reach_reference(run)) is not None}
        if not seconds:
            return "Nothing was trained."
        best, reference = min(seconds, key=seconds.__getitem__), self.runs[0].method
        loss = "its own loss" if best == reference else f"the loss of {reference}"
        text = f"over {self.link}, {best} is predicted to be the first at {loss}"
        also = "" if best == reference else f"; {reference} takes {format_seconds(seconds[reference])}"
        return f"On {self.stages} workers {text}, after {format_seconds(seconds[best])}{also}."

    def reasons(self) -> tuple[str, ...]:
        """Returns a sentence for each run that an error has ended."""
        return tuple(f"{run.method} ended after {len(run.losses)} updates: {run.why}" for run in self.runs if run.why)

    def __str__(self) -> str:
        heading = f"{self.recipe} in {self.stages} stages, each minibatch an update, seconds over {self.link}"
        notes = [f"note: {reason}" for reason in self.reasons()]
        return "\n".join([heading, align([self.heads, *self.cells()]), *notes, "", self.verdict])
