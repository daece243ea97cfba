"""Sends losses, metrics and outputs from the last stage's workers to all ranks.

A rank reads a minibatch's sums when its own weights contain the minibatch, long after they were computed, so no rank
waits for them. They travel from stage to stage with the gradients of the minibatch's last microbatch; a rank that does
not get these gradients, because another replica does, receives a separate message.

Where sums are read late (`reads_late`), they are sent one minibatch of their rank later, those of an evaluation at its
end, so that no worker waits for its GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from typing import Any

from pipedream.core.errors import WorkerError
from pipedream.core.plan.placement import Placement
from pipedream.runtime.comm.channel import Receiver, Sender, Waiting, wait_for
from pipedream.runtime.comm.message import ENDS_EPOCH, Message

NOT_FINITE_ADVICE = (
    "lower the learning rate, clip the gradients (clip_grad_norm=...), check that minibatch's data, or continue "
    "regardless with on_nan='continue'"
)

ReadSums = Callable[[], Message]
"""Returns sums over microbatches of a minibatch; may wait for a GPU. The message's numbers are weighted loss, weight,
then weighted value and weight of each metric."""


@dataclass(frozen=True)
class Done:
    """One minibatch whose gradients are in the weights; equal on every rank.

    Attributes:
        number: from 0 at the start of training.
        epoch: from 0.
        ends_epoch: it was the epoch's last one.
        loss: mean over `weight`.
        weight: samples, tokens, ...
        rate: learning rate before the stages' factors.
        metrics: name -> mean.
    """

    number: int
    epoch: int
    ends_epoch: bool
    loss: float
    weight: float
    samples: int
    rate: float
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Output:
    """The model's output for one minibatch, at rank 0."""

    number: int
    value: Any


