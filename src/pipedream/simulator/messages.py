"""Messages and sums in transit, from a send to its posted receive, in the order of time.

A message flows when it is sent and its receive is posted, as in gloo and NCCL, and after all earlier ones on its
channel; it arrives one latency after its last byte.

The network is a tree of levels, with a port for each component. A *flow* leaves through the ports of its sender's
components up to the outermost level that it crosses, and enters through those of its receiver's, all at the same time.
Flows that share ports have the rates of max-min fairness (Bertsekas and Gallager, Data Networks, section 6.5.2:
progressive filling): all grow evenly until a port is full; flows through it keep their rate, others grow further.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from math import inf
from typing import Any

from pipedream.core.hardware.cluster import Cluster
from pipedream.core.schedule.program import Channel, Program
from pipedream.core.schedule.timeline import Span
from pipedream.simulator.costs import Costs

_IN, _OUT = 0, 1


class Port:
    """One direction of a component's port.

    Attributes:
        round: the round of sharing (`Flows`) in which `spare_bytes_per_s` remain for `waiting` flows.
    """

    __slots__ = ("bytes_per_s", "flows", "round", "spare_bytes_per_s", "waiting")

    def __init__(self, bytes_per_s: float) -> None:
        self.bytes_per_s = self.spare_bytes_per_s = bytes_per_s
        self.flows: dict[Flow, None] = {}
        self.round = self.waiting = 0


class Flow:
    """Bytes in transit.

    Attributes:
        left_bytes: bytes left at `since_s`; since then they flow at `bytes_per_s`.
        version: number of rate changes, each of which makes earlier predictions wrong.
        round: the round of sharing in which it waits for its rate.
    """

    __slots__ = ("bytes_per_s", "left_bytes", "ports", "round", "since_s", "version", "what")

    def __init__(self, ports: Sequence[Port], size_bytes: float, what: Any) -> None:
        self.ports = ports
        self.left_bytes = size_bytes
        self.what = what
        self.bytes_per_s = self.since_s = 0.0
        self.version = self.round = 0


class Flows:
    """All flows. The times of its calls never decrease."""

    def __init__(self) -> None:
        self._ends: list[tuple[float, int, int, Flow]] = []
        self._count = self._round = 0

    def start(self, flow: Flow, now: float) -> None:
        for port in flow.ports:
            port.flows[flow] = None
        self._share(flow, now)

    def next_s(self) -> float | None:
        """Returns when the first flow ends at the current rates, or None."""
        ends = self._ends
        while ends and ends[0][2] != ends[0][3].version:
            heappop(ends)
        return ends[0][0] if ends else None

    def end(self) -> tuple[float, Any]:
        """Ends the flow of `next_s`; returns its time and its owner."""
        now, _, _, flow = heappop(self._ends)
        flow.version = -1
        for port in flow.ports:
            del port.flows[flow]
        for port in flow.ports:  # one flow of each, from which sharing reaches all that are connected
            if port.flows:
                self._share(next(iter(port.flows)), now)
        return now, flow.what

    def _share(self, flow: Flow, now: float) -> None:
        """Shares bandwidth among all flows that common ports connect."""
        alone_bytes_per_s = inf
        for port in flow.ports:
            if len(port.flows) > 1:
                break
            if port.bytes_per_s < alone_bytes_per_s:
                alone_bytes_per_s = port.bytes_per_s
        else:
            self._set_rate(flow, alone_bytes_per_s, now)
            return
        self._round += 1  # marks on flows and ports are faster than sets
        current_round = flow.round = self._round
        connected, ports = [flow], list[Port]()
        for member in connected:
            for port in member.ports:
                if port.round != current_round:
                    port.round, port.spare_bytes_per_s, port.waiting = current_round, port.bytes_per_s, len(port.flows)
                    ports.append(port)
                    for other in port.flows:
                        if other.round != current_round:
                            other.round = current_round
                            connected.append(other)
        waiting = len(connected)
        while waiting:
            narrowest, rate = ports[0], inf
            for port in ports:
                if port.waiting and port.spare_bytes_per_s / port.waiting < rate:
                    narrowest, rate = port, port.spare_bytes_per_s / port.waiting
            for member in narrowest.flows:
                if member.round == current_round:
                    member.round = 0
                    waiting -= 1
                    for port in member.ports:
                        port.spare_bytes_per_s -= rate
                        port.waiting -= 1
                    self._set_rate(member, rate, now)

    def _set_rate(self, flow: Flow, bytes_per_s: float, now: float) -> None:
        if bytes_per_s == flow.bytes_per_s:
            return
        flow.left_bytes = max(0.0, flow.left_bytes - flow.bytes_per_s * (now - flow.since_s))
        flow.bytes_per_s, flow.since_s = bytes_per_s, now
        flow.version += 1
        self._count += 1  # decides between equal times, as flows have no order
        heappush(self._ends, (now + flow.left_bytes / bytes_per_s, self._count, flow.version, flow))


class Ports:
    """All ports of a cluster."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self._ports: dict[tuple[int, int, int], Port] = {}

    def path(self, sender: int, receiver: int) -> list[Port]:
        if sender == receiver:
            return []
        levels = range(self.cluster.reach(sender, receiver) + 1)
        out = [self._make_port(level, sender, _OUT) for level in levels]
        return out + [self._make_port(level, receiver, _IN) for level in reversed(levels)]

    def around(self, workers: Sequence[int]) -> list[Port]:
        ports: dict[Port, None] = {}
        for level in range(self.cluster.reach(*workers) + 1):
            if len({self.cluster.component(level, worker) for worker in workers}) > 1:
                ports.update(
                    dict.fromkeys(self._make_port(level, worker, way) for worker in workers for way in (_IN, _OUT))
                )
        return list(ports)

    def _make_port(self, level: int, worker: int, way: int) -> Port:
        key = level, self.cluster.component(level, worker), way
        if key not in self._ports:
            row = self.cluster.levels[level]
            rate = row.bandwidth_bytes_per_s if way == _OUT else row.receive_bytes_per_s or row.bandwidth_bytes_per_s
            self._ports[key] = Port(rate)
        return self._ports[key]


