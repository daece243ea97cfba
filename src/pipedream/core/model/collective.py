"""The Collective: what the ranks of a mesh exchange inside a stage."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from pipedream.core.units import format_bytes

__all__ = ["Collective"]


@dataclass(frozen=True)
class Collective:
    """All collectives of one kind over one dimension of a mesh, in a pass or an update.

    Attributes:
        kind: all-reduce, all-gather, reduce-scatter or all-to-all.
        over: the dimension.
        count: how many.
        size_bytes: their sum; for each, the greater of what a rank gives and gets.
        of_weights: of weights or their gradients, so that they are the same for any number of samples.
    """

    kind: str
    over: str
    count: int
    size_bytes: int
    of_weights: bool = False

    @classmethod
    def sums(cls, rows: Iterable[Collective]) -> tuple[Collective, ...]:
        """Returns one of each kind, in a fixed order."""
        found: dict[tuple[str, str, bool], list[int]] = {}
        for row in rows:
            total = found.setdefault((row.kind, row.over, row.of_weights), [0, 0])
            total[0] += row.count
            total[1] += row.size_bytes
        return tuple(
            cls(kind, over, count, size_bytes, weights)
            for (kind, over, weights), (count, size_bytes) in sorted(found.items())
        )

    def __str__(self) -> str:
        return f"{self.count} {self.kind} over {self.over}, {format_bytes(self.size_bytes)}"
