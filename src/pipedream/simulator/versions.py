"""What a rank holds while a program runs: versions of its weights, activations; and what its gradients carry.

None of it depends on how fast anything is, only on the order of the rank's ops, so it is followed after the run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from ..core.memory import stage_bytes
from ..core.op import Kind
from ..core.program import Program
from ..core.timeline import Span, Tag
from ..core.weights import WeightRule

__all__ = ["Held", "follow"]

_new: Callable[..., Any] = tuple.__new__  # makes a named tuple without a call in Python


@dataclass(frozen=True)
class Held:
    """What one rank has held.

    Attributes:
        peak_versions: most distinct sets of weights alive at once, over its seats.
        tags: of its gradients, seat by seat.
        memory: bytes at the start and after each of its ops.
    """

    peak_versions: int
    tags: tuple[Tag, ...]
    memory: tuple[int, ...]


class _Seat:
    """One seat's versions. A version is alive while it is the newest, and while a microbatch that is in flight or
    still to come reads it.

    Attributes:
        stride: from one microbatch of the seat to its next.
        read: version that each of its microbatches reads.
        readers: version -> microbatches not yet backwarded that read it.
        newest, alive, peak: version made last; distinct ones alive now, and at most.
        order: its microbatches in the order of their gradients.
        start_bytes, weights_bytes, activation_bytes: held at the start, by a version, by a microbatch in flight.
    """

    def __init__(self, program: Program, stage: int, replica: int, total: int) -> None:
        plan = program.plan
        row = plan.stages[stage]
        parts = program.microbatches if plan.unit == "minibatch" else 1
        self.stride = program.placement.replicas[stage]
        self.read = [program.weights.forward_version(stage, k) for k in range(replica, total, self.stride)]
        self.readers = Counter(self.read)
        self.newest = 0
        self.alive = self.peak = 1
        self.order: list[int] = []
        self.weights_bytes = row.parameter_bytes
        self.activation_bytes = -(-row.activation_bytes // parts)
        self.start_bytes = stage_bytes(
            parameter_bytes=row.parameter_bytes,
            optimizer_bytes=row.optimizer_bytes,
            activation_bytes=self.activation_bytes,
            input_bytes=-(-plan.stages[stage - 1].output_bytes // parts) if stage else 0,
            versions=1,
            in_flight=0,
        )

    def tags(self, program: Program, stage: int) -> list[Tag]:
        rule, per_update, read, stride = program.weights, program.updates.per_update[stage], self.read, self.stride
        if type(rule).backward_version is WeightRule.backward_version:  # that of the forward
            versions = ((k, read[k // stride], read[k // stride]) for k in self.order)
        else:
            versions = ((k, read[k // stride], rule.backward_version(stage, k)) for k in self.order)
        return [_new(Tag, (stage, k, forward, backward, k // per_update)) for k, forward, backward in versions]


def follow(program: Program, rank: int, total: int, spans: Iterable[Span]) -> Held:
    """Returns what a rank held in a run of `total` microbatches.

    Args:
        program: whose.
        rank: which.
        total: microbatches of the run.
        spans: of the rank, in the order of its ops.
    """
    seats = {stage: _Seat(program, stage, replica, total) for stage, replica in program.placement.seats(rank)}
    held = sum(seat.start_bytes for seat in seats.values())
    memory = [held]
    trains = len(program.kinds) > 1
    last = (Kind.WEIGHT_GRADIENT if Kind.WEIGHT_GRADIENT in program.kinds else Kind.BACKWARD).value
    for _, kind, stage, index, _, _ in spans:
        if kind == "wait":
            continue
        seat = seats[stage]
        if kind == "F":
            if trains:
                held += seat.activation_bytes
        elif kind == last:
            held -= seat.activation_bytes
            seat.order.append(index)
            version = seat.read[index // seat.stride]
            left = seat.readers[version] = seat.readers[version] - 1
            if not left and version != seat.newest:
                seat.alive -= 1
                held -= seat.weights_bytes
        elif kind == "U":
            if seat.readers[seat.newest]:
                seat.alive += 1
                held += seat.weights_bytes
                if seat.alive > seat.peak:
                    seat.peak = seat.alive
            seat.newest = index
        memory.append(held)
    return Held(
        peak_versions=sum(seat.peak for seat in seats.values()),
        tags=tuple(tag for stage, seat in seats.items() for tag in seat.tags(program, stage)),
        memory=tuple(memory),
    )
