"""Collectives among the ranks of a mesh inside a stage, predicted or measured."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from pipedream.core.units import format_bytes

EXCHANGE = "exchange"
"""Kind of collective in searched layouts: each rank sends others the pieces that they lack."""


@dataclass(frozen=True)
class Collective:
    """All collectives of one kind over one dimension of a mesh, in a pass or an update.

    Attributes:
        kind: all-reduce, all-gather, reduce-scatter, all-to-all or exchange.
        over: the dimension, or several joined by +.
        count: number of collectives.
        size_bytes: their sum; each counts the greater of the bytes that a rank contributes and receives.
        of_weights: they move weights or their gradients, so their bytes do not depend on the samples.
    """

    kind: str
    over: str
    count: int
    size_bytes: int
    of_weights: bool = False

    @classmethod
    def sums(cls, rows: Iterable[Collective]) -> tuple[Collective, ...]:
        """Returns the sum of each kind, in a fixed order."""
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
    """Collectives of a stage's first microbatch and first update, at the first rank of its mesh.

    Attributes:
        measured: "forward", "backward" and "update" -> one of each kind and dimension; a backward includes those of its
            recomputation.
        predicted: the same, of the stage run without data; None if that fails.
        problem: why it fails.
    """

    measured: Passes
    predicted: Passes | None = None
    problem: str = ""
