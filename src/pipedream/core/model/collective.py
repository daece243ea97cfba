"""Collectives among the ranks of a mesh inside a stage: predicted, and in a run."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from pipedream.core.units import format_bytes

EXCHANGE = "exchange"
"""The kind of a layout that was found: each rank sends others the pieces that they lack."""


@dataclass(frozen=True)
class Collective:
    """All collectives of one kind over one dimension of a mesh, in a pass or an update.

    Attributes:
        kind: all-reduce, all-gather, reduce-scatter, all-to-all or exchange.
        over: the dimension, or several joined by +.
        count: number of them.
        size_bytes: their sum; for each, the greater of what a rank gives and gets.
        of_weights: whether it moves weights or their gradients, so that they are the same for any number of samples.
    """

    kind: str
    over: str
    count: int
    size_bytes: int
    of_weights: bool = False

    @classmethod
    def sums(cls, rows: Iterable[Collective]) -> tuple[Collective, ...]:
        """Returns one of each kind, in a fixed order."""
        totals: dict[tuple[str, str, bool], list[int]] = {}
        for row in rows:
            total = totals.setdefault((row.kind, row.over, row.of_weights), [0, 0])
            total[0] += row.count
            total[1] += row.size_bytes
        return tuple(
            cls(kind, over, count, size_bytes, weights)
            for (kind, over, weights), (count, size_bytes) in sorted(totals.items())
        )

    def __str__(self) -> str:
        return f"{self.count} {self.kind} over {self.over}, {format_bytes(self.size_bytes)}"


Passes = dict[str, tuple[Collective, ...]]


@dataclass(frozen=True)
class StageCollectives:
    """Those of a stage's first microbatch and of its first update, at the first rank of its mesh.

    Attributes:
        measured: "forward", "backward" and "update" -> one of each kind and dimension; in a backward also those of the
            recomputation.
        predicted: the same, of the stage run without data; None if it cannot run so.
        problem: why it cannot.
    """

    measured: Passes
    predicted: Passes | None = None
    problem: str = ""
