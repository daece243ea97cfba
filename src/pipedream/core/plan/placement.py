"""The rank of each (stage, replica), and the replica that takes a microbatch.

Replicated stages, several chunks per rank, the V shape and two mirrored pipelines are all one table
``ranks[stage][replica]`` and one rule, round robin: microbatch k of stage s runs on replica k mod r_s
(PipeDream, SOSP 2019, section 3.2: 1F1B-RR).

Where weights are in memory that all ranks share, a stage's passes may run on any: two more tables have the ranks that
take turns at them.
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
from pipedream.core.plan.ranks import Mesh


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
        forwards, backwards: the ranks that take turns at a stage's forwards, and at its backwards; () if passes run on
            `ranks`. Otherwise all ranks share the weights, and a stage has one rank for its updates, its *home*.
        turn: microbatches in a turn.
    """

    FORMAT = 2

    ranks: tuple[tuple[int, ...], ...]
    forwards: tuple[tuple[int, ...], ...] = ()
    backwards: tuple[tuple[int, ...], ...] = ()
    turn: int = 1

    def __post_init__(self) -> None:
        if not self.ranks or not all(self.ranks):
            raise ValueError(f"every stage needs a rank, found {self.ranks}")
        used = sorted({rank for row in self.ranks for rank in row})
        if used != list(range(len(used))):
            raise ValueError(f"ranks must be 0 to n - 1 without a gap, found {used}")
        for row in (*self.ranks, *self.forwards, *self.backwards):
            if len(set(row)) != len(row):
                raise ValueError(f"a stage has two replicas on one rank, or two turns: {row}")
        if self.forwards or self.backwards:
            if {*self.replicas} != {1} or not len(self.forwards) == len(self.backwards) == len(self.ranks):
                raise ValueError(
                    "each stage has one home and ranks for its forwards and its backwards, found homes "
                    f"{self.ranks}, forwards {self.forwards}, backwards {self.backwards}"
                )
            if len({len(row) for row in (*self.forwards, *self.backwards)}) > 1 or self.turn < 1:
                raise ValueError(f"all stages have as many turns, of at least 1 microbatch, found {self}")
            if not {rank for row in (*self.forwards, *self.backwards) for rank in row} <= set(used):
                raise ValueError(f"passes run on the ranks 0 to {used[-1]}, found {self}")

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
        return self.turn * len(self.forwards[0]) if self.forwards else lcm(*self.replicas)

    def replica(self, stage: int, microbatch: int) -> int:
        return microbatch % len(self.ranks[stage])

    def rank_of(self, stage: int, microbatch: int, *, forward: bool = False) -> int:
        """Returns the rank of a microbatch's backward, or of its forward."""
        row = self._rotations(forward)[stage]
        return row[microbatch // self.turn % len(row)]

    def _rotations(self, forward: bool) -> tuple[tuple[int, ...], ...]:
        return (self.forwards if forward else self.backwards) or self.ranks

    def microbatches(self, rank: int, stage: int, total: int, *, forward: bool) -> Sequence[int]:
        """Returns a stage's microbatches, of `total`, whose forwards or backwards are on a rank."""
        row = self._rotations(forward)[stage]
        if self.turn == 1:  # the same, without a visit to each microbatch
            return range(row.index(rank), total, len(row)) if rank in row else range(0)
        return [k for k in range(total) if row[k // self.turn % len(row)] == rank]

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

    @property
    def rotates(self) -> bool:
        """Whether several ranks take turns at a stage's passes."""
        return self.shares_weights and len(self.forwards[0]) > 1

    def runs_backward_elsewhere(self, stage: int) -> bool:
        """Returns whether a stage's backwards may run on another rank than its forwards, and repeat these."""
        # In turns every stage does, but the last, whose backwards follow their forwards in the same turn.
        passes_on = self._rotations(True)[stage], self._rotations(False)[stage]
        return passes_on[0] != passes_on[1] or (self.rotates and stage + 1 < self.stages)

    @property
    def readers(self) -> tuple[int, ...]:
        """The ranks that take turns at the first stage's forwards, and read data."""
        return self._rotations(True)[0]

    @property
    def scorers(self) -> tuple[int, ...]:
        """The ranks that take turns at the last stage's forwards, and compute losses."""
        return self._rotations(True)[-1]

    def next_forward(self, stage: int, microbatch: int) -> int:
        """Returns the next microbatch of a stage whose forward is on the same rank."""
        following = microbatch + 1
        if following % self.turn:
            return following
        return following + self.turn * (len(self._rotations(True)[stage]) - 1)

    def begins_turn(self, microbatch: int) -> bool:
        """Returns whether a microbatch is the first after a change of ranks."""
        return self.rotates and microbatch > 0 and microbatch % self.turn == 0

    def ends(self, carries: Carries, source: int, target: int, microbatch: int) -> tuple[int, int]:
        """Returns sender and receiver of a channel's message (`program.Channel`)."""
        from_backward, to_backward = carries == Carries.GRADIENT, carries in (Carries.GRADIENT, Carries.STAGE_INPUT)
        return (
            self.rank_of(source, microbatch, forward=not from_backward),
            self.rank_of(target, microbatch, forward=not to_backward),
        )

    def passes(self, rank: int, *, forward: bool) -> tuple[StageReplica, ...]:
        if not self.shares_weights:
            return self.stage_replicas(rank)
        return tuple(StageReplica(stage, 0) for stage, row in enumerate(self._rotations(forward)) if rank in row)

    def passes_on_copies(self, rank: int, *, forward: bool) -> tuple[StageReplica, ...]:
        """Returns the passes of a rank that copy the weights, although it may be the home of the stage."""
        if not self.shares_weights:
            return ()
        passes = self.passes(rank, forward=forward)
        return tuple(replica for replica in passes if self.rotates or self.ranks[replica.stage] != (rank,))

    def __str__(self) -> str:
        rows = []
        for stage, ranks in enumerate(self.ranks):
            text = f"stage {stage}: rank {_join(ranks)}"
            if self.shares_weights:
                text += f", forwards on {_join(self.forwards[stage])}, backwards on {_join(self.backwards[stage])}"
            rows.append(text)
        return "\n".join(rows)


def _join(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks))
