"""The rank of each (stage, replica), and the replica that takes a microbatch.

Replicated stages, several chunks per rank, the V shape and two mirrored pipelines are all one table
``ranks[stage][replica]`` and one rule, round robin: microbatch k of stage s runs on replica k mod r_s
(PipeDream, SOSP 2019, section 3.2: 1F1B-RR). A second table may have the ranks of the forwards.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from math import lcm
from typing import NamedTuple

from pipedream.core.artifact import Artifact
from pipedream.core.errors import PlanError
from pipedream.core.plan.mesh import Mesh


class Carries(StrEnum):
    """Cargo of a channel."""

    ACTIVATION = "activation"
    GRADIENT = "gradient"
    INPUT = "input"  # a part of the batch, such as the targets, directly from the input stage
    STAGE_INPUT = "stage_input"  # the input of a forward on another rank, for its backward


class StageReplica(NamedTuple):
    """One replica of a stage."""

    stage: int
    replica: int


@dataclass(frozen=True)
class Placement(Artifact):
    """The table from (stage, replica) to rank.

    Attributes:
        ranks: ``ranks[stage][replica]``; they are 0 to n - 1 without a gap.
        forwards: the rank of each stage's forwards; () if they are on `ranks`. Otherwise all ranks share the weights,
            and a stage has one rank for its backwards and updates, its *home*.
    """

    FORMAT = 1

    ranks: tuple[tuple[int, ...], ...]
    forwards: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not self.ranks or not all(self.ranks):
            raise ValueError(f"every stage needs a rank, found {self.ranks}")
        used = sorted({rank for row in self.ranks for rank in row})
        if used != list(range(len(used))):
            raise ValueError(f"ranks must be 0 to n - 1 without a gap, found {used}")
        for stage, row in enumerate(self.ranks):
            if len(set(row)) != len(row):
                raise ValueError(f"stage {stage} has two replicas on one rank: {row}")
        if self.forwards and (set(self.replicas) != {1} or len(self.forwards) != len(self.ranks)):
            raise ValueError(
                f"each stage has one home and one rank of its forwards, found homes {self.ranks} and {self.forwards}"
            )
        if not set(self.forwards) <= set(used):
            raise ValueError(f"forwards run on the ranks 0 to {used[-1]}, found {self.forwards}")

    @classmethod
    def replicated(cls, replicas: tuple[int, ...]) -> Placement:
        """Returns one stage replica per rank: in 2-1 ranks 0 and 1, then 2."""
        rows, rank = [], 0
        for count in replicas:
            rows.append(tuple(range(rank, rank + count)))
            rank += count
        return cls(tuple(rows))

    @property
    def stages(self) -> int:
        return len(self.ranks)

    @property
    def workers(self) -> int:
        return 1 + max(max(row) for row in self.ranks)

    @cached_property
    def replicas(self) -> tuple[int, ...]:
        return tuple(len(row) for row in self.ranks)

    @cached_property
    def cycle(self) -> int:
        """Microbatches in a common round of all stages."""
        return lcm(*self.replicas)

    def replica(self, stage: int, microbatch: int) -> int:
        return microbatch % len(self.ranks[stage])

    def rank_of(self, stage: int, microbatch: int) -> int:
        row = self.ranks[stage]
        return row[microbatch % len(row)]

    def stage_replicas(self, rank: int) -> tuple[StageReplica, ...]:
        return tuple(
            StageReplica(stage, replica)
            for stage, row in enumerate(self.ranks)
            for replica, owner in enumerate(row)
            if owner == rank
        )

    def meshes(self, of_stages: Sequence[Mesh]) -> tuple[Mesh, ...]:
        """Returns the mesh of each worker.

        Raises:
            PlanError: a worker has stages with different meshes.
        """
        meshes: dict[int, Mesh] = {}
        for mesh, row in zip(of_stages, self.ranks, strict=True):
            for worker in row:
                if meshes.setdefault(worker, mesh) != mesh:
                    raise PlanError(
                        f"worker {worker} has several stages, with the meshes {meshes[worker]} and {mesh}; give the "
                        "stages of one worker the same mesh"
                    )
        return tuple(meshes[worker] for worker in sorted(meshes))

    @property
    def shares_weights(self) -> bool:
        """Whether the ranks share the stages' weights, in the memory of their machine."""
        return bool(self.forwards)

    def forward_rank(self, stage: int, microbatch: int) -> int:
        return self.forwards[stage] if self.forwards else self.rank_of(stage, microbatch)

    def is_remote(self, stage: int) -> bool:
        """Returns whether a stage's forwards run on another rank than its backwards."""
        return bool(self.forwards) and self.forwards[stage] != self.ranks[stage][0]

    @property
    def readers(self) -> tuple[int, ...]:
        return self.forwards[:1] or self.ranks[0]

    def ends(self, carries: Carries, source: int, target: int, microbatch: int) -> tuple[int, int]:
        """Returns sender and receiver of a channel's message (`program.Channel`)."""
        find_sender = self.rank_of if carries == Carries.GRADIENT else self.forward_rank
        find_receiver = self.rank_of if carries in (Carries.GRADIENT, Carries.STAGE_INPUT) else self.forward_rank
        return find_sender(source, microbatch), find_receiver(target, microbatch)

    def passes(self, rank: int, *, forward: bool) -> tuple[StageReplica, ...]:
        if not (forward and self.forwards):
            return self.stage_replicas(rank)
        return tuple(StageReplica(stage, 0) for stage, owner in enumerate(self.forwards) if owner == rank)

    def remote_forwards(self, rank: int) -> tuple[StageReplica, ...]:
        return tuple(replica for replica in self.passes(rank, forward=True) if self.is_remote(replica.stage))

    def __str__(self) -> str:
        if self.forwards:
            rows = enumerate(zip(self.ranks, self.forwards, strict=True))
            return "\n".join(
                f"stage {s}: home on rank {home}, forwards on rank {other}" for s, ((home,), other) in rows
            )
        return "\n".join(f"stage {s}: rank {', '.join(map(str, row))}" for s, row in enumerate(self.ranks))
