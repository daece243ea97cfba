"""The ports of a cluster at work (`core.cluster`: the network is a tree of levels, with a port for each component).

A message from worker a to worker b leaves through the ports of a's components up to the outermost level that it
crosses, and enters through those of b's components, down to b's own. It cuts through: it enters the next port as soon
as that is free, while the rest of it still comes. Each port takes messages one after the other, in the order in which
they reach it, and each for its bytes / the port's own bandwidth: the rest of its capacity is left to others, even where
a slower port on the way makes the message itself take longer. So a port that is never idle carries its full bandwidth,
whatever waits elsewhere. A message is there with its last byte through the slowest port, and one latency.

A sum over replicas is not slowed down by messages; its bytes go through the ports of its members while these have
nothing else to carry. What of them is still left when the next sum of the stage comes is carried first, before any
message: so over a round a port carries the bytes of messages and of sums, and no more than it can.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..core.cluster import Cluster

__all__ = ["Port", "Ports"]

_IN, _OUT = 0, 1


class Port:
    """One direction of a component's port: until when messages keep it busy, and what it owes to sums."""

    __slots__ = ("free_s", "owed_s")

    def __init__(self) -> None:
        self.free_s = 0.0
        self.owed_s: dict[int, float] = {}

    def enter(self, reached_s: float, busy_s: float) -> float:
        """Returns when a message enters that has reached it and keeps it busy for some seconds."""
        free_s = self.free_s
        if reached_s > free_s:
            if self.owed_s:
                self._pay(reached_s - free_s)
            free_s = reached_s
        self.free_s = free_s + busy_s
        return free_s

    def owe(self, stage: int, at_s: float, busy_s: float) -> None:
        """Takes over the bytes of a stage's sum."""
        if at_s > self.free_s:
            self._pay(at_s - self.free_s)
            self.free_s = at_s
        self.free_s += self.owed_s.pop(stage, 0.0)
        self.owed_s[stage] = busy_s

    def _pay(self, idle_s: float) -> None:
        for stage, left_s in list(self.owed_s.items()):
            if left_s > idle_s:
                self.owed_s[stage] = left_s - idle_s
                return
            del self.owed_s[stage]
            idle_s -= left_s


class Ports:
    """All ports of a cluster, made as they are asked for."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self._made: dict[tuple[int, int, int], Port] = {}

    def path(self, sender: int, receiver: int) -> list[tuple[Port, float]]:
        """Returns the ports between two workers, in the order of the way, each with its bandwidth (bytes/s)."""
        if sender == receiver:
            return []
        levels = range(self.cluster.reach(sender, receiver) + 1)
        out = [self._one(level, sender, _OUT) for level in levels]
        return out + [self._one(level, receiver, _IN) for level in reversed(levels)]

    def around(self, workers: Sequence[int]) -> list[tuple[Port, float]]:
        """Returns the ports that a ring over some workers leaves and enters by, each with its bandwidth (bytes/s)."""
        found: dict[Port, float] = {}
        for level in range(self.cluster.reach(*workers) + 1):
            if len({self.cluster.component(level, worker) for worker in workers}) > 1:
                found.update(self._one(level, worker, way) for worker in workers for way in (_IN, _OUT))
        return list(found.items())

    def _one(self, level: int, worker: int, way: int) -> tuple[Port, float]:
        row = self.cluster.levels[level]
        rate = row.bandwidth_bytes_per_s if way == _OUT else row.receive_bytes_per_s or row.bandwidth_bytes_per_s
        return self._made.setdefault((level, self.cluster.component(level, worker), way), Port()), rate
