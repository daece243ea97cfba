"""The ports of a cluster: the network is a tree of levels, with a port for each component.

A *flow* leaves through the ports of its sender's components up to the outermost level that it crosses, and enters
through those of its receiver's, all at the same time. Flows that share ports have the rates of max-min fairness
(Bertsekas and Gallager, Data Networks, section 6.5.2: progressive filling): all grow evenly until a port is full; flows
through it keep their rate, the others keep growing.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush
from typing import Any

from pipedream.core.hardware.cluster import Cluster

_IN, _OUT = 0, 1


class Port:
    """One direction of a component's port."""

    __slots__ = ("bytes_per_s", "flows")

    def __init__(self, bytes_per_s: float) -> None:
        self.bytes_per_s = bytes_per_s
        self.flows: dict[Flow, None] = {}


class Flow:
    """Bytes in transit.

    Attributes:
        left_bytes: left at `since_s`; since then they flow at `bytes_per_s`.
        version: counts the changes of the rate, which make earlier predictions wrong.
    """

    __slots__ = ("bytes_per_s", "left_bytes", "ports", "since_s", "version", "what")

    def __init__(self, ports: Sequence[Port], size_bytes: float, what: Any) -> None:
        self.ports = ports
        self.left_bytes = size_bytes
        self.what = what
        self.bytes_per_s = self.since_s = 0.0
        self.version = 0


class Flows:
    """All flows. The times given to it never decrease."""

    def __init__(self) -> None:
        self._ends: list[tuple[float, int, int, Flow]] = []
        self._count = 0

    def start(self, flow: Flow, now: float) -> None:
        for port in flow.ports:
            port.flows[flow] = None
        self._share(flow, now)

    def next_s(self) -> float | None:
        """Returns when the first flow ends at the current rates."""
        ends = self._ends
        while ends and ends[0][2] != ends[0][3].version:
            heappop(ends)
        return ends[0][0] if ends else None

    def end(self) -> tuple[float, Any]:
        """Ends the flow of `next_s`; returns when, and its owner."""
        now, _, _, flow = heappop(self._ends)
        flow.version = -1
        for port in flow.ports:
            del port.flows[flow]
        for port in flow.ports:
            if port.flows:
                self._share(next(iter(port.flows)), now)
        return now, flow.what

    def _share(self, flow: Flow, now: float) -> None:
        """Shares bandwidth among all flows that shared ports connect."""
        if all(len(port.flows) == 1 for port in flow.ports):
            self._run(flow, min(port.bytes_per_s for port in flow.ports), now)
            return
        flows, ports = {flow: None}, {}
        connected = [flow]
        for member in connected:
            for port in member.ports:
                if port not in ports:
                    ports[port] = [port.bytes_per_s, len(port.flows)]
                    connected += [other for other in port.flows if other not in flows]
                    flows.update(port.flows)
        waiting = dict.fromkeys(connected)
        while waiting:
            narrow = min((port for port, (_, count) in ports.items() if count), key=lambda p: ports[p][0] / ports[p][1])
            rate = ports[narrow][0] / ports[narrow][1]
            for member in [other for other in narrow.flows if other in waiting]:
                del waiting[member]
                for port in member.ports:
                    ports[port][0] -= rate
                    ports[port][1] -= 1
                self._run(member, rate, now)

    def _run(self, flow: Flow, bytes_per_s: float, now: float) -> None:
        if bytes_per_s == flow.bytes_per_s:
            return
        flow.left_bytes = max(0.0, flow.left_bytes - flow.bytes_per_s * (now - flow.since_s))
        flow.bytes_per_s, flow.since_s = bytes_per_s, now
        flow.version += 1
        self._count += 1
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