_new: Callable[..., Any] = tuple.__new__  # faster than calling the class


@dataclass(slots=True, eq=False)
class _Queue:
    """A queue of flows through the same ports, one at a time.

    Attributes:
        number: order among queues whose flows may begin at the same time.
        pending: earliest start of each flow, its bytes, and a message's index (for the last bucket of a sum, the
            function to call); if `is_busy`, the first is in transit.
    """

    number: int
    ports: Sequence[Port]
    pending: deque[tuple[float, float, Any]] = field(default_factory=deque)
    is_busy: bool = False
    free_s: float = 0.0


@dataclass(slots=True, eq=False, kw_only=True)
class Wire(_Queue):
    """A channel in simulated time.

    Attributes:
        posted: times of unmatched receives.
        unmatched: messages without a posted receive, and when they were sent.
        arrived: messages not yet received, and when they arrived.
        waiting: the receiver, if it waits for the next one to arrive.
        sends, began_s: the spans of its sender's messages, and when the present one began.
        early_s: how long before its arrival the op that receives a message may begin.
    """

    channel: Channel
    size_bytes: float
    latency_s: float
    posted: deque[float]
    sends: list[Span]
    unmatched: deque[tuple[int, float]] = field(default_factory=deque)
    arrived: deque[tuple[int, float]] = field(default_factory=deque)
    waiting: Any = None
    began_s: float = 0.0
    early_s: float = 0.0


