"""What a stage holds under a method: microbatches in flight, and versions of its weights.

Read off the schedule itself, its order and its weight rule, so that a new method needs no formula here. Under the
paper's depth, for a straight pipeline of p stages and m microbatches: 1F1B holds min(p - s, m) in flight, GPipe m,
the naive order 1; PipeDream p - s versions, vertical sync p, 2BW 2, a flush 1.
"""

from __future__ import annotations

from dataclasses import dataclass

from .op import Kind, Op
from .program import Program
from .schedule import Schedule

__all__ = ["Held", "held", "most_in_flight"]


@dataclass(frozen=True)
class Held:
    """What a replica of a stage holds at most.

    Attributes:
        in_flight: microbatches forwarded and not yet backwarded.
        versions: distinct sets of weights alive at once, the newest included.
        kept_tensors: for each weight, that compensations of delay keep.
    """

    in_flight: int
    versions: int
    kept_tensors: int = 0


def held(schedule: Schedule) -> tuple[Held, ...]:
    """Returns what each stage of a schedule holds, in its fullest replica."""
    return tuple(
        Held(
            _in_flight(schedule, stage),
            schedule.weights.versions(stage),
            schedule.updates.kept_tensors(schedule.weights.staleness(stage)),
        )
        for stage in range(len(schedule.plan.stages))
    )


def _in_flight(schedule: Schedule, stage: int) -> int:
    """Follows the first replica, which has the most microbatches of a minibatch, until one behind the warm-up is
    forwarded: in a flushed minibatch all of its own have been by then, and an endless order only repeats itself."""
    replicas = schedule.plan.replicas[stage]
    last = max(schedule.microbatches, (schedule.plan.in_flight[stage] + 1) * replicas)
    ends = Kind.WEIGHT_GRADIENT if schedule.splits_backward else Kind.BACKWARD
    now = most = 0
    for kind, at, index, _ in schedule.order(schedule.placement.ranks[stage][0]):
        if at != stage:
            continue
        if kind is Kind.FORWARD:
            if index >= last:
                break
            now += 1
            most = max(most, now)
        elif kind is ends:
            now -= 1
    return most


def most_in_flight(program: Program, total: int | None = None) -> tuple[int, ...]:
    """Returns the microbatches that a replica of each stage of a program has forwarded and not yet backwarded, at most.

    An evaluation has no backwards: what its plan admits.

    Args:
        program: whose.
        total: microbatches of a run; as many as fill the pipeline, or fewer. None: of a run without end.
    """
    if len(program.kinds) == 1:
        return program.plan.in_flight
    found = []
    enough = 2 * program.cycle * (program.microbatches + max(program.plan.in_flight))
    counted = enough if total is None else min(enough, total)
    for stage, (rank, *_) in enumerate(program.placement.ranks):
        in_flight = most = 0
        for op in program.instructions(rank, counted):
            if isinstance(op, Op) and op.stage == stage:
                in_flight += (op.kind is Kind.FORWARD) - (op.kind is Kind.BACKWARD)
                most = max(most, in_flight)
        found.append(most)
    return tuple(found)
