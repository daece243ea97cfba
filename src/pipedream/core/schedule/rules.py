"""The rules that a schedule and its program share: the ops, and what each needs.

Update n of a stage (from 1) is one optimizer step, equal on all its replicas, and makes version n. Gradients are
averaged in one of two ways (docs/exact_rules.md, Normalisation):

- a *flushing* or *accumulating* update divides the sum of gradients by the summed loss weight, once;
- a *round* of PipeDream normalises each minibatch by itself and takes the plain mean over the replicas.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import lcm
from typing import NamedTuple

from pipedream.core.artifact import NOT_STORED
from pipedream.core.model.weight_shapes import Matrices
from pipedream.core.plan.placement import Placement
from pipedream.core.plan.plan import Plan
from pipedream.core.schedule.delay_compensation import Compensation, rate_factor
from pipedream.core.schedule.moves import Move
from pipedream.core.schedule.op import Kind, Op, data_requirements, find_last_kind
from pipedream.core.schedule.weights import DoubleBuffer, WeightRule


@dataclass(frozen=True)
class UpdateRule:
    """The number of microbatches in each update of each stage.

    Attributes:
        per_update: microbatches for each stage, over all replicas.
        mean_of_rounds: each microbatch is a whole minibatch, normalised by itself (PipeDream).
    """

    per_update: tuple[int, ...]
    mean_of_rounds: bool = False
    compensation: tuple[Compensation, ...] = ()

    def members(self, stage: int, update: int, total: int | None = None) -> range:
        count = self.per_update[stage]
        stop = update * count if total is None else min(update * count, total)
        return range((update - 1) * count, stop)

    def update_of(self, stage: int, microbatch: int) -> int:
        return microbatch // self.per_update[stage] + 1

    def updates(self, stage: int, total: int) -> int:
        return -(-total // self.per_update[stage])

    def kept_tensors(self, staleness: int) -> int:
        """Returns how many tensors compensations keep for each weight."""
        return sum(compensation.kept_tensors(staleness) for compensation in self.compensation)

    def matrix_bytes(self, matrices: Sequence[Matrices]) -> tuple[int, int]:
        """Returns bytes that weights of these shapes need besides `kept_tensors`: always, and during an update."""
        rows = [rule.matrix_bytes(matrices) for rule in self.compensation]
        return sum(kept_bytes for kept_bytes, _ in rows), max(
            (temporary_bytes for _, temporary_bytes in rows), default=0
        )

    def at_stage(self, stage: int, delays: Sequence[int]) -> UpdateRule:
        """Returns the rule with the stage's own compensation, given the staleness of all stages."""
        return replace(self, compensation=tuple(rule.at_stage(stage, delays) for rule in self.compensation))

    def rate_factor(self, stage: int, staleness: float, rounds: int) -> float:
        """Returns the factor on the user's learning rate at a stage; `rounds` are updates of the input stage.

        An update of n times the input stage's microbatches gets n times the rate, as in PipeDream.
        """
        return self.per_update[stage] / self.per_update[0] * rate_factor(self.compensation, staleness, rounds)


class OpRange(NamedTuple):
    """Ops of one kind, of one replica of a stage."""

    kind: Kind
    stage: int
    replica: int
    indices: Sequence[int]

    def ops(self) -> tuple[Op, ...]:
        return tuple(Op(self.kind, self.stage, index, self.replica) for index in self.indices)


