"""The input stage's door: a minibatch from the feed becomes microbatches, each with its header.

Where the replicas of the input stage cannot load their own parts (an iterable data set; a minibatch whose
microbatches are spread over them), replica 0 alone reads the data and hands the others theirs, each on a
channel of its own. Whenever it admits a minibatch of its own it reads the whole round, or all microbatches of
that minibatch, and sends before it goes on; the end of the stream is a message too, and the others stop where
replica 0 says. Nobody can wait in a circle: a forward of replica c waits for replica 0 to admit the round that it
belongs to; replica 0 admits a round at its first forward of it, which waits only for forwards and backwards of
earlier rounds, because at no stage more is in flight than at the input stage; so by induction every round is
admitted. (What was sent stays with the sender until it is received, and the send waits only for receives of
rounds long before.)
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

from pipedream.runtime.comm.channel import Receiver, Sender
from pipedream.runtime.comm.message import ENDS_EPOCH, Content, Ending, Message
from pipedream.runtime.comm.values import flatten, split, unflatten
from pipedream.runtime.data.feed import Admitted, Feed

__all__ = ["Door", "HandedDoor", "Intake", "OwnDoor"]


class Intake(ABC):
    """Abstract: the microbatches of one stream, at one worker of the input stage.

    Attributes:
        ended_at: minibatches of the stream, once it has ended.
    """

    ended_at: int = 0

    @abstractmethod
    def take(self, microbatch: int) -> tuple[Message, Message] | Ending:
        """Returns what the first layer takes and what goes straight to the loss, or why there is nothing."""


class Door(ABC):
    """Abstract: where the data of one worker of the input stage comes from."""

    @abstractmethod
    def open(self, parts: int, replica: int, base: int, cycle: int = 1, until: int | None = None) -> Intake:
        """Begins a stream.

        Args:
            parts: microbatches of a minibatch.
            replica: of the input stage, that takes them.
            base: minibatches done before this stream.
            cycle: as of `Feed.begin`.
            until: minibatches since the start of training at which it drains by itself; None: it does not.
        """

    @abstractmethod
    def stop(self, ending: Ending) -> None:
        """Lets the stream end with what has been admitted."""

    @abstractmethod
    def resume(self) -> None:
        """Goes on after a drain."""


class OwnDoor(Door):
    """Data that this process reads itself.

    Args:
        feed: of the minibatches.
        senders: other replica of the input stage -> channel, where they are handed theirs.
    """

    def __init__(self, feed: Feed, senders: Mapping[int, Sender] | None = None) -> None:
        self._feed = feed
        self._senders = senders or {}

    def open(self, parts: int, replica: int, base: int, cycle: int = 1, until: int | None = None) -> Intake:
        self._feed.begin(cycle, None if until is None else until - base)
        return _Splitting(self._feed, parts, replica, base, self._senders)

    def stop(self, ending: Ending) -> None:
        self._feed.stop(ending)

    def resume(self) -> None:
        self._feed.resume()


class HandedDoor(Door):
    """Data that replica 0 of the input stage reads; it alone decides where a stream ends."""

    def __init__(self, receiver: Receiver) -> None:
        self._receiver = receiver

    def open(self, parts: int, replica: int, base: int, cycle: int = 1, until: int | None = None) -> Intake:
        return _Receiving(self._receiver)

    def stop(self, ending: Ending) -> None:
        return

    def resume(self) -> None:
        return


class _Splitting(Intake):
    """Splits the minibatches of a feed; each is read with the first of its microbatches that is taken here."""

    def __init__(self, feed: Feed, parts: int, replica: int, base: int, senders: Mapping[int, Sender]) -> None:
        self._feed = feed
        self._parts = parts
        self._replica = replica
        self._base = base
        self._senders = dict(senders)
        self._replicas = 1 + max(senders, default=0)
        self._number = -1
        self._pieces: list[tuple[Message, Any, Any]] = []

    def take(self, microbatch: int) -> tuple[Message, Message] | Ending:
        number, part = divmod(microbatch, self._parts)
        if number != self._number:
            found = self._feed.admit(number, self._replica)
            if isinstance(found, Ending):
                return self._end(found)
            self._number, self._pieces = number, self._split(number, found)
            self._hand_out(number)
        header, inputs, targets = self._pieces[part]
        if header.content is Content.EMPTY:
            return header, header
        return header.carrying(*flatten(inputs)), header.carrying(*flatten(targets))

    def _split(self, number: int, found: Admitted) -> list[tuple[Message, Any, Any]]:
        counts = [found.samples // self._parts + (i < found.samples % self._parts) for i in range(self._parts)]
        headers = [
            Message(
                microbatch=number * self._parts + part,
                content=Content.DATA if count else Content.EMPTY,
                minibatch=self._base + number,
                epoch=found.epoch,
                samples=count,
                flags=ENDS_EPOCH if found.ends_epoch else 0,
                share=count / found.samples,
            )
            for part, count in enumerate(counts)
        ]
        inputs, targets = (split(value, found.samples, self._parts) for value in (found.inputs, found.targets))
        return list(zip(headers, inputs, targets, strict=True))

    def _hand_out(self, number: int) -> None:
        """Sends the other replicas their parts of the round that minibatch `number` begins, or belongs to."""
        if not self._senders:
            return
        if self._parts > 1:
            self._send(self._pieces)
            return
        for replica in range(1, self._replicas):
            found = self._feed.admit(number + replica, replica)
            if isinstance(found, Ending):
                for late in range(replica, self._replicas):
                    self._send_end(late, found)
                return
            self._send(self._split(number + replica, found))

    def _send(self, pieces: list[tuple[Message, Any, Any]]) -> None:
        for header, inputs, targets in pieces:
            sender = self._senders.get(header.microbatch % self._replicas)
            if sender is not None:
                empty = header.content is Content.EMPTY
                sender.send(header if empty else header.carrying(*flatten((inputs, targets))))

    def _end(self, ending: Ending) -> Ending:
        self.ended_at = self._feed.ended_at
        for replica in list(self._senders):
            self._send_end(replica, ending)
        return ending

    def _send_end(self, replica: int, ending: Ending) -> None:
        end = Message(self._feed.ended_at, Content.END, flags=int(ending))
        self._senders.pop(replica).send(end)


class _Receiving(Intake):
    """Takes what replica 0 sends."""

    def __init__(self, receiver: Receiver) -> None:
        self._receiver = receiver

    def take(self, microbatch: int) -> tuple[Message, Message] | Ending:
        message = self._receiver.receive().result()
        if message.content is Content.END:
            self.ended_at = message.microbatch
            return Ending(message.flags)
        assert message.microbatch == microbatch, f"microbatch {message.microbatch} was handed over for {microbatch}"
        header = message.without_tensors()
        if message.content is Content.EMPTY:
            return header, header
        inputs, targets = unflatten(message.structure, message.tensors)  # type: ignore[arg-type]
        return header.carrying(*flatten(inputs)), header.carrying(*flatten(targets))
