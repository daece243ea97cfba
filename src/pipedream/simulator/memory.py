"""Bytes that a rank holds while a program runs, and the versions at which its gradients are taken.

It depends only on the order of the rank's ops, so it is traced after the run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from pipedream.core.plan.activations import HOST, share_of, window_bytes
from pipedream.core.plan.memory import DEFERRED_SHARE, StageSizes, message_bytes, peers_of
from pipedream.core.plan.placement import Dispatched
from pipedream.core.schedule.op import Kind
from pipedream.core.schedule.program import Program
from pipedream.core.schedule.timeline import GradientVersions, Span
from pipedream.core.schedule.weights import WeightRule


def _size_stage(program: Program, stage: int) -> StageSizes:
    plan = program.plan
    return plan.stages[stage].sizes(
        program.microbatches if plan.unit == "minibatch" else 1,
        plan.stages[stage - 1].output_bytes if stage else 0,
        samples=plan.batch,
        is_last=stage + 1 == len(plan.stages),
    )


def _is_apart(program: Program) -> bool:
    """Whether weights are in the memory of the machine, apart from GPUs."""
    return isinstance(program.placement, Dispatched) and program.plan.costs.on_gpus


class _Remote:
    """A stage whose forwards run on another rank than its backwards.

    Held are a copy of the weights, from the first of an update's forwards to the last, and inputs, from their forward
    to the next update's, because they wait there.
    """

    def __init__(self, program: Program, stage: int, total: int) -> None:
        sizes = _size_stage(program, stage)
        self._trains = program.trains
        self._per_update = program.updates.per_update[stage]
        self._total = total
        self._weights_bytes: int = program.plan.stages[stage].parameter_bytes * (1 + _is_apart(program))
        self._input_bytes = int(sizes.input_bytes)
        self._pass_bytes = int(sizes.activation_bytes + sizes.working_bytes)
        self._kept = 0
        self.has_weights = not self._trains

    @property
    def held_bytes(self) -> int:
        return self.has_weights * self._weights_bytes + self._kept * self._input_bytes

    def forward(self, index: int) -> int:
        """Returns the most that it holds; after the last one of an update the weights are gone."""
        if not self._trains:
            return self.held_bytes
        self._kept = 1 if index % self._per_update == 0 else self._kept + 1
        self.has_weights = True
        most = self.held_bytes + self._pass_bytes
        self.has_weights = (index + 1) % self._per_update > 0 and index + 1 < self._total
        return most


class RemoteForwardsTrace:
    """All stages whose forwards alone a rank runs."""

    def __init__(self, program: Program, rank: int, total: int) -> None:
        remote = program.placement.remote_forwards(rank)
        self.stages = {stage: _Remote(program, stage, total) for stage, _ in remote}
        self.peak_versions = 0

    @property
    def held_bytes(self) -> int:
        return sum(stage.held_bytes for stage in self.stages.values())

    def forward(self, stage: int, index: int) -> int:
        """Returns the most that all these stages hold during it."""
        others = [other for at, other in self.stages.items() if at != stage]
        self.peak_versions = max(self.peak_versions, 1 + sum(other.has_weights for other in others))
        return self.stages[stage].forward(index) + sum(other.held_bytes for other in others)


_new: Callable[..., Any] = tuple.__new__  # faster than calling the class


@dataclass(frozen=True)
class MemoryTrace:
    """The memory of one rank over a run.

    Attributes:
        memory: bytes at the start, and the most during each of its ops.
    """

    peak_versions: int
    gradient_versions: tuple[GradientVersions, ...]
    memory: tuple[int, ...]


class _StageTrace:
    """One replica of a stage: its versions, and what its microbatches in flight keep.

    A version is alive while it is the newest, and while a microbatch that is still to come reads it (or one in flight,
    if versions are kept for the backward). A kept prediction is alive from the first forward to the last pass that
    reads it.

    Attributes:
        read: version of each of its microbatches.
        readers: version -> microbatches that are still to read it.
        newest, alive, peak: version made last; distinct ones alive now, and at most.
        order: its microbatches in the order of their gradients.
        in_flight, deferred: those that wait for the second half of their backward count as deferred alone.
        forward_bytes, first_bytes, further_bytes, update_bytes: on top of those held, during a forward, the first
            backward of an update, a further one, an update (`core.plan.memory.moments`).
    """

    def __init__(self, program: Program, stage: int, replica: int, total: int, in_flight: tuple[int, ...]) -> None:
        plan = program.plan
        row = plan.stages[stage]
        self.stride = program.placement.replicas[stage]
        self.is_remote = program.placement.is_remote(stage)
        self.read = [program.weights.forward_version(stage, k) for k in range(replica, total, self.stride)]
        self.readers = Counter(self.read)
        self.until = program.weights.kept_until(stage)
        self.held_until = program.weights.held_until
        self.forwarded = 0
        self.predicted: int | None = None
        self.newest = 0
        self.alive = self.peak = 1
        self.order: list[int] = []
        sizes = _size_stage(program, stage)
        self.in_flight = self.deferred = 0
        self.has_sums = False
        self.weights_bytes: int = row.trained_bytes
        self.working_bytes = int(sizes.working_bytes)
        self.largest_bytes = int(sizes.largest_parameter_bytes)
        moved_bytes = share_of(sizes.activation_bytes, row.offload)
        relief_bytes = sizes.relief_bytes - share_of(sizes.relief_bytes, row.offload)
        self.deferred_bytes = int(DEFERRED_SHARE * sizes.activation_bytes - moved_bytes)
        self.waiting_bytes = int((sizes.input_bytes if row.recompute else sizes.activation_bytes) - moved_bytes)
        here_bytes = sizes.activation_bytes - moved_bytes + window_bytes(moved_bytes)
        self.forward_bytes = int(here_bytes - self.waiting_bytes + sizes.working_bytes)
        self.first_bytes = int(self.forward_bytes + self.weights_bytes - relief_bytes)
        self.further_bytes = int(self.forward_bytes + self.weights_bytes + sizes.largest_parameter_bytes)
        tensors = program.updates.kept_tensors(program.weights.staleness(stage))
        tensors += (row.replicas > 1) * program.plan.costs.sum_costs[stage].kept_tensors
        bases, temporary = program.updates.matrix_bytes(row.matrices)
        kept = tensors * self.weights_bytes + bases
        # An update needs one more of the kept tensors.
        step_bytes = sizes.update_working_bytes + (self.weights_bytes if kept else 0)
        self.update_bytes = int(self.weights_bytes + max(step_bytes, temporary))
        state_bytes = row.frozen_bytes + self.weights_bytes * (1 + program.weights.buffers(stage))
        state_bytes += row.optimizer_bytes + kept
        messages = message_bytes(sizes, in_flight[stage], row.recompute, peers_of(plan.replicas, in_flight)[stage])
        if plan.optimizer_state == HOST and not isinstance(program.placement, Dispatched):
            if plan.costs.on_gpus:
                state_bytes -= row.optimizer_bytes + kept
                self.update_bytes = self.weights_bytes
            else:
                state_bytes += self.weights_bytes
        if program.overlaps_updates and row.replicas == 1:  # a thread's may last until the next
            state_bytes, self.update_bytes = state_bytes + self.update_bytes, 0
        if _is_apart(program):  # copies, for a slot alone, and those of the slot before
            self.forward_bytes += 2 * row.parameter_bytes
            self.first_bytes += 2 * row.parameter_bytes
            self.further_bytes += 2 * row.parameter_bytes
            state_bytes = self.weights_bytes = self.update_bytes = 0
        self.start_bytes = state_bytes + int(messages)

    @property
    def held_bytes(self) -> int:
        passes = self.in_flight * self.waiting_bytes + self.deferred * self.deferred_bytes
        return self.start_bytes + (self.alive - 1) * self.weights_bytes + passes

    def forward(self) -> int:
        """Returns the most that the next forward holds; the other ops likewise."""
        self.in_flight += 1
        version = self.read[self.forwarded]
        self.forwarded += 1
        if self.until is not None and version != self.predicted:
            self.predicted = version
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
        self.in_flight += self.is_remote
        most = self.held_bytes + (self.further_bytes if self.has_sums else self.first_bytes)
        self.in_flight -= 1
        self._end(index)
        return most

    def input_gradient(self) -> int:
        self.in_flight -= 1
        self.deferred += 1
        return self.held_bytes + self.working_bytes + (self.weights_bytes if self.has_sums else 0)

    def weight_gradient(self, index: int) -> int:
        most = self.held_bytes + self.working_bytes + self.weights_bytes
        most += self.largest_bytes if self.has_sums else 0
        self.deferred -= 1
        self._end(index)
        return most

    def _end(self, index: int) -> None:
        self.has_sums = True
        self.order.append(index)
        if self.held_until is Kind.BACKWARD:
            self._release(self.read[index // self.stride])

    def _release(self, version: int) -> None:
        left = self.readers[version] = self.readers[version] - 1
        if not left and (version != self.newest or self.until is not None):
            self.alive -= 1

    def update(self, index: int) -> int:
        if self.held_until is not None and self.until is None and self.readers[self.newest]:
            self.alive += 1
            self.peak = max(self.peak, self.alive)
        self.newest = index
        self.has_sums = False
        return self.held_bytes + self.update_bytes

    def gradients(self, program: Program, stage: int) -> list[GradientVersions]:
        rule, per_update, read, stride = program.weights, program.updates.per_update[stage], self.read, self.stride
        if type(rule).backward_version is WeightRule.backward_version:  # that of the forward
            versions = ((k, read[k // stride], read[k // stride]) for k in self.order)
        else:
            versions = ((k, read[k // stride], rule.backward_version(stage, k)) for k in self.order)
        return [
            _new(GradientVersions, (stage, k, forward, backward, k // per_update)) for k, forward, backward in versions
        ]


def trace_memory(
    program: Program, rank: int, total: int, spans: Iterable[Span], in_flight: tuple[int, ...]
) -> MemoryTrace:
    """Returns what a rank held, from its spans in the order of its ops."""
    stages = {
        stage: _StageTrace(program, stage, replica, total, in_flight)
        for stage, replica in program.placement.stage_replicas(rank)
    }
    remote = RemoteForwardsTrace(program, rank, total)
    memory = [sum(trace.start_bytes for trace in stages.values()) + remote.held_bytes]
    several = len(stages) > 1
    for _, kind, stage, index, _, _ in spans:
        if kind == "wait":
            continue
        if kind == "F" and stage in remote.stages:
            memory.append(remote.forward(stage, index) + sum(trace.held_bytes for trace in stages.values()))
            continue
        trace = stages[stage]
        if kind == "F":
            most = trace.forward() if program.trains else trace.held_bytes
        elif kind == "B":
            most = trace.backward(index)
        elif kind == "I":
            most = trace.input_gradient()
        elif kind == "W":
            most = trace.weight_gradient(index)
        elif kind == "U":
            most = trace.update(index)
        else:
            most = trace.held_bytes
        if several:
            most += sum(other.held_bytes for other in stages.values() if other is not trace)
        memory.append(most + remote.held_bytes if remote.stages else most)
    return MemoryTrace(
        peak_versions=sum(trace.peak for trace in stages.values()) + remote.peak_versions,
        gradient_versions=tuple(
            gradient for stage, trace in stages.items() for gradient in trace.gradients(program, stage)
        ),
        memory=tuple(memory),
    )
