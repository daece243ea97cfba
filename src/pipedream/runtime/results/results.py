"""Losses, metrics and outputs: from the workers of the last stage to all ranks.

Off the compute path: a rank receives a minibatch's sums when its own weights contain the minibatch, long after they
were sent.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pipedream.runtime.comm.channel import Receiver, Sender, Waiting
from pipedream.runtime.comm.message import ENDS_EPOCH, Message
from pipedream.runtime.comm.values import unflatten

__all__ = ["Done", "MinibatchSums", "Output", "Results"]


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


@dataclass
class MinibatchSums:
    """Sums over some microbatches: weighted loss, weight, then weighted value and weight of each metric."""

    minibatch: int = 0
    epoch: int = 0
    flags: int = 0
    samples: int = 0
    numbers: list[float] = field(default_factory=list)

    def add(self, numbers: Sequence[float], samples: int) -> None:
        self.numbers = [a + b for a, b in zip(self.numbers, numbers, strict=True)] if self.numbers else list(numbers)
        self.samples += samples


class Results:
    """One rank's part in exchanging the results.

    Args:
        owners: ranks of the last stage's replicas.
        senders: by rank, at the last stage.
        receivers: by rank of the last stage.
    """

    def __init__(
        self,
        rank: int,
        owners: Sequence[int],
        senders: Mapping[int, Sender],
        receivers: Mapping[int, Receiver],
        metrics: Sequence[str],
    ) -> None:
        self._rank = rank
        self._owners = tuple(owners)
        self.senders = senders
        self.receivers = receivers
        self._metrics = tuple(metrics)
        self.begin()

    def begin(self) -> None:
        """Drops what is left of an earlier stream."""
        self._open: dict[int, MinibatchSums] = {}
        self._own: dict[int, MinibatchSums] = {}
        self._outputs: dict[int, Message] = {}

    @property
    def zeros(self) -> list[float]:
        return [0.0] * (2 + 2 * len(self._metrics))

    def add(self, key: int, message: Message, numbers: Sequence[float]) -> None:
        """`key` is the minibatch's number in this stream."""
        sums = self._open.setdefault(key, MinibatchSums(message.minibatch, message.epoch, message.flags & ENDS_EPOCH))
        sums.add(numbers, message.samples)

    def send_sums(self, key: int) -> None:
        sums = self._open.pop(key, None) or MinibatchSums()
        sums.numbers = sums.numbers or self.zeros
        self._own[key] = sums
        message = Message(
            0,
            minibatch=sums.minibatch,
            epoch=sums.epoch,
            flags=sums.flags,
            samples=sums.samples,
            numbers=tuple(sums.numbers),
        )
        for sender in self.senders.values():
            sender.send(message)

    def replicas_of(self, key: int, microbatches: int) -> list[int]:
        """Returns those that have a part of a minibatch."""
        count = len(self._owners)
        return sorted({k % count for k in range(key * microbatches, (key + 1) * microbatches)})

    def collect(self, key: int, replicas: Iterable[int], rate: float) -> Waiting[Done]:
        """Adds in the order of the replicas, so that all ranks get the same."""
        total: MinibatchSums | None = None
        for replica in replicas:
            owner = self._owners[replica]
            if owner == self._rank:
                part = self._own.pop(key)
            else:
                message = yield from self._received(owner)
                part = MinibatchSums(
                    message.minibatch, message.epoch, message.flags, message.samples, list(message.numbers)
                )
            if total is None:
                total = part
            else:
                total.add(part.numbers, part.samples)
        assert total is not None
        loss, weight, *rest = total.numbers
        return Done(
            number=total.minibatch,
            epoch=total.epoch,
            ends_epoch=bool(total.flags & ENDS_EPOCH),
            loss=loss / weight if weight else float("nan"),
            weight=weight,
            samples=total.samples,
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
        message = self._outputs.pop(index) if owner == self._rank else (yield from self._received(owner))
        return Output(message.minibatch, unflatten(message.structure, message.tensors))  # type: ignore[arg-type]

    def _received(self, owner: int) -> Waiting[Message]:
        pending = self.receivers[owner].receive()
        if not pending.ready():
            yield pending
        return pending.result()
