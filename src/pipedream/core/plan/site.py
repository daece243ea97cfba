"""The Site: the workers of a stage, and how long it takes there (docs/cost_models.md).

    compute     (forward + backward + update + what the backward does not hide of the sum over its replicas) / r
    port        of each level that its messages cross: the bytes of a minibatch through one port / bandwidth

A stage with r replicas takes the greatest of these: messages overlap with compute, and depth hides their latency.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import gcd, lcm

import numpy as np

from pipedream.core.hardware.cluster import Cluster
from pipedream.core.plan.cost import Numbers, all_reduce_bytes, visible_sum_s


@dataclass(frozen=True)
class PortLoad:
    """Seconds per byte at a port: of a stage's input (and its gradient), of its output, of its weights."""

    before: float
    after: float
    weights: float


def busiest_ports(ports: Iterable[PortLoad]) -> tuple[PortLoad, ...]:
    """Returns the ports that no other one dominates, in a fixed order."""
    kept: list[PortLoad] = []
    for port in sorted(set(ports), key=lambda port: (port.before, port.after, port.weights), reverse=True):
        mine = (port.before, port.after, port.weights)
        others = ((other.before, other.after, other.weights) for other in kept)
        if any(mine) and not any(all(a <= b for a, b in zip(mine, other, strict=True)) for other in others):
            kept.append(port)
    return tuple(kept)


@dataclass(frozen=True)
class Site:
    """The workers of a stage: their speed, memory and ports.

    Attributes:
        speed: speed of the slowest worker, relative to the profile's device.
        memory_bytes: memory of the smallest worker; None: unlimited.
        ports: the `busiest_ports` that their messages cross.
    """

    replicas: int
    speed: float = 1.0
    memory_bytes: int | None = None
    sum_bytes_per_s: float = 1e30
    sum_latency_s: float = 0.0
    sums: str = "ring"
    ports: tuple[PortLoad, ...] = ()

    @classmethod
    def of(cls, cluster: Cluster, workers: Sequence[int], before: int | None = None, after: int | None = None) -> Site:
        """Returns the site of a stage on some workers of a cluster.

        `before` is the last worker of the previous stage, `after` the first of the next; None at the model's ends. What
        other stages send through the same port is unknown here (`ports_s` counts it).
        """
        count = len(workers)
        summed = float(all_reduce_bytes(1, count, how=cluster.sums)) / count  # once in as many minibatches
        ports: dict[PortLoad, None] = {}
        for number, level in enumerate(cluster.levels):
            inside = Counter(cluster.component(number, worker) for worker in workers)
            sides = [None if side is None else cluster.component(number, side) for side in (before, after)]
            rate = level.link_bytes_per_s
            for component, members in inside.items():
                share = members / count
                first, second = (
                    share * cluster.message_share / rate if side not in (None, component) else 0.0 for side in sides
                )
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
            busiest_ports(ports),
        )

    def sum_s(self, parameter_bytes: Numbers, backward_s: Numbers) -> Numbers:
        """Returns the seconds of a sum that a backward does not hide."""
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

    def compute_s(
        self, forward_s: Numbers, backward_s: Numbers, update_s: Numbers, parameter_bytes: Numbers
    ) -> Numbers:
        """Returns the seconds per minibatch, with the sums that it waits for."""
        passes_s = (forward_s + backward_s + update_s) / self.speed
        return (passes_s + self.sum_s(parameter_bytes, backward_s)) / self.replicas

    def port_s(self, parameter_bytes: Numbers, before_bytes: Numbers, after_bytes: Numbers) -> Numbers:
        """Returns the seconds per minibatch of the busiest port."""
        busiest: Numbers = 0.0
        for port in self.ports:
            seconds = port.before * before_bytes + port.after * after_bytes + port.weights * parameter_bytes
            busiest = np.maximum(busiest, seconds)
        return busiest

    def period_s(
        self,
        forward_s: Numbers,
        backward_s: Numbers,
        update_s: Numbers,
        parameter_bytes: Numbers,
        before_bytes: Numbers = 0,
        after_bytes: Numbers = 0,
    ) -> Numbers:
        """Returns the seconds per minibatch of the slowest part."""
        compute_s = self.compute_s(forward_s, backward_s, update_s, parameter_bytes)
        return np.maximum(compute_s, self.port_s(parameter_bytes, before_bytes, after_bytes))


def ports_s(
    cluster: Cluster,
    taken: Sequence[Sequence[int]],
    output_bytes: Sequence[float],
    parameter_bytes: Sequence[float],
) -> dict[tuple[int, int], float]:
    """Returns the seconds per minibatch of each port in use, by (level, component), over all stages of a plan.

    Minibatch k goes from replica k mod r of a stage to replica k mod r' of the next, so that each pair of replicas with
    the same remainder by gcd(r, r') exchanges one in lcm(r, r') minibatches. `taken` has each stage's workers.
    """
    ports: defaultdict[tuple[int, int], float] = defaultdict(float)
    edges = (0.0, *output_bytes[: len(taken) - 1], 0.0)
    for workers, received_bytes, sent_bytes, size in zip(taken, edges, edges[1:], parameter_bytes, strict=False):
        carried = (received_bytes + sent_bytes) * cluster.message_share
        carried += float(all_reduce_bytes(size, len(workers), how=cluster.sums))
        for worker in workers:
            ports[0, worker] += carried / len(workers) / cluster.levels[0].link_bytes_per_s
    for number, level in enumerate(cluster.levels[1:], 1):
        inside = [[cluster.component(number, worker) for worker in workers] for workers in taken]
        rate = level.link_bytes_per_s
        for here, there, size in zip(inside, inside[1:], output_bytes, strict=False):
            step, every = gcd(len(here), len(there)), lcm(len(here), len(there))
            for remainder in range(step):
                senders, receivers = Counter(here[remainder::step]), Counter(there[remainder::step])
                for sender, sent in senders.items():
                    for receiver, received in receivers.items():
                        if sender != receiver:
                            seconds = sent * received / every * size * cluster.message_share / rate
                            ports[number, sender] += seconds
                            ports[number, receiver] += seconds
        for components, size in zip(inside, parameter_bytes, strict=True):
            if len(set(components)) > 1:
                count = len(components)
                for component in set(components):
                    ports[number, component] += float(all_reduce_bytes(size, count, how=cluster.sums)) / count / rate
    return dict(ports)