class Results:
    """One rank's part in exchanging the results.

    Args:
        senders: by rank, at the last stage.
        receivers: by rank of the last stage.
        reads_late: losses are read once the rank has computed its next minibatch's, or at the end of an evaluation.
        process: this rank among all ranks of the job, for errors.

    Attributes:
        where: describes the present op.
        delay: how many minibatches after its gradients a minibatch's results are received in this stream.
    """

    def __init__(
        self,
        rank: int,
        placement: Placement,
        senders: dict[int, Sender],
        receivers: dict[int, Receiver],
        metrics: Sequence[str],
        *,
        reads_late: bool,
        process: int,
    ) -> None:
        self._rank = rank
        self._process = process
        self._placement = placement
        self._last_stage_ranks = placement.scorers
        self._first_stages = [min(placement.stage_replicas(r))[0] for r in range(placement.workers)]
        self.senders = senders
        self.receivers = receivers
        self._metrics = tuple(metrics)
        self.reads_late = reads_late
        self.where: Callable[[], str] = lambda: "the start"
        self._reached_ranks: dict[int, frozenset[int]] = {}
        self.begin()

    def begin(self, microbatches: int = 0) -> None:
        """Begins a stream. `microbatches`: of a minibatch; 0 without backwards."""
        self._split = microbatches
        round_microbatches = len(self._last_stage_ranks) * self._placement.turn
        self.delay = max(1, -(-round_microbatches // microbatches)) if self.reads_late and microbatches else 0
        self._unsent: tuple[int, ReadSums] | None = None
        self._parts: dict[tuple[int, int], Message] = {}
        self._carried: dict[int, Message] = {}
        self._outputs: dict[int, Message] = {}

    # -- at the last stage --------------------------------------------------------------------------

    def complete(self, key: int, read: ReadSums, index: int = 0) -> None:
        """Ends minibatch `key` of this stream after its last forward here, of microbatch `index`; with a delay, sends
        the previous one.
        """
        if not self.delay:
            self._send(key, read, index)
            return
        if self._unsent is not None:
            self._send(*self._unsent, index)
        self._unsent = key, read

    def finish(self) -> None:
        """Sends the last sums, at a drain."""
        if self._unsent is not None:
            self._send(*self._unsent, None)
            self._unsent = None

    def _send(self, key: int, read: ReadSums, index: int | None) -> None:
        message = read()
        reached_ranks = frozenset() if index is None else self._find_reached(index)
        if reached_ranks:
            assert index is not None
            self._carried[index] = message
        for rank, sender in self.senders.items():
            if rank not in reached_ranks:
                sender.send(message)
        self._parts[self._last_stage_ranks.index(self._rank), key] = message

    def make_error(self, cause: str) -> WorkerError:
        """Returns the error for numbers that are not finite."""
        return WorkerError(self._process, self.where(), cause, NOT_FINITE_ADVICE)

    # -- on the way ---------------------------------------------------------------------------------

    def take_carried(self, index: int) -> Message | None:
        """Returns the results that travel with the last stage's gradients of a microbatch."""
        return self._carried.pop(index, None)

    def accept_carried(self, index: int, message: Message) -> None:
        """Takes the results that came with the gradients of a microbatch, if they are for this rank."""
        if self._rank not in self._find_reached(index):
            return
        replica = self._find_owner(index)
        key = index // self._split
        if self.delay:
            key = (self._find_first(replica, key) - len(self._last_stage_ranks) * self._placement.turn) // self._split
        self._parts[replica, key] = message.without_tensors()

    def _find_reached(self, index: int) -> frozenset[int]:
        """Returns the ranks that get the gradients of a microbatch before they read its results."""
        if not self._split:
            return frozenset()
        turn = index % self._placement.cycle
        reached = self._reached_ranks.get(turn)
        if reached is None:
            rank_of = self._placement.rank_of
            ranks = (rank for rank, stage in enumerate(self._first_stages) if rank_of(stage, turn) == rank)
            reached = self._reached_ranks[turn] = frozenset(ranks) - {rank_of(-1, turn)}
        return reached

    def _find_owner(self, index: int) -> int:
        """Returns which of the last stage's ranks has a microbatch."""
        return index // self._placement.turn % len(self._last_stage_ranks)

    def _find_first(self, replica: int, key: int) -> int:
        """Returns the first microbatch of a rank of the last stage from the minibatch `key` on."""
        begin, turn = key * self._split, self._placement.turn
        rotations = (replica - begin // turn) % len(self._last_stage_ranks)
        return (begin // turn + rotations) * turn if rotations else begin

    def _find_carrier(self, replica: int, key: int) -> int:
        """Returns the microbatch whose gradients carry a replica's part of a minibatch."""
        if self.delay:
            key = self._find_first(replica, key + 1) // self._split
        last, turn = (key + 1) * self._split - 1, self._placement.turn
        rotations = (last // turn - replica) % len(self._last_stage_ranks)
        return (last // turn - rotations + 1) * turn - 1 if rotations else last

    # -- at every rank ------------------------------------------------------------------------------

    def _list_replicas(self, key: int) -> Sequence[int]:
        """Returns the replicas of the last stage that have a part of a minibatch; in an evaluation all have."""
        count = len(self._last_stage_ranks)
        if not self._split:
            return range(count)
        return sorted({self._find_owner(k) for k in range(key * self._split, (key + 1) * self._split)})

    def collect(self, key: int, rate: float, total: int | None = None) -> Waiting[Done]:
        """Returns a minibatch's results, added in the order of the replicas, so that all ranks get the same.

        Args:
            total: microbatches of the stream, once it has ended.
        """
        parts: list[Message] = []
        for replica in self._list_replicas(key):
            part = self._parts.pop((replica, key), None)
            if part is None:
                if self._split:
                    carrier = self._find_carrier(replica, key)
                    assert self._rank not in self._find_reached(carrier) or (total is not None and carrier >= total)
                part = yield from self._receive(self._last_stage_ranks[replica])
            parts.append(part)
        loss, weight, *rest = reduce(add_numbers, (part.numbers for part in parts))
        return Done(
            number=parts[0].minibatch,
            epoch=parts[0].epoch,
            ends_epoch=bool(parts[0].flags & ENDS_EPOCH),
            loss=loss / weight if weight else float("nan"),
            weight=weight,
            samples=sum(part.samples for part in parts),
            rate=rate,
            metrics={
                name: rest[2 * i] / rest[2 * i + 1] if rest[2 * i + 1] else float("nan")
                for i, name in enumerate(self._metrics)
            },
        )

    def send_output(self, index: int, message: Message) -> None:
        if self._rank == 0:
            self._outputs[index] = message
        else:
            self.senders[0].send(message)

    def receive_output(self, index: int, owner: int) -> Waiting[Output]:
        message = self._outputs.pop(index) if owner == self._rank else (yield from self._receive(owner))
        return Output(message.minibatch, message.value())

    def _receive(self, owner: int) -> Waiting[Message]:
        return (yield from wait_for(self.receivers[owner].receive()))


def add_numbers(numbers: Sequence[float], others: Sequence[float]) -> tuple[float, ...]:
    """Returns the sums of two parts of a minibatch."""
    return tuple(a + b for a, b in zip(numbers, others, strict=True))
