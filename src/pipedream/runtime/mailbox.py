"""The mail of one rank: what has come for its ops, what they made, and where a stream ends.

A message comes over a channel, or from another stage of the same rank, which hands it over in place. The end of a
stream travels behind the last message of each channel that carries forwards.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from dataclasses import replace
from typing import Any

from pipedream.core.plan.placement import Placement
from pipedream.core.schedule.op import Op
from pipedream.core.schedule.program import Channel
from pipedream.runtime.comm.channel import Receiver, Sender
from pipedream.runtime.comm.message import Content, Ending, Message, copy_as_received

__all__ = ["Mailbox"]

_FORWARD = ("activation", "input", "weights", "kept")
"""What comes before anything that goes back: with it the end of a stream is told."""
_NEVER = 2**62  # more microbatches than a stream has


class Mailbox:
    """Messages of one rank. Life: `begin` a stream; receive, take, hand on and send; `end`; `finish`.

    Args:
        rank: whose.
        placement: of the stages.
        channels: of the program, by number.
        senders, receivers: channel number -> its end here.
    """

    def __init__(
        self,
        rank: int,
        placement: Placement,
        channels: tuple[Channel, ...],
        senders: Mapping[int, Sender],
        receivers: Mapping[int, Receiver],
    ) -> None:
        self._rank = rank
        self._placement = placement
        self._channels = channels
        self._senders = senders
        self._receivers = receivers
        self.begin()

    def begin(self, per_fetch: int = 0) -> None:
        """Forgets the stream before.

        Args:
            per_fetch: microbatches that weights are fetched for; 0: of forwards alone, for which they are fetched once.
        """
        self._per_fetch = per_fetch
        self._inbox: dict[tuple[str, int, int], Message] = {}
        self._outbox: dict[tuple[str, int, int], Message] = {}
        self._ended: set[int] = set()
        self._sent: dict[int, int] = {}
        self._last: tuple[int, Ending] | None = None

    def receive(self, number: int, index: int) -> Generator[Any, None, tuple[int, Ending] | None]:
        """Takes the next message of a channel in; yields where it would wait.

        Returns: how many microbatches there are and why the stream ends, where that came instead; else None.
        """
        channel = self._channels[number]
        pending = self._receivers[number].receive()
        if not pending.ready():
            yield pending
        message = pending.result()
        if message.content is Content.END:
            self._ended.add(number)
            return message.microbatch, Ending(message.flags)
        # Weights leave their home when they are made, for a minibatch that may turn out not to exist.
        if message.microbatch != index:
            raise AssertionError(f"microbatch {message.microbatch} came on the {channel.carries} channel for {index}")
        self._inbox[channel.carries, channel.target, index] = message
        return None

    def take(self, carries: str, op: Op) -> Message:
        """Takes what an op reads."""
        return self._inbox.pop((carries, op.stage, op.index))

    def drop(self, carries: str, op: Op) -> None:
        """Drops what an op did not read, if it has come."""
        self._inbox.pop((carries, op.stage, op.index), None)

    def put(self, carries: str, target: int, message: Message) -> None:
        """Gives what an op made to its send, or to a stage of this rank."""
        if self._placement.ends(carries, target, target, message.microbatch)[1] == self._rank:
            # A copy, as a wire makes it: the stage may write into what it got.
            tensors = tuple(None if t is None else copy_as_received(t) for t in message.tensors)
            self._inbox[carries, target, message.microbatch] = replace(message, tensors=tensors)
        else:
            self._outbox[carries, target, message.microbatch] = message

    def send(self, number: int, index: int) -> None:
        """Sends what was made for a channel of a microbatch."""
        channel = self._channels[number]
        self._senders[number].send(self._outbox.pop((channel.carries, channel.target, index)))
        self._sent[number] = index
        if self._last is not None:
            self._end_channel(number)

    def end(self, total: int, ending: Ending) -> None:
        """Tells the stages behind that the stream ends at `total` microbatches."""
        self._last = (total, ending)
        for number in range(len(self._channels)):
            self._end_channel(number)

    def unread(self, channels: tuple[Channel, ...]) -> list[int]:
        """Returns the channels of a program on which the end of the stream is still to come here."""
        return [
            number
            for number, channel in enumerate(channels)
            if channel.receiver == self._rank and channel.carries in _FORWARD and number not in self._ended
        ]

    def _end_channel(self, number: int) -> None:
        """Tells the other side of the end, behind the last message; another stage of this rank may be behind."""
        channel, placement = self._channels[number], self._placement
        if channel.sender != self._rank or channel.carries not in _FORWARD:
            return
        assert self._last is not None
        total, ending = self._last
        begin = self._sent.get(number, -1) + 1
        step = (self._per_fetch or _NEVER) if channel.carries == "weights" else 1
        coming = range(-(-begin // step) * step, total, step)[: placement.cycle]
        if channel.carries == "kept" and not self._per_fetch:
            coming = range(0)
        ways = (placement.ends(channel.carries, channel.source, channel.target, k) for k in coming)
        if (channel.sender, channel.receiver) not in ways:
            self._senders[number].send(Message(total, Content.END, flags=int(ending)))
