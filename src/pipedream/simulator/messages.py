"""Messages on their way: from a send through the ports to the receive that is posted for it, in the order of time.

`simulator.ports` says what a port does with them, the clock when they are sent and received.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import Any

from ..core.program import Channel, Program
from ..core.timeline import Span
from .costs import Costs
from .ports import Port, Ports

__all__ = ["Messages", "Wire", "described"]

_new: Callable[..., Any] = tuple.__new__  # makes a named tuple without a call in Python
_SUM = -1  # in the place of a hop: a sum, which is before all messages of the same time


@dataclass(slots=True, eq=False)
class Wire:
    """A channel at work.

    Attributes:
        number: its index in the program.
        hops: the ports that its messages enter, in the order of their way, and the seconds for which they are busy.
        goes_at_once: nothing but its sender's messages enters the first port, so that these need not wait for others.
        latency_s: from the last byte to the arrival.
        posted: times at which receives were posted for which no message has come yet.
        stays: messages that no receive is posted for: when they could enter the last port, and when their last
            byte has come as far as there.
        arrived: messages and when they were there, not yet received.
        sends: spans of the sender's messages.
        waiting: the receiver, where it waits for a message.
    """

    number: int
    channel: Channel
    hops: list[tuple[Port, float]]
    goes_at_once: bool
    latency_s: float
    posted: deque[float]
    sends: list[Span]
    stays: deque[tuple[int, float, float]] = field(default_factory=deque)
    arrived: deque[tuple[int, float]] = field(default_factory=deque)
    waiting: Any = None


class Messages:
    """All messages of a run.

    Attributes:
        wires: one a channel.
        ready: receivers that waited for a message, and have it now, are put here.
    """

    def __init__(self, program: Program, costs: Costs, sends: list[list[Span]], ready: list[Any]) -> None:
        """Takes the lists into which the spans of each rank's messages go."""
        stages, ports = program.placement.stages, Ports(costs.cluster)
        self.ready = ready
        self._rings = [
            [(port, size / rate) for port, rate in ports.around([costs.worker(rank) for rank in ranks])] if size else []
            for ranks, size in zip(program.placement.ranks, costs.sum_bytes or (0.0,) * stages, strict=True)
        ]
        of_sums = {port for ring in self._rings for port, _ in ring}
        self.wires = []
        for number, channel in enumerate(program.channels):
            size = costs.channel_bytes(channel)
            way = ports.path(costs.worker(channel.sender), costs.worker(channel.receiver)) if size else []
            self.wires.append(
                Wire(
                    number,
                    channel,
                    [(port, size / rate) for port, rate in way],
                    not of_sums & {port for port, _ in way[:1]},
                    costs.latency_s(channel),
                    deque([0.0] * channel.depth),
                    sends[channel.sender],
                )
            )
        # When it reaches its next port, how many it has entered, its channel (of a sum its stage; in front of its
        # sender's port how many were sent before it), its index; the wire, and when its last byte has come through
        # the ports behind it. The earliest comes first.
        self._entering: list[tuple[float, int, int, int, Any, float]] = []
        self._sent = 0

    def send(self, wire: Wire, index: int, now: float) -> None:
        """Sends a message."""
        hops = wire.hops
        if not hops:
            self._come_up(wire, index, now, now)
        elif wire.goes_at_once:
            port, busy_s = hops[0]
            start = port.free_s
            if now > start:
                start = now
            port.free_s = ended_s = start + busy_s
            if len(hops) == 2:
                self._come_up(wire, index, start, ended_s)
            else:
                heappush(self._entering, (start, 1, wire.number, index, wire, ended_s))
        else:
            self._sent += 1
            heappush(self._entering, (now, 0, self._sent, index, wire, now))

    def post(self, wire: Wire, now: float) -> None:
        """Posts a receive."""
        if wire.stays:
            self._pass(wire, now)
        else:
            wire.posted.append(now)

    def sum_up(self, stage: int, update: int, now: float) -> None:
        """Puts the bytes of a sum on the ports of the stage's workers."""
        if self._rings[stage]:
            heappush(self._entering, (now, _SUM, stage, update, None, 0.0))

    def go_on(self) -> None:
        """Lets the earliest messages enter their next ports, until a receiver has waited for one of them."""
        while self._entering and not self.ready:
            reached_s, hop, number, index, wire, ended_s = heappop(self._entering)
            if hop == _SUM:
                for port, busy_s in self._rings[number]:
                    port.owe(number, reached_s, busy_s)
                continue
            port, busy_s = wire.hops[hop]
            start = port.enter(reached_s, busy_s)
            if start + busy_s > ended_s:
                ended_s = start + busy_s
            left = len(wire.hops) - hop - 1
            if not left:
                self._arrive(wire, index, start, ended_s + wire.latency_s)
            elif left == 1:
                self._come_up(wire, index, start, ended_s)
            else:
                heappush(self._entering, (start, hop + 1, wire.number, index, wire, ended_s))

    def left(self) -> Iterator[tuple[Channel, int]]:
        """Yields what was sent and never received."""
        for wire in self.wires:
            for index in (*(message[0] for message in wire.arrived), *(message[0] for message in wire.stays)):
                yield wire.channel, index

    def _come_up(self, wire: Wire, index: int, reached_s: float, ended_s: float) -> None:
        """Notes that a message has come to the receiver's own port, which it enters when its receive is posted."""
        wire.stays.append((index, reached_s, ended_s))
        if wire.posted:
            self._pass(wire, wire.posted.popleft())

    def _pass(self, wire: Wire, posted_s: float) -> None:
        """Gives the message that has stayed longest the receive that was posted at a time."""
        index, reached_s, ended_s = wire.stays.popleft()
        if posted_s > reached_s:
            reached_s = posted_s
        if wire.hops:
            heappush(self._entering, (reached_s, len(wire.hops) - 1, wire.number, index, wire, ended_s))
        else:
            self._arrive(wire, index, reached_s, reached_s + wire.latency_s)

    def _arrive(self, wire: Wire, index: int, start_s: float, arrival_s: float) -> None:
        if arrival_s > start_s:
            channel = wire.channel
            wire.sends.append(_new(Span, (channel.sender, "send", channel.source, index, start_s, arrival_s)))
        wire.arrived.append((index, arrival_s))
        if wire.waiting is not None:
            self.ready.append(wire.waiting)
            wire.waiting = None


def described(channel: Channel, index: int) -> str:
    """Returns a message in words."""
    return f"the {channel.carries} of microbatch {index} from rank {channel.sender} to rank {channel.receiver}"
