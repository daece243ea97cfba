"""A placement whose forwards run away from the weights' home (RoundPipe, `core.schedule.dispatch`)."""

from __future__ import annotations

from dataclasses import dataclass

from pipedream.core.plan.placement import Carries, Placement, StageReplica


@dataclass(frozen=True)
class Dispatched(Placement):
    """Stages without replicas; `forwards` has the rank of each stage's forwards."""

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

    def is_remote(self, stage: int) -> bool:
        return self.forwards[stage] != self.ranks[stage][0]

    @property
    def readers(self) -> tuple[int, ...]:
        return self.forwards[:1]

    def ends(self, carries: Carries, source: int, target: int, microbatch: int) -> tuple[int, int]:
        sends = self.rank_of if carries in (Carries.GRADIENT, Carries.WEIGHTS) else self.forward_rank
        receives = self.rank_of if carries in (Carries.GRADIENT, Carries.STAGE_INPUT) else self.forward_rank
        return sends(source, microbatch), receives(target, microbatch)

    def passes(self, rank: int, *, forward: bool) -> tuple[StageReplica, ...]:
        if not forward:
            return self.stage_replicas(rank)
        return tuple(StageReplica(stage, 0) for stage, owner in enumerate(self.forwards) if owner == rank)

    def remote_forwards(self, rank: int) -> tuple[StageReplica, ...]:
        return tuple(
            stage_replica for stage_replica in self.passes(rank, forward=True) if self.is_remote(stage_replica.stage)
        )

    def __str__(self) -> str:
        each = enumerate(zip(self.ranks, self.forwards, strict=True))
        return "\n".join(f"stage {s}: home on rank {home}, forwards on rank {there}" for s, ((home,), there) in each)