class Network:
    """All messages and sums of a run; `ready` gets the receivers that no longer wait."""

    def __init__(self, program: Program, costs: Costs, sends: list[list[Span]], ready: list[Any]) -> None:
        ports = Ports(costs.cluster)
        self.ready = ready
        self.wires = []
        for number, channel in enumerate(program.channels):
            size = costs.channel_bytes(channel)
            self.wires.append(
                Wire(
                    number,
                    ports.path(costs.worker(channel.sender), costs.worker(channel.receiver)) if size else (),
                    channel=channel,
                    size_bytes=size,
                    latency_s=costs.latency_s(channel),
                    posted=deque([0.0] * channel.depth),  # a rank posts a ring of receives before it starts
                    sends=sends[channel.sender],
                )
            )
        self._rings = [  # numbered before all wires
            _Queue(-1 - stage, self._list_ring_ports(ports, [costs.worker(rank) for rank in ranks], costs, stage))
            for stage, ranks in enumerate(
                (*program.placement.ranks, *(tied.ranks(program.placement) for tied in program.plan.tied_weights))
            )
        ]
        self._flows = Flows()
        self._starts: list[tuple[float, int, _Queue]] = []

    def _list_ring_ports(self, ports: Ports, workers: Sequence[int], costs: Costs, stage: int) -> Sequence[Port]:
        """Returns the ports of a ring, after one with the rate that an all-reduce reaches alone."""
        size, seconds = costs.port_bytes(stage), costs.sum_s(stage)
        return [Port(size / seconds), *ports.around(workers)] if size and seconds and len(workers) > 1 else ()

    def send(self, wire: Wire, index: int, now: float) -> None:
        wire.unmatched.append((index, now))
        if wire.posted:
            self._match(wire, wire.posted.popleft())

    def post(self, wire: Wire, now: float) -> None:
        if wire.unmatched:
            self._match(wire, now)
        else:
            wire.posted.append(now)

    def sum_up(self, stage: int, parts: Sequence[tuple[float, float, float]], done: Callable[[float], None]) -> None:
        """Starts a sum over a stage's replicas, or over the holders of tied weights (`Costs.sum_s`).

        `parts` as in `Costs.sum_parts`; calls `done` with the time of its end.
        """
        ring = self._rings[stage]
        if not ring.ports:
            end_s = 0.0
            for at_s, _, seconds in parts:
                end_s = max(end_s, at_s) + seconds
            done(end_s)
            return
        for number, (at_s, size, _) in enumerate(parts):
            ring.pending.append((at_s, size, done if number == len(parts) - 1 else None))
        self._schedule_start(ring)

    def advance(self) -> None:
        """Advances time until a receiver is ready."""
        starts, flows = self._starts, self._flows
        while not self.ready:
            end_s = flows.next_s()
            if starts and (end_s is None or starts[0][0] < end_s):  # at equal times ends come first, and free ports
                now, _, queue = heappop(starts)
                if isinstance(queue, Wire):
                    queue.began_s = now
                flows.start(Flow(queue.ports, queue.pending[0][1], queue), now)
            elif end_s is not None:
                now, queue = flows.end()
                self._end(queue, now)
            else:  # nothing is in transit: all have ended, or they wait for each other
                return

    def find_unreceived(self) -> Iterator[tuple[Channel, int]]:
        """Yields messages that were never received."""
        for wire in self.wires:
            for index in (*(message[0] for message in wire.arrived), *(message[0] for message in wire.unmatched)):
                yield wire.channel, index

    def _match(self, wire: Wire, posted_s: float) -> None:
        """Matches the oldest unmatched message with a receive."""
        index, sent_s = wire.unmatched.popleft()
        at_s = posted_s if posted_s > sent_s else sent_s
        if wire.ports:
            wire.pending.append((at_s, wire.size_bytes, index))
            self._schedule_start(wire)
        else:
            self._arrive(wire, index, at_s, at_s + wire.latency_s)

    def _schedule_start(self, queue: _Queue) -> None:
        if not queue.is_busy and queue.pending:
            queue.is_busy = True
            heappush(self._starts, (max(queue.pending[0][0], queue.free_s), queue.number, queue))

    def _end(self, queue: _Queue, now: float) -> None:
        _, _, what = queue.pending.popleft()
        queue.is_busy, queue.free_s = False, now
        self._schedule_start(queue)
        if isinstance(queue, Wire):
            self._arrive(queue, what, queue.began_s, now + queue.latency_s)
        elif what is not None:
            what(now)

    def _arrive(self, wire: Wire, index: int, start_s: float, arrival_s: float) -> None:
        if arrival_s > start_s:
            channel = wire.channel
            wire.sends.append(_new(Span, (channel.sender, "send", channel.source, index, start_s, arrival_s)))
        wire.arrived.append((index, arrival_s))
        if wire.waiting is not None:
            self.ready.append(wire.waiting)
            wire.waiting = None


def describe_message(channel: Channel, index: int) -> str:
    """Returns a message in words."""
    return f"the {channel.carries} of microbatch {index} from rank {channel.sender} to rank {channel.receiver}"
