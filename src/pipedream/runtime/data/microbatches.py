"""One worker's microbatches, each with its header.

If the replicas of the input stage cannot load their own parts (an iterable data set, or split minibatches), replica 0
alone reads, a whole round at a time, and sends the others theirs.

If the worker is a mesh, its first rank reads or receives, and sends everything to the others.

No deadlock: a forward of replica c waits until replica 0 reads its round, at its own first forward of it. That waits
only for ops of earlier rounds, because no stage has more in flight than the input stage. By induction every round is
read. (Sending waits only for the receipt of much earlier rounds.)
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from pipedream.runtime.comm.channel import Receiver, Sender
from pipedream.runtime.comm.message import ENDS_EPOCH, Content, Message, StopReason
from pipedream.runtime.comm.values import flatten, unflatten
from pipedream.runtime.data.batch_adapter import AdaptBatch
from pipedream.runtime.data.batches import BatchDim, split_minibatch
from pipedream.runtime.data.feed import Feed
from pipedream.runtime.data.reader import Minibatch


class Microbatches(ABC):
    """Life: `begin` a stream; `take` each microbatch until the answer is a `StopReason`; after a drain, `resume`."""

    ended_at: int = 0

    @abstractmethod
    def begin(self, per_minibatch: int, replica: int, base: int, cycle: int = 1, until: int | None = None) -> None:
        """Begins a stream.

        Args:
            base: minibatches done before.
            until: as for `Feed.begin`, but counted from the start of training.
        """

    @abstractmethod
    def take(self, microbatch: int) -> tuple[Message, Message] | StopReason:
        """Returns the input of the first layer and that of the loss."""

    @abstractmethod
    def stop(self, stop_reason: StopReason) -> None:
        """Ends the stream with what has been read."""

    @abstractmethod
    def resume(self) -> None:
        """Continues after a drain."""


class LocalMicrobatches(Microbatches):
    """Microbatches that this process reads, for other replicas too.

    Attributes:
        on_first: called once, with the inputs and targets of the next minibatch and with its parts.
    """

    on_first: Callable[[Any, Any, list[tuple[Message, Message]]], None] | None = None

    def __init__(
        self, feed: Feed, adapt: AdaptBatch, senders: Mapping[int, Sender] | None = None, batch_dim: BatchDim = 0
    ) -> None:
        self._feed = feed
        self._adapt = adapt
        self._batch_dim = batch_dim
        self._senders = dict(senders or {})
        self._replicas = 1 + max(self._senders, default=0)

    def begin(self, per_minibatch: int, replica: int, base: int, cycle: int = 1, until: int | None = None) -> None:
        self._feed.begin(cycle, None if until is None else until - base)
        self._per_minibatch = per_minibatch
        self._replica = replica
        self._base = base
        self._open_senders = dict(self._senders)  # whose stream has not ended
        self._number = -1
        self._parts: list[tuple[Message, Message]] = []
        self.ended_at = 0

    def take(self, microbatch: int) -> tuple[Message, Message] | StopReason:
        number, part = divmod(microbatch, self._per_minibatch)
        if number != self._number:
            minibatch = self._feed.read(number, self._replica)
            if isinstance(minibatch, StopReason):
                return self._end(minibatch)
            self._parts = self._split(number, minibatch)
            self._number = number
            self._send_round(number)
        return self._parts[part]

    def stop(self, stop_reason: StopReason) -> None:
        self._feed.stop(stop_reason)

    def resume(self) -> None:
        self._feed.resume()

    def _split(self, number: int, minibatch: Minibatch) -> list[tuple[Message, Message]]:
        inputs, targets = self._adapt(minibatch.batch)
        first = number * self._per_minibatch
        sizes, flat_inputs, flat_targets = split_minibatch(inputs, targets, self._per_minibatch, self._batch_dim)
        count = sum(sizes)

        def message(part: int, structure: str = "", tensors: tuple[torch.Tensor, ...] = ()) -> Message:
            return Message(
                microbatch=first + part,
                content=Content.DATA if sizes[part] else Content.EMPTY,
                tensors=tensors,
                structure=structure,
                gradients=(False,) * len(tensors),
                minibatch=self._base + number,
                epoch=minibatch.epoch,
                samples=sizes[part],
                flags=ENDS_EPOCH if minibatch.ends_epoch else 0,
                share=sizes[part] / count,
            )

        parts = [
            (message(part, *flat_inputs[part]), message(part, *flat_targets[part])) if size else (message(part),) * 2
            for part, size in enumerate(sizes)
        ]
        if self.on_first is not None:
            on_first, self.on_first = self.on_first, None
            on_first(inputs, targets, parts)
        return parts

    def _send_round(self, number: int) -> None:
        if not self._open_senders:
            return
        if self._per_minibatch > 1:
            self._send(self._parts)
            return
        for replica in range(1, self._replicas):
            minibatch = self._feed.read(number + replica, replica)
            if isinstance(minibatch, StopReason):
                for later in range(replica, self._replicas):
                    self._send_end(later, minibatch)
                return
            self._send(self._split(number + replica, minibatch))

    def _send(self, parts: list[tuple[Message, Message]]) -> None:
        for inputs, targets in parts:
            sender = self._open_senders.get(inputs.microbatch % self._replicas)
            if sender is not None:
                sender.send(_joined(inputs, targets))

    def _end(self, stop_reason: StopReason) -> StopReason:
        self.ended_at = self._feed.ended_at
        for replica in list(self._open_senders):
            self._send_end(replica, stop_reason)
        return stop_reason

    def _send_end(self, replica: int, stop_reason: StopReason) -> None:
        end = Message(self._feed.ended_at, Content.END, flags=int(stop_reason))
        self._open_senders.pop(replica).send(end)


class ReceivedMicrobatches(Microbatches):
    """Microbatches that replica 0 reads and sends."""

    def __init__(self, receiver: Receiver) -> None:
        self._receiver = receiver

    def begin(self, per_minibatch: int, replica: int, base: int, cycle: int = 1, until: int | None = None) -> None:
        self.ended_at = 0

    def take(self, microbatch: int) -> tuple[Message, Message] | StopReason:
        message = self._receiver.receive().result()
        if message.content is Content.END:
            self.ended_at = message.microbatch
            return StopReason(message.flags)
        assert message.microbatch == microbatch, f"received microbatch {message.microbatch} instead of {microbatch}"
        header = message.without_tensors()
        if message.content is Content.EMPTY:
            return header, header
        inputs, targets = _value_of(message)
        return header.with_tensors(*flatten(inputs)), header.with_tensors(*flatten(targets))

    def stop(self, stop_reason: StopReason) -> None:
        return

    def resume(self) -> None:
        return


class MeshMicrobatches(Microbatches):
    """Microbatches of the first rank of a mesh.

    Args:
        source: where this rank has them from.
        senders: to the other ranks.
    """

    def __init__(self, source: Microbatches, senders: Sequence[Sender]) -> None:
        self.source = source
        self._senders = senders

    def begin(self, per_minibatch: int, replica: int, base: int, cycle: int = 1, until: int | None = None) -> None:
        self.source.begin(per_minibatch, replica, base, cycle, until)

    def take(self, microbatch: int) -> tuple[Message, Message] | StopReason:
        messages = self.source.take(microbatch)
        self.ended_at = self.source.ended_at
        if isinstance(messages, StopReason):
            message = Message(self.ended_at, Content.END, flags=int(messages))
        else:
            message = _joined(*messages)
        for sender in self._senders:
            sender.send(message)
        return messages

    def stop(self, stop_reason: StopReason) -> None:
        self.source.stop(stop_reason)

    def resume(self) -> None:
        self.source.resume()


def _joined(inputs: Message, targets: Message) -> Message:
    """Returns one message with both, for `ReceivedMicrobatches`."""
    if inputs.content is not Content.DATA:
        return inputs
    return inputs.with_tensors(*flatten((_value_of(inputs), _value_of(targets))))


def _value_of(message: Message) -> Any:
    return unflatten(message.structure, message.tensors)  # type: ignore[arg-type]
