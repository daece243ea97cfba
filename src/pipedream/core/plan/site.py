"""The Site: the workers that a stage takes, and how long it takes there. THE cost model of planner and plan.

A full pipeline is as fast as its slowest stage, and a stage as slow as the slowest of its parts (docs/cost_models.md):

    compute     (forward + backward + update + what the backward does not hide of the sum over its replicas) / r
    port        of each level that its messages cross: the bytes of a minibatch through one port / bandwidth

with r replicas, which take r minibatches in the time of one. Messages overlap with compute, so a stage's seconds
are the greatest of these and not their sum; latency delays a message, which depth hides, but keeps no port busy.
Activations go one way and their gradients, as large, the other way, so that a port sends what it receives.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from pipedream.core.hardware.cluster import Cluster
from pipedream.core.plan.cost import all_reduce_bytes, visible_sum_s

__all__ = ["PortLoad", "Site", "telling"]


@dataclass(frozen=True)
class PortLoad:
    """A port that a stage's messages cross: its seconds for each byte of a minibatch.

    Attributes:
        before, behind: of the stage's input, whose gradient goes back, and of its output, whose gradient comes.
        weights: of its parameters, summed over the replicas once a round.
    """

    before: float
    behind: float
    weights: float


def telling(ports: Iterable[PortLoad]) -> tuple[PortLoad, ...]:
    """Returns the ports that may be the busiest, in a fixed order.

    None that is idle, and none of which another carries at least as much of all three kinds.
    """
    kept: list[PortLoad] = []
    for port in sorted(set(ports), key=lambda port: (port.before, port.behind, port.weights), reverse=True):
        mine = (port.before, port.behind, port.weights)
        others = ((other.before, other.behind, other.weights) for other in kept)
        if any(mine) and not any(all(a <= b for a, b in zip(mine, other, strict=True)) for other in others):
            kept.append(port)
    return tuple(kept)


@dataclass(frozen=True)
class Site:
    """What the workers of a stage and their ports allow.

    Attributes:
        replicas: how many workers.
        speed: of the slowest of them, relative to the profile's device.
        memory_bytes: of the smallest of them; None: not limited.
        sum_bytes_per_s, sum_latency_s: of the links that their sums cross.
        sums: 'ring' or 'tree'.
        ports: that their messages cross; those that may be the busiest (`telling`).
    """

    replicas: int
    speed: float = 1.0
    memory_bytes: int | None = None
    sum_bytes_per_s: float = 1e30
    sum_latency_s: float = 0.0
    sums: str = "ring"
    ports: tuple[PortLoad, ...] = ()

    @classmethod
    def of(cls, cluster: Cluster, workers: Sequence[int], before: int | None = None, behind: int | None = None) -> Site:
        """Returns the site of a stage on some workers of a cluster.

        Args:
            cluster: whose.
            workers: of the stage, in the order of its replicas.
            before: last worker of the stage before it; None at the input.
            behind: first worker of the stage behind it; None at the output.

        A boundary counts at the port of a component where that neighbour is in another component. Of what other stages
        send through the same port nothing is known here (`core.plan.plan.ports` does).
        """
        count = len(workers)
        summed = all_reduce_bytes(1, count, how=cluster.sums) / count  # once in as many minibatches
        ports: dict[PortLoad, None] = {}
        for number, level in enumerate(cluster.levels):
            inside = Counter(cluster.component(number, worker) for worker in workers)
            sides = [None if side is None else cluster.component(number, side) for side in (before, behind)]
            rate = level.link_bytes_per_s
            for component, held in inside.items():
                share = held / count  # of the minibatches
                first, second = (share / rate if side not in (None, component) else 0.0 for side in sides)
                ports[PortLoad(first, second, summed / rate if len(inside) > 1 else 0.0)] = None
        memories = [memory for worker in workers if (memory := cluster.memories[worker]) is not None]
        rate, latency_s = cluster.sum_link(cluster.reach(*workers))
        return cls(
            count,
            min(cluster.speeds[worker] for worker in workers),
            min(memories, default=None),
            rate,
            latency_s,
            cluster.sums,
            telling(ports),
        )

    def sum_s(self, parameter_bytes: Any, backward_s: Any) -> Any:
        """Returns the seconds of a sum over the replicas that a backward does not hide."""
        if self.replicas == 1:
            return 0.0
        return visible_sum_s(
            parameter_bytes,
            backward_s / self.speed,
            self.replicas,
            self.sum_bytes_per_s,
            self.sum_latency_s,
            how=self.sums,
        )

    def compute_s(self, forward_s: Any, backward_s: Any, update_s: Any, parameter_bytes: Any) -> Any:
        """Returns the seconds per minibatch of a stage's compute and of the sums that it waits for."""
        passes_s = (forward_s + backward_s + update_s) / self.speed
        return (passes_s + self.sum_s(parameter_bytes, backward_s)) / self.replicas

    def port_s(self, parameter_bytes: Any, before_bytes: Any, behind_bytes: Any) -> Any:
        """Returns the seconds per minibatch of the stage's busiest port.

        Args:
            parameter_bytes: of its weights.
            before_bytes: that come from the stage before; 0 at the input.
            behind_bytes: that go to the stage behind; 0 at the output.
        """
        busiest: Any = 0.0
        for port in self.ports:
            seconds = port.before * before_bytes + port.behind * behind_bytes + port.weights * parameter_bytes
            busiest = np.maximum(busiest, seconds)
        return busiest

    def period_s(
        self,
        forward_s: Any,
        backward_s: Any,
        update_s: Any,
        parameter_bytes: Any,
        before_bytes: Any = 0,
        behind_bytes: Any = 0,
    ) -> Any:
        """Returns the seconds per minibatch of a stage: of the slowest of its parts (module docstring)."""
        compute_s = self.compute_s(forward_s, backward_s, update_s, parameter_bytes)
        return np.maximum(compute_s, self.port_s(parameter_bytes, before_bytes, behind_bytes))
