"""The mailbox of one rank: messages for its ops, from other ranks or its own stages, and those that its ops send.

The end of a stream follows the last message on each channel that serves forwards.
"""

from collections.abc import Mapping

from pipedream.core.plan.placement import Carries, Placement
from pipedream.core.schedule.program import Channel
from pipedream.runtime.comm.channel import Sender
from pipedream.runtime.comm.message import Content, Message, StopReason

_FORWARD = (Carries.ACTIVATION, Carries.INPUT, Carries.STAGE_INPUT)
"""Channels that serve forwards: they carry the end of a stream."""


class Mailbox:
    """Messages of one rank. Lifecycle: `begin` a stream; `arrived`, `take`, `put` and `send`; `end`."""

    def __init__(
        self, rank: int, placement: Placement, channels: tuple[Channel, ...], senders: Mapping[int, Sender]
    ) -> None:
        self._rank = rank
        self._channels = channels
        self._senders = senders
        self.begin(placement)

    def begin(self, placement: Placement, trains: bool = False) -> None:
        """`trains`: backwards follow."""
        self._placement = placement
        self._is_local: dict[tuple[str, int, int], bool] = {}
        self._trains = trains
        self._inbox: dict[tuple[str, int, int], Message] = {}
        self._outbox: dict[tuple[str, int, int], Message] = {}
        self._ended_channels: set[int] = set()
        self._last_sent: dict[int, int] = {}
        self._stream_end: tuple[int, StopReason] | None = None

    def accept(self, number: int, index: int, message: Message) -> tuple[int, StopReason] | None:
        """Takes a message that was received for microbatch `index`.

        Returns: if it is the end instead, the stream's microbatches and why it ends; else None.
        """
        channel = self._channels[number]
        if message.content is Content.END:
            self._ended_channels.add(number)
            return message.microbatch, StopReason(message.flags)
        if message.microbatch != index:
            raise AssertionError(f"microbatch {message.microbatch} arrived on channel {channel.carries} for {index}")
        self._inbox[channel.carries, channel.target, index] = message
        return None

    def take(self, carries: Carries, stage: int, index: int) -> Message:
        return self._inbox.pop((carries, stage, index))

    def drop(self, carries: Carries, stage: int, index: int) -> None:
        """Drops an unread message, if it has arrived."""
        self._inbox.pop((carries, stage, index), None)

    def put(self, carries: Carries, target: int, message: Message) -> None:
        """Takes an op's result, to be sent or read by another stage of this rank."""
        index = message.microbatch
        route = carries, target, index % self._placement.cycle
        is_local = self._is_local.get(route)
        if is_local is None:
            is_local = self._is_local[route] = self._placement.ends(carries, target, target, index)[1] == self._rank
        if is_local:
            # Copied, as over a network: the receiving stage may write into it.
            self._inbox[carries, target, index] = message if carries == Carries.INPUT else message.copy_as_received()
        else:
            self._outbox[carries, target, index] = message

    def send(self, number: int, index: int) -> None:
        channel = self._channels[number]
        self._senders[number].send(self._outbox.pop((channel.carries, channel.target, index)))
        self._last_sent[number] = index
        if self._stream_end is not None:
            self._end_channel(number)

    def end(self, total: int, stop_reason: StopReason) -> None:
        self._stream_end = (total, stop_reason)
        for number in range(len(self._channels)):
            self._end_channel(number)

    def list_unended(self, channels: tuple[Channel, ...]) -> list[int]:
        """Returns the channels to this rank on which the end of the stream has not arrived."""
        return [
            number
            for number, channel in enumerate(channels)
            if channel.receiver == self._rank and channel.carries in _FORWARD and number not in self._ended_channels
        ]

    def _end_channel(self, number: int) -> None:
        """Sends the end, unless a stage of this rank still has to send a message on the channel."""
        channel, placement = self._channels[number], self._placement
        if channel.sender != self._rank or channel.carries not in _FORWARD:
            return
        assert self._stream_end is not None
        total, stop_reason = self._stream_end
        begin = self._last_sent.get(number, -1) + 1
        sends = self._trains or channel.carries != Carries.STAGE_INPUT
        upcoming = range(begin, total)[: placement.cycle] if sends else range(0)
        routes = (placement.ends(channel.carries, channel.source, channel.target, k) for k in upcoming)
        if (channel.sender, channel.receiver) not in routes:
            self._senders[number].send(Message(total, Content.END, flags=int(stop_reason)))