@dataclass(frozen=True)
class Rules:
    """A method's decisions for one plan, except the order of its ops.

    Attributes:
        microbatches: m, of a minibatch.
        kinds: kinds of op of each microbatch at each stage.
        couples_updates: the updates of all stages wait for each other (clipping by the global norm).
        norm_delay: D: with coupled updates, update n waits for the global norm of update n - D, which clips it.
        moves: of the method, besides the library's; a saved program has them in its text.
    """

    name: str
    plan: Plan
    placement: Placement
    weights: WeightRule
    updates: UpdateRule
    microbatches: int = 1
    flushes: bool = False
    kinds: tuple[Kind, ...] = (Kind.FORWARD, Kind.BACKWARD)
    couples_updates: bool = False
    norm_delay: int = 0
    moves: tuple[Move, ...] = field(default=(), metadata=NOT_STORED)

    @property
    def trains(self) -> bool:
        """Whether there are backwards and updates, unlike in an evaluation."""
        return len(self.kinds) > 1

    def overlaps_update(self, stage: int) -> bool:
        """Returns whether a thread makes a stage's updates on the host, while passes read older weights.

        Only the weights and the optimizer take part in such an update.
        """
        is_hosted = self.placement.shares_weights or self.plan.choices.hosts_optimizers
        is_alone = self.placement.replicas[stage] == 1
        reads_more = any(rule.needs_read_weights for rule in self.updates.compensation)
        return self.trains and is_hosted and is_alone and not reads_more and isinstance(self.weights, DoubleBuffer)

    @property
    def gradient_sets(self) -> int:
        """The sets of summed gradients: where ranks take turns, one for each update that may not have been made."""
        stages = range(self.placement.stages)
        return 1 + max(map(self.weights.staleness, stages)) if self.placement.rotates else 1

    @property
    def splits_backward(self) -> bool:
        """Whether I and W replace B."""
        return Kind.INPUT_GRADIENT in self.kinds

    @property
    def shortest_cycle(self) -> int:
        """The fewest microbatches that are whole rounds of replicas, minibatches and updates."""
        return lcm(self.placement.cycle, self.microbatches, *self.updates.per_update)

    def recomputes(self, stage: int) -> bool:
        """Returns whether a stage's backwards repeat its forwards."""
        return self.plan.stages[stage].recompute or self.placement.runs_backward_elsewhere(stage)

    def expected_ops(self, rank: int, total: int) -> tuple[OpRange, ...]:
        """Returns the ops of a rank, in no particular order."""
        ranges = [
            OpRange(kind, stage, replica, self.placement.microbatches(rank, stage, total, forward=kind is Kind.FORWARD))
            for kind in self.kinds
            for stage, replica in self.placement.passes(rank, forward=kind is Kind.FORWARD)
        ]
        for stage, replica in self.placement.stage_replicas(rank) if self.trains else ():
            ranges.append(OpRange(Kind.UPDATE, stage, replica, range(1, self.updates.updates(stage, total) + 1)))
        return tuple(ranges)

    def op_count(self, rank: int, total: int) -> int:
        return sum(len(row.indices) for row in self.expected_ops(rank, total))

    def requires(self, op: Op, total: int | None = None) -> tuple[Op, ...]:
        """Returns the ops that must be done before an op.

        A pass needs what it reads, and the update that makes its version. An update needs the gradients of all its
        microbatches, and the previous update. The first backward of a rank's turn continues from that of another rank.
        Sums over ranks, which may couple updates, are no ops: see `moves.list_waits`.
        """
        kind, stage, index, replica = op
        if kind is Kind.UPDATE:
            last_kind = find_last_kind(self.kinds)
            members = self.updates.members(stage, index, total)
            gradients = tuple(Op(last_kind, stage, k, self.placement.replica(stage, k)) for k in members)
            return (*gradients, Op(kind, stage, index - 1, replica)) if index > 1 else gradients
        inputs = data_requirements(op, self.placement, self.kinds)
        # A turn continues from the sums of gradients and the buffers of the rank before. A backward changes both, as it
        # repeats its forward; at the last stage it does not, so the forward changes the buffers.
        changes = kind is Kind.BACKWARD or (kind is Kind.FORWARD and not self.placement.runs_backward_elsewhere(stage))
        if changes and self.trains and self.placement.begins_turn(index):
            inputs = (*inputs, Op(Kind.BACKWARD, stage, index - 1, replica))
        version = self.find_awaited_version(op)
        return (*inputs, Op(Kind.UPDATE, stage, version, replica)) if version > 0 else inputs

    def list_fetched(self, op: Op, total: int | None = None) -> list[Op]:
        """Returns the required ops whose results an op reads in memory that ranks share, if they are on other ranks."""
        return [need for need in self.requires(op, total) if is_in_shared_memory(op, need)]

    def find_awaited_version(self, op: Op) -> int:
        """Returns the version for which a pass waits; 0 for that at the start, or if an earlier pass has waited."""
        kind, stage, index, _ = op
        if kind is Kind.WEIGHT_GRADIENT or not self.trains:  # the first half of the backward has already waited
            return 0
        version = self.weights.forward_version(stage, index)
        if kind in (Kind.BACKWARD, Kind.INPUT_GRADIENT):
            # The forward has already waited for a version that both read.
            newer = self.weights.backward_version(stage, index)
            return newer if newer > version else 0
        return version


def is_in_shared_memory(op: Op, need: Op) -> bool:
    """Returns whether an op reads what another rank's op has made without a message: weights, gradients or buffers."""
    return Kind.UPDATE in (op.kind, need.kind) or op.index != need.index
