"""Sends losses, metrics and outputs from the last stage's workers to all ranks.

A rank reads a minibatch's sums when its own weights contain the minibatch, long after they were computed, so no rank
waits for them. They travel from stage to stage with the gradients of the minibatch's last microbatch; a rank that does
not get these gradients, because another replica does, receives a separate message.

Losses on a GPU are read one minibatch of their rank later (`reads_late`), those of an evaluation at its end, so that no
worker waits for its GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from typing import Any

import torch

from pipedream.core.errors import WorkerError
from pipedream.core.plan.placement import Placement
from pipedream.runtime.comm.channel import Receiver, Sender, Waiting, wait_for
from pipedream.runtime.comm.message import ENDS_EPOCH, Message

NOT_FINITE_ADVICE = (
    "lower the learning rate, clip the gradients (clip_grad_norm=...), check that minibatch's data, or continue "
    "regardless with on_nan='continue'"
)

Score = tuple[float | torch.Tensor, float]
"""A number of one microbatch, as value and factor: their product. A value on a GPU is read later."""


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


@dataclass(slots=True)
class MinibatchTotals:
    """Sums over some microbatches.

    Attributes:
        message: its numbers are weighted loss, weight, then weighted value and weight of each metric.
        unread: scores of further microbatches (`read`).
    """

    message: Message
    unread: list[Sequence[Score]] = field(default_factory=list)
    _copies: _HostCopies | None = None

    def add(self, numbers: Sequence[float]) -> None:
        before = self.message.numbers
        self.message.numbers = _add(before, numbers) if before else tuple(numbers)

    def begin_reading(self) -> None:
        """Starts to copy the unread scores from the GPU."""
        self._copies = _HostCopies([v for row in self.unread for v, _ in row if isinstance(v, torch.Tensor)])

    def read(self) -> Iterator[list[float]]:
        """Yields the numbers of each microbatch whose scores are unread."""
        assert self._copies is not None
        values = iter(self._copies.read())
        for row in self.unread:
            yield [(next(values) if isinstance(v, torch.Tensor) else v) * factor for v, factor in row]
        self.unread, self._copies = [], None


class _HostCopies:
    """Numbers that are being copied from a GPU, in one piece."""

    def __init__(self, values: Sequence[torch.Tensor]) -> None:
        self._event: torch.cuda.Event | None = None
        self._numbers = torch.empty(0, dtype=torch.float64)
        # A metric may give a number on the CPU beside a loss on a GPU.
        self._on_cpu = [None if value.is_cuda else float(value) for value in values]
        on_gpu = [value.detach().double().reshape(()) for value in values if value.is_cuda]
        if on_gpu:
            self._numbers = torch.empty(len(on_gpu), dtype=torch.float64, pin_memory=True)
            self._numbers.copy_(torch.stack(on_gpu), non_blocking=True)
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record()

    def read(self) -> list[float]:
        if self._event is not None:
            self._event.synchronize()
        copies = iter(self._numbers.tolist())
        return [next(copies) if value is None else value for value in self._on_cpu]


class Results:
    """One rank's part in exchanging the results.

    Args:
        senders: by rank, at the last stage.
        receivers: by rank of the last stage.
        raises_on_nan: whether a loss that is nan raises an error in training.
        reads_late: losses are read once the rank has computed its next minibatch's, or at the end of an evaluation.
        process: this rank among all ranks of the job, for errors; by default `rank`.

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
        raises_on_nan: bool = False,
        reads_late: bool = False,
        process: int | None = None,
    ) -> None:
        self._rank = rank
        self._process = rank if process is None else process
        self._placement = placement
        self._last_stage_ranks = placement.scorers
        self._first_stages = [min(placement.stage_replicas(r))[0] for r in range(placement.workers)]
        self.senders = senders
        self.receivers = receivers
        self._metrics = tuple(metrics)
        self.raises_on_nan = raises_on_nan
        self._reads_late = reads_late
        self.where: Callable[[], str] = lambda: "the start"
        self._reached_ranks: dict[int, frozenset[int]] = {}
        self.begin()

    def begin(self, microbatches: int = 0) -> None:
        """Begins a stream. `microbatches`: of a minibatch; 0 without backwards."""
        self._split = microbatches
        round_microbatches = len(self._last_stage_ranks) * self._placement.turn
        self.delay = max(1, -(-round_microbatches // microbatches)) if self._reads_late and microbatches else 0
        self._open_totals: dict[int, MinibatchTotals] = {}
        self._unsent: tuple[int, MinibatchTotals] | None = None
        self._parts: dict[tuple[int, int], Message] = {}
        self._carried: dict[int, Message] = {}
        self._outputs: dict[int, Message] = {}

    @property
    def zeros(self) -> list[Score]:
        return [(0.0, 1.0)] * (2 + 2 * len(self._metrics))

    # -- at the last stage --------------------------------------------------------------------------

    def add(self, key: int, message: Message, scores: Sequence[Score]) -> None:
        """Adds a microbatch's scores to minibatch `key` of this stream. Raises WorkerError if the loss is nan."""
        totals = self._open_totals.get(key)
        if totals is None:
            flags = message.flags & ENDS_EPOCH
            first = Message(0, minibatch=message.minibatch, epoch=message.epoch, flags=flags)
            totals = self._open_totals[key] = MinibatchTotals(first)
        totals.message.samples += message.samples
        if self.delay:
            totals.unread.append(scores)
        elif self._reads_late:  # copied: a metric may write into its tensor until the evaluation's end
            totals.unread.append([(v.clone() if isinstance(v, torch.Tensor) else v, factor) for v, factor in scores])
        else:
            self._add(totals, [float(value) * factor for value, factor in scores])

    def complete(self, key: int, index: int = 0) -> None:
        """Ends a minibatch after its last forward here, of microbatch `index`; with a delay, sends the previous one."""
        totals = self._open_totals.pop(key, None) or MinibatchTotals(Message(0, numbers=(0.0,) * len(self.zeros)))
        if self._reads_late:
            totals.begin_reading()
        if not self.delay:
            self._send(key, totals, index)
            return
        if self._unsent is not None:
            self._send(*self._unsent, index)
        self._unsent = key, totals

    def finish(self) -> None:
        """Sends the last sums, at a drain."""
        if self._unsent is not None:
            self._send(*self._unsent, None)
            self._unsent = None

    def _send(self, key: int, totals: MinibatchTotals, index: int | None) -> None:
        if totals.unread:
            for numbers in totals.read():
                self._add(totals, numbers)
        message = totals.message
        reached_ranks = frozenset() if index is None else self._find_reached(index)
        if reached_ranks:
            assert index is not None
            self._carried[index] = message
        for rank, sender in self.senders.items():
            if rank not in reached_ranks:
                sender.send(message)
        self._parts[self._last_stage_ranks.index(self._rank), key] = message

    def _add(self, totals: MinibatchTotals, numbers: Sequence[float]) -> None:
        if numbers[0] != numbers[0] and self.raises_on_nan and self._split:
            cause = f"the loss of minibatch {totals.message.minibatch} is nan"
            raise WorkerError(self._process, self.where(), cause, NOT_FINITE_ADVICE)
        totals.add(numbers)

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
        loss, weight, *rest = reduce(_add, (part.numbers for part in parts))
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


def _add(numbers: Sequence[float], others: Sequence[float]) -> tuple[float, ...]:
    return tuple(a + b for a, b in zip(numbers, others, strict=True))
