"""Where a (stage, replica) lives, and which replica takes a microbatch.

Replicated stages, chunks on a rank, the V shape and two mirrored pipelines are all one table
``ranks[stage][replica]`` and one rule, round robin: microbatch k of stage s runs on replica k mod r_s
(PipeDream, SOSP 2019, section 3.2: 1F1B-RR).
"""

from __future__ import annotations

from dataclasses import dataclass
from math import lcm

from .artifact import Artifact

__all__ = ["Placement", "Seat"]

Seat = tuple[int, int]
"""A (stage, replica)."""


@dataclass(frozen=True)
class Placement(Artifact):
    """The table from (stage, replica) to rank.

    Attributes:
        ranks: ``ranks[stage][replica]``; every rank from 0 on has at least one seat.

    Raises:
        ValueError: an empty stage, or ranks that are not 0 to n - 1.
    """

    FORMAT = 1

    ranks: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        if not self.ranks or not all(self.ranks):
            raise ValueError(f"every stage needs a rank, found {self.ranks}")
        used = sorted({rank for row in self.ranks for rank in row})
        if used != list(range(len(used))):
            raise ValueError(f"ranks must be 0 to n - 1 without a gap, found {used}")
        for stage, row in enumerate(self.ranks):
            if len(set(row)) != len(row):
                raise ValueError(f"stage {stage} has two replicas on one rank: {row}")

    @classmethod
    def replicated(cls, replicas: tuple[int, ...]) -> Placement:
        """Returns one seat a rank, stage by stage: 2-1 is ranks 0 and 1, then 2."""
        rows, rank = [], 0
        for count in replicas:
            rows.append(tuple(range(rank, rank + count)))
            rank += count
        return cls(tuple(rows))

    @property
    def stages(self) -> int:
        """Number of stages."""
        return len(self.ranks)

    @property
    def workers(self) -> int:
        """Number of ranks."""
        return 1 + max(max(row) for row in self.ranks)

    @property
    def replicas(self) -> tuple[int, ...]:
        """Replicas of each stage."""
        return tuple(len(row) for row in self.ranks)

    @property
    def cycle(self) -> int:
        """Microbatches after which the round robin of all stages repeats."""
        return lcm(*self.replicas)

    def replica(self, stage: int, microbatch: int) -> int:
        """Returns the replica of a stage that takes a microbatch."""
        return microbatch % len(self.ranks[stage])

    def rank_of(self, stage: int, microbatch: int) -> int:
        """Returns the rank that runs a microbatch at a stage."""
        row = self.ranks[stage]
        return row[microbatch % len(row)]

    def seats(self, rank: int) -> tuple[Seat, ...]:
        """Returns the (stage, replica) pairs that live on a rank."""
        return tuple(
            (stage, replica)
            for stage, row in enumerate(self.ranks)
            for replica, owner in enumerate(row)
            if owner == rank
        )

    def __str__(self) -> str:
        rows = (f"stage {s}: rank {', '.join(map(str, row))}" for s, row in enumerate(self.ranks))
        return "\n".join(rows)
