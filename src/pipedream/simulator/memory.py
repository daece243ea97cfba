"""What a rank holds while a program runs: versions of its weights, activations; and what its gradients carry.

None of it depends on how fast anything is, only on the order of the rank's ops, so it is followed after the run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from pipedream.core.plan.memory import DEFERRED_SHARE, message_bytes, peers_of
from pipedream.core.schedule.op import Kind
from pipedream.core.schedule.program import Program
from pipedream.core.schedule.timeline import GradientVersions, Span
from pipedream.core.schedule.weights import WeightRule

__all__ = ["MemoryTrace", "trace_memory"]

_new: Callable[..., Any] = tuple.__new__  # makes a named tuple without a call in Python


@dataclass(frozen=True)
class MemoryTrace:
    """What one rank has held.

    Attributes:
        peak_versions: most distinct sets of weights alive at once, over its seats.
        gradient_versions: of its gradients, stage by stage.
        memory: bytes at the start, and the most during each of its ops.
    """

    peak_versions: int
    gradient_versions: tuple[GradientVersions, ...]
    memory: tuple[int, ...]


class _Seat:
    """One seat's versions. A version is alive while it is the newest, and while a microbatch reads it that is still to
    come, or in flight where it is kept for the backward; under the rules that have one set of weights, only while it is
    the newest (`WeightRule.held_until`). A view that is kept is alive from the first forward that reads it to the last
    pass that does.

    Attributes:
        stride: from one microbatch of the seat to its next.
        is_fetched: its forwards are elsewhere; a microbatch is here for its backward alone.
        read: version that each of its microbatches reads.
        readers: version -> microbatches that read it, and have not yet made the last pass that does.
        until: the last pass that reads a kept view; None where none is kept.
        held_until: the last pass for which a version is kept that is not the newest; None where there is one set.
        forwarded: microbatches forwarded so far.
        viewed: version whose view was kept last.
        newest, alive, peak: version made last; distinct ones alive now, and at most.
        order: its microbatches in the order of their gradients.
        in_flight, deferred: microbatches in flight; those of them that wait for the second half of their backward are
            counted as deferred alone.
        has_sums: there are gradients of the coming update.
        start_bytes, weights_bytes, waiting_bytes, deferred_bytes: held at the start, by a version, by a microbatch in
            flight, by one that is deferred.
        forward_bytes, first_bytes, further_bytes, update_bytes: on top of those during a forward, the first backward
            of an update, a further one, an update (`core.plan.memory.moments`).
        working_bytes, largest_bytes: temporaries of a pass, and the largest gradient.
    """

    def __init__(self, program: Program, stage: int, replica: int, total: int, in_flight: tuple[int, ...]) -> None:
        plan = program.plan
        row = plan.stages[stage]
        parts = program.microbatches if plan.unit == "minibatch" else 1
        self.stride = program.placement.replicas[stage]
        self.is_fetched = program.placement.is_remote(stage)
        self.read = [program.weights.forward_version(stage, k) for k in range(replica, total, self.stride)]
        self.readers = Counter(self.read)
        self.until = program.weights.kept_until(stage)
        self.held_until = program.weights.held_until
        self.forwarded = 0
        self.viewed: int | None = None
        self.newest = 0
        self.alive = self.peak = 1
        self.order: list[int] = []
        sizes = row.sizes(
            parts,
            plan.stages[stage - 1].output_bytes if stage else 0,
            samples=plan.batch,
            is_last=stage + 1 == len(plan.stages),
        )
        self.in_flight = self.deferred = 0
        self.has_sums = False
        self.weights_bytes: int = row.parameter_bytes
        self.working_bytes: int = sizes.working_bytes
        self.largest_bytes: int = sizes.largest_parameter_bytes
        self.deferred_bytes: int = DEFERRED_SHARE * sizes.activation_bytes
        self.waiting_bytes: int = sizes.input_bytes if row.recompute else sizes.activation_bytes
        self.forward_bytes: int = sizes.activation_bytes - self.waiting_bytes + sizes.working_bytes
        self.first_bytes: int = self.forward_bytes + self.weights_bytes - sizes.relief_bytes
        self.further_bytes: int = self.forward_bytes + self.weights_bytes + sizes.largest_parameter_bytes
        kept = program.updates.kept_tensors(program.weights.staleness(stage)) * self.weights_bytes
        # A compensation that keeps tensors needs one more during an update.
        self.update_bytes: int = self.weights_bytes + sizes.update_working_bytes + (self.weights_bytes if kept else 0)
        self.start_bytes: int = (
            self.weights_bytes * (1 + program.weights.buffers(stage))
            + row.optimizer_bytes
            + kept
            + message_bytes(sizes, in_flight[stage], row.recompute, peers_of(plan.replicas, in_flight)[stage])
        )

    @property
    def held_bytes(self) -> int:
        """What waits: versions, state, messages, and what microbatches in flight keep."""
        passes = self.in_flight * self.waiting_bytes + self.deferred * self.deferred_bytes
        return self.start_bytes + (self.alive - 1) * self.weights_bytes + passes

    def forward(self) -> int:
        """Returns the most that the next forward holds."""
        self.in_flight += 1
        version = self.read[self.forwarded]
        self.forwarded += 1
        if self.until is not None and version != self.viewed:
            self.viewed = version
            self.alive += 1
            self.peak = max(self.peak, self.alive)
        most = self.held_bytes + self.forward_bytes + (self.weights_bytes if self.has_sums else 0)
        if self.until is Kind.FORWARD:
            self.readers[version] -= 1
            self.alive -= not self.readers[version]
        elif self.held_until is Kind.FORWARD:
            self._release(version)
        return most

    def backward(self, index: int) -> int:
        """Returns the most that the backward of a microbatch holds; then its activations are gone."""
        self.in_flight += self.is_fetched
        most = self.held_bytes + (self.further_bytes if self.has_sums else self.first_bytes)
        self.in_flight -= 1
        self._end(index)
        return most

    def input_gradient(self) -> int:
        """Returns the most that the first half of a backward holds; then its microbatch is deferred."""
        self.in_flight -= 1
        self.deferred += 1
        return self.held_bytes + self.working_bytes + (self.weights_bytes if self.has_sums else 0)

    def weight_gradient(self, index: int) -> int:
        """Returns the most that the second half of a backward holds; then what was kept for it is gone."""
        most = self.held_bytes + self.working_bytes + self.weights_bytes
        most += self.largest_bytes if self.has_sums else 0
        self.deferred -= 1
        self._end(index)
        return most

    def _end(self, index: int) -> None:
        """Takes in the gradients of a microbatch, and lets go of the version that it read."""
        self.has_sums = True
        self.order.append(index)
        if self.held_until is Kind.BACKWARD:
            self._release(self.read[index // self.stride])

    def _release(self, version: int) -> None:
        """Lets go of a version that a microbatch has read for the last time."""
        left = self.readers[version] = self.readers[version] - 1
        if not left and (version != self.newest or self.until is not None):
            self.alive -= 1

    def update(self, index: int) -> int:
        """Returns the most that an update holds; then its gradients are gone."""
        if self.held_until is not None and self.until is None and self.readers[self.newest]:
            self.alive += 1
            self.peak = max(self.peak, self.alive)
        self.newest = index
        self.has_sums = False
        return self.held_bytes + self.update_bytes

    def gradient_versions(self, program: Program, stage: int) -> list[GradientVersions]:
        rule, per_update, read, stride = program.weights, program.updates.per_update[stage], self.read, self.stride
        if type(rule).backward_version is WeightRule.backward_version:  # that of the forward
            versions = ((k, read[k // stride], read[k // stride]) for k in self.order)
        else:
            versions = ((k, read[k // stride], rule.backward_version(stage, k)) for k in self.order)
        return [
            _new(GradientVersions, (stage, k, forward, backward, k // per_update)) for k, forward, backward in versions
        ]


class _Visit:
    """A stage whose forwards run on a rank where its weights do not live.

    Attributes:
        held_bytes: the receive of the weights, posted ahead; the weights that are there; inputs that are kept, from
            their forward to the next fetch, for they wait for the backward at home.
        has_weights: they are there.
    """

    def __init__(self, program: Program, stage: int, total: int) -> None:
        plan, row = program.plan, program.plan.stages[stage]
        parts = program.microbatches if plan.unit == "minibatch" else 1
        before = plan.stages[stage - 1].output_bytes if stage else 0
        sizes = row.sizes(parts, before, samples=plan.batch, is_last=stage + 1 == len(plan.stages))
        self._trains = len(program.kinds) > 1
        self._per_update = program.updates.per_update[stage]
        self._total = total
        self._weights_bytes: int = row.parameter_bytes
        self._input_bytes: int = sizes.input_bytes
        self._pass_bytes: int = sizes.activation_bytes + sizes.working_bytes
        self._kept = 0
        self.has_weights = not self._trains

    @property
    def held_bytes(self) -> int:
        return (1 + self.has_weights) * self._weights_bytes + self._kept * self._input_bytes

    def forward(self, index: int) -> int:
        """Returns the most that a forward holds; behind the last of its fetch the weights are gone."""
        if not self._trains:
            return self.held_bytes
        self._kept = 1 if index % self._per_update == 0 else self._kept + 1
        self.has_weights = True
        most = self.held_bytes + self._pass_bytes
        self.has_weights = (index + 1) % self._per_update > 0 and index + 1 < self._total
        return most


def trace_memory(
    program: Program, rank: int, total: int, spans: Iterable[Span], in_flight: tuple[int, ...]
) -> MemoryTrace:
    """Returns what a rank held in a run of `total` microbatches.

    Args:
        program: whose.
        rank: which.
        total: microbatches of the run.
        spans: of the rank, in the order of its ops.
        in_flight: microbatches that a replica of each stage holds (`core.schedule.occupancy.most_in_flight`).
    """
    stage_replicas = {
        stage: _Seat(program, stage, replica, total, in_flight)
        for stage, replica in program.placement.stage_replicas(rank)
    }
    trains = len(program.kinds) > 1
    visits = {stage: _Visit(program, stage, total) for stage, _ in program.placement.remote_forwards(rank)}
    memory = [
        sum(stage_replica.start_bytes for stage_replica in stage_replicas.values())
        + sum(visit.held_bytes for visit in visits.values())
    ]
    several = len(stage_replicas) + len(visits) > 1
    most_visiting = 0
    for _, kind, stage, index, _, _ in spans:
        if kind == "wait":
            continue
        if kind == "F" and stage in visits:
            visiting = sum(visit.has_weights for visit in visits.values() if visit is not visits[stage])
            most_visiting = max(most_visiting, 1 + visiting)
            most = visits[stage].forward(index)
            others = [held.held_bytes for at, held in visits.items() if at != stage]
            memory.append(
                most + sum(stage_replica.held_bytes for stage_replica in stage_replicas.values()) + sum(others)
            )
            continue
        stage_replica = stage_replicas[stage]
        if kind == "F":
            most = stage_replica.forward() if trains else stage_replica.held_bytes
        elif kind == "B":
            most = stage_replica.backward(index)
        elif kind == "I":
            most = stage_replica.input_gradient()
        elif kind == "W":
            most = stage_replica.weight_gradient(index)
        elif kind == "U":
            most = stage_replica.update(index)
        else:
            most = stage_replica.held_bytes
        most += sum(visit.held_bytes for visit in visits.values())
        memory.append(
            most + sum(s.held_bytes for s in stage_replicas.values() if s is not stage_replica) if several else most
        )
    return MemoryTrace(
        peak_versions=sum(stage_replica.peak for stage_replica in stage_replicas.values()) + most_visiting,
        gradient_versions=tuple(
            tag
            for stage, stage_replica in stage_replicas.items()
            for tag in stage_replica.gradient_versions(program, stage)
        ),
        memory=tuple(memory),
    )
