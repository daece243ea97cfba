"""Where a (stage, replica) lives, and which replica takes a microbatch.

Replicated stages, chunks on a rank, the V shape and two mirrored pipelines are all one table
``ranks[stage][replica]`` and one rule, round robin: microbatch k of stage s runs on replica k mod r_s
(PipeDream, SOSP 2019, section 3.2: 1F1B-RR).

A stage that is bound to no worker has its *home* in that table, where its weights live and are updated and its
backwards run; a second table says where its forwards run (`Dispatched`).
"""

from __future__ import annotations

from dataclasses import dataclass
from math import lcm

from pipedream.core.artifact import Artifact

__all__ = ["Dispatched", "Placement", "StageReplica"]

StageReplica = tuple[int, int]
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

    def forward_rank(self, stage: int, microbatch: int) -> int:
        """Returns the rank that runs the forward of a microbatch at a stage."""
        return self.rank_of(stage, microbatch)

    def is_fetched(self, stage: int) -> bool:
        """Tells whether a stage's forwards run where its weights do not live."""
        return False

    @property
    def readers(self) -> tuple[int, ...]:
        """The ranks of the input stage's forwards, which take the data."""
        return self.ranks[0]

    def ends(self, carries: str, source: int, target: int, microbatch: int) -> tuple[int, int]:
        """Returns the ranks that send and receive what a channel carries of a microbatch (`program.Channel`)."""
        sends = self.rank_of if carries in ("gradient", "weights") else self.forward_rank
        receives = self.rank_of if carries in ("gradient", "kept") else self.forward_rank
        return sends(source, microbatch), receives(target, microbatch)

    def passes(self, rank: int, *, forward: bool) -> tuple[StageReplica, ...]:
        """Returns the (stage, replica) pairs whose forwards, or whose backwards, a rank runs."""
        return self.stage_replicas(rank)

    def visits(self, rank: int) -> tuple[StageReplica, ...]:
        """Returns the (stage, replica) pairs whose forwards a rank runs on weights that live elsewhere."""
        return tuple(
            stage_replica for stage_replica in self.passes(rank, forward=True) if self.is_fetched(stage_replica[0])
        )

    def stage_replicas(self, rank: int) -> tuple[StageReplica, ...]:
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


@dataclass(frozen=True)
class Dispatched(Placement):
    """Stages without replicas whose forwards run where they are dispatched, on weights that are fetched from home.

    Attributes:
        forwards: of each stage, the rank of its forwards.

    Raises:
        ValueError: replicas, a stage without a rank for its forwards, or a rank that there is not.
    """

    forwards: tuple[int, ...]

    def __post_init__(self) -> None:
        super().__post_init__()
        if set(self.replicas) != {1} or len(self.forwards) != len(self.ranks):
            raise ValueError(
                f"each stage has one home and one rank of its forwards, found homes {self.ranks} and {self.forwards}"
            )
        if not set(self.forwards) <= set(range(self.workers)):
            raise ValueError(f"forwards run on the ranks 0 to {self.workers - 1}, found {self.forwards}")

    def forward_rank(self, stage: int, microbatch: int) -> int:
        return self.forwards[stage]

    def is_fetched(self, stage: int) -> bool:
        return self.forwards[stage] != self.ranks[stage][0]

    @property
    def readers(self) -> tuple[int, ...]:
        return self.forwards[:1]

    def passes(self, rank: int, *, forward: bool) -> tuple[StageReplica, ...]:
        if not forward:
            return self.stage_replicas(rank)
        return tuple((stage, 0) for stage, owner in enumerate(self.forwards) if owner == rank)

    def __str__(self) -> str:
        each = enumerate(zip(self.ranks, self.forwards, strict=True))
        return "\n".join(f"stage {s}: home on rank {home}, forwards on rank {there}" for s, ((home,), there) in each)
