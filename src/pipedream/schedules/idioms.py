"""The few turns of phrase that orders are written in. Each yields ops without end.

Legend: a seat is a (stage, replica); its microbatches are replica, replica + r, replica + 2 r, ...
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from itertools import count

from ..core.errors import ScheduleError
from ..core.op import Kind, Op
from ..core.placement import Placement, Seat
from ..core.plan import Plan
from ..core.schedule import Order

__all__ = [
    "B",
    "F",
    "I",
    "Turns",
    "W",
    "at_one_seat",
    "backward",
    "endless",
    "flushed",
    "forward",
    "input_gradient",
    "one_forward_one_backward",
    "one_forward_one_input_gradient",
    "share_out",
    "update",
    "weight_gradient",
    "with_updates",
]

F, B, U = Kind.FORWARD, Kind.BACKWARD, Kind.UPDATE
I, W = Kind.INPUT_GRADIENT, Kind.WEIGHT_GRADIENT  # noqa: E741  # the field's letters


def forward(seat: Seat, microbatch: int) -> Op:
    """Returns the forward of a microbatch at a seat."""
    return Op(F, seat[0], microbatch, seat[1])


def backward(seat: Seat, microbatch: int) -> Op:
    """Returns the backward of a microbatch at a seat."""
    return Op(B, seat[0], microbatch, seat[1])


def input_gradient(seat: Seat, microbatch: int) -> Op:
    """Returns the half of a backward that the stage before waits for."""
    return Op(Kind.INPUT_GRADIENT, seat[0], microbatch, seat[1])


def weight_gradient(seat: Seat, microbatch: int) -> Op:
    """Returns the half of a backward that only the update waits for."""
    return Op(W, seat[0], microbatch, seat[1])


def update(seat: Seat, number: int) -> Op:
    """Returns the update that makes version `number` at a seat."""
    return Op(U, seat[0], number, seat[1])


class Turns:
    """What a worker takes of the microbatches of a minibatch, at several stages in turn: each kind of op in order.

    Args:
        mine: the microbatches.
    """

    def __init__(self, mine: range) -> None:
        self._mine = mine
        self._taken: Counter[tuple[Kind, Seat]] = Counter()

    def left(self, kind: Kind, seat: Seat) -> int:
        """Returns how many microbatches are still to have this kind of op."""
        return len(self._mine) - self._taken[kind, seat]

    def take(self, *steps: tuple[Kind, Seat], times: int = 1) -> Iterator[Op]:
        """Yields the next op of each of these, so many times; leaves out those that have none left, or none as yet: a
        backward needs its forward, a weight gradient its input gradient."""
        for _ in range(times):
            for kind, seat in steps:
                before = {F: None, B: F, I: F, W: I}[kind]
                most = len(self._mine) if before is None else self._taken[before, seat]
                if self._taken[kind, seat] < most:
                    yield Op(kind, seat[0], self._mine[self._taken[kind, seat]], seat[1])
                    self._taken[kind, seat] += 1


def at_one_seat(placement: Placement, ops: Callable[[Seat], Iterator[Op]]) -> Order:
    """Returns the order of a placement with one seat a rank, from what a seat does."""

    def order(rank: int) -> Iterator[Op]:
        (seat,) = placement.seats(rank)
        return ops(seat)

    return order


def one_forward_one_backward(seat: Seat, *, mine: range, warmup: int) -> Iterator[Op]:
    """Yields `warmup` forwards, then one forward and one backward in turn, then the backwards that are left.

    Args:
        seat: the (stage, replica).
        mine: the seat's microbatches.
        warmup: W_s, forwards before the first backward beside the one that belongs to it.
    """
    for i in range(len(mine) + warmup):
        if i < len(mine):
            yield forward(seat, mine[i])
        if i >= warmup:
            yield backward(seat, mine[i - warmup])


def one_forward_one_input_gradient(seat: Seat, *, mine: range, warmup: int, behind: int) -> Iterator[Op]:
    """Yields 1F1B with its backwards split: weight gradients come `behind` later than input gradients, then the rest.

    Args:
        seat, mine, warmup: as for `one_forward_one_backward`.
        behind: input gradients between that of a microbatch and its weight gradient.
    """
    for i in range(len(mine) + warmup):
        if i < len(mine):
            yield forward(seat, mine[i])
        if i >= warmup:
            yield input_gradient(seat, mine[i - warmup])
            if i >= warmup + behind:
                yield weight_gradient(seat, mine[i - warmup - behind])
    yield from (weight_gradient(seat, k) for k in mine[max(0, len(mine) - behind) :])


def with_updates(ops: Iterator[Op], *, replicas: int, per_update: int, lag: int = 0) -> Iterator[Op]:
    """Yields an order with an update after the seat's last backward of each, or after the forward behind it.

    Args:
        ops: forwards and backwards of one seat, backwards (or the weight gradients of split ones) in order.
        replicas: of the stage; the seat takes every so-manieth microbatch.
        per_update: microbatches in an update, over all replicas; at least `replicas`.
        lag: 1 puts the next forward before the update.
    """
    due: Op | None = None
    for op in ops:
        yield op
        if op.kind in (B, W) and (op.index + replicas) // per_update > op.index // per_update:
            due = update((op.stage, op.replica), op.index // per_update + 1)
        if due is not None and (not lag or op.kind is F):
            yield due
            due = None


def flushed(seat: Seat, *, replicas: int, microbatches: int, ops: Callable[[range], Iterator[Op]]) -> Iterator[Op]:
    """Yields, minibatch after minibatch, the ops on the seat's share of its microbatches and one update."""
    for number in count():
        first = number * microbatches
        yield from ops(range(first + (seat[1] - first) % replicas, first + microbatches, replicas))
        yield update(seat, number + 1)


def share_out(name: str, plan: Plan, wanted: int | None, usual: int) -> int:
    """Returns m for a flushing method: what is wanted, or the usual number, rounded up to the most replicas.

    Raises:
        ScheduleError: fewer than the replicas of some stage: each must have a part in every update, or it would
            not know, before it waits for the others' gradients, whether there is one.
    """
    most = max(plan.replicas)
    if wanted is not None and wanted < most:
        raise ScheduleError(
            f"schedule {name!r} with {wanted} microbatches a minibatch: a stage has {most} replicas, and each takes "
            f"part in every update; split the minibatch into at least {most}"
        )
    return wanted or max(usual, most)


def endless(seat: Seat, replicas: int) -> range:
    """Returns all microbatches of a seat (2 to the 62nd: more than any run has)."""
    return range(seat[1], 2**62, replicas)
