"""Seconds of messages, gradient sums, and a stage at its Site (docs/cost_models.md).

Legend: b bytes, B bandwidth of a link in one direction (bytes/s), l latency (s), n workers; numbers or arrays.

A stage with r replicas takes the longest of these, as messages overlap with compute and depth hides their latency:

    compute     (forward + backward + update + what the backward does not hide of the sum over its replicas) / r
    port        of each level that its messages cross: the bytes of a minibatch through one port / bandwidth
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import gcd, lcm
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pipedream.core.hardware.cluster import Cluster

EXCHANGE = "exchange"
"""Kind of collective in searched layouts: each rank sends others the pieces that they lack."""

Numbers = float | NDArray[Any]
"""One value, or an array: the planner computes many stages at once."""


class SumCosts(NamedTuple):
    """Costs of the sums over a stage's replicas, relative to its weights (`SumMethod.costs`).

    Attributes:
        share: bytes sent for each byte of the weights, the mean per update.
        messages: messages for each one of a plain sum, for the latency.
        ready: share of the last backward after which a sum may begin; None: its buckets begin as they fill.
        work_s_per_byte: seconds of the processor for each byte of the weights.
        kept_tensors: tensors that a replica keeps for each weight.
    """

    share: float = 1.0
    messages: float = 1.0
    ready: float | None = None
    work_s_per_byte: float = 0.0
    kept_tensors: int = 0


class MemoryTerms(NamedTuple):
    """What `Choices` do to the memory of one replica of a stage.

    Attributes:
        kept_tensors: tensors that it keeps for each trained weight.
        state_share: bytes of the optimizer's state for each byte of the profile's.
        waiting_share: bytes that wait for a backward for each byte of activations.
        optimizer_on_host: optimizers step copies of the weights in the memory of the machine; without a GPU, the
            worker's own.
        kept_samples: samples whose messages both ends of a cut keep; beside a GPU, in the memory of the machine.
    """

    kept_tensors: int = 0
    state_share: float = 1.0
    waiting_share: float = 1.0
    optimizer_on_host: bool = False
    kept_samples: int = 0


class Terms(NamedTuple):
    """What `Choices` cost a stage.

    Attributes:
        sums: of the sums over its replicas.
        message_shares: bytes on the wire for each byte of an activation, and of a gradient.
    """

    sums: SumCosts = SumCosts()
    message_shares: tuple[float, float] = (1.0, 1.0)
    memory: MemoryTerms = MemoryTerms()

    @property
    def message_share(self) -> float:
        """Bytes on the wire for each byte of an activation and its gradient together."""
        return sum(self.message_shares) / 2


# As in torch's DistributedDataParallel, a small first bucket starts the network early. Nothing hides the last one, so
# buckets should be small, but each message has a cost. 4 MiB take 34 ms at 1 Gbit/s, 4 ms at 10 Gbit/s, some tenths of
# a millisecond between GPUs. A minibatch with 20 MB of weights took 0.30 s at 1 Gbit/s with its sums at the update or
# with buckets of 25 MiB, 0.235 s with buckets of 4 MiB, and no less with 1 MiB (two CPU workers, 2026-11-21).
FIRST_BUCKET_BYTES = 1 << 20
BUCKET_BYTES = 4 << 20
PLAIN_SUMS = SumCosts()
PLAIN = Terms()
GPU_BUCKET_BYTES = 25 << 20
"""Between GPUs, where latency counts for more; as in torch's DistributedDataParallel."""


def transfer_s(size_bytes: Numbers, bandwidth_bytes_per_s: float, latency_s: float = 0.0) -> Numbers:
    """Returns the seconds of one message: l + b / B."""
    return latency_s + size_bytes / bandwidth_bytes_per_s


def all_reduce_bytes(size_bytes: Numbers, workers: Numbers, *, how: str = "ring") -> Numbers:
    """Returns the bytes that each worker sends in an all-reduce; it receives as many."""
    if np.ndim(workers) == 0 and workers == 1:
        return 0.0
    return 2.0 * size_bytes if how == "tree" else 2.0 * size_bytes * (workers - 1) / workers


class SumLink(NamedTuple):
    """The links over which some workers, or the ranks of a mesh, communicate with all others.

    Attributes:
        how: the algorithm of an all-reduce, 'ring' or 'tree'.
    """

    bytes_per_s: Numbers = 1e30
    latency_s: Numbers = 0.0
    how: str = "ring"

    @classmethod
    def across(cls, cluster: Cluster, level: int) -> SumLink:
        """Returns the links for sums that cross a level of a cluster."""
        return cls(*cluster.sum_link(level), cluster.all_reduce)

    def all_reduce_s(self, size_bytes: Numbers, workers: Numbers, costs: SumCosts = PLAIN_SUMS) -> Numbers:
        """Returns the seconds of an all-reduce that overlaps with nothing.

        'ring': 2 (n - 1) (l + b / (n B)) (Patarasuk and Yuan 2009; the bytes as in PipeDream, section 3.1).

        'tree': 2 (ceil(log2 n) l + b / B): two trees, each for half of the bytes, so that every worker sends and
        receives all of them on the way up and again on the way down (Sanders, Speck and Traeff 2009; NCCL).
        """
        if np.ndim(workers) == 0 and workers == 1:
            return 0.0
        size_bytes, latency_s = size_bytes * costs.share, self.latency_s * costs.messages
        if self.how == "tree":
            tree_levels = np.ceil(np.log2(workers))
            return (workers > 1) * 2 * (tree_levels * latency_s + size_bytes / self.bytes_per_s)
        return 2 * (workers - 1) * (latency_s + size_bytes / (workers * self.bytes_per_s))

    def buckets(
        self, size_bytes: Numbers, workers: Numbers, costs: SumCosts = PLAIN_SUMS
    ) -> tuple[tuple[Numbers, Numbers], ...]:
        """Returns the buckets of a sum: a first one of 1 MiB, further ones of 4 MiB, and the rest.

        For each bucket: the share of the gradients up to its end, and the seconds of it and all later ones. Both are
        linear from the first to the last 4 MiB bucket, so those in between never decide and are omitted. A sum with
        `SumCosts.ready` is one bucket. Compression does not change the buckets: they count the bytes of weights.
        """
        if costs.ready is not None:
            return ((costs.ready, self.all_reduce_s(size_bytes, workers, costs)),)
        if np.ndim(workers) == 0 and workers == 1:
            return ()
        link = self._replace(bytes_per_s=self.bytes_per_s / costs.share)
        size = np.asarray(size_bytes, dtype=float)
        first = np.minimum(size, FIRST_BUCKET_BYTES)
        after_first = size - first
        full = np.floor(after_first / BUCKET_BYTES)
        last_bytes = after_first - full * BUCKET_BYTES
        later_s = np.where(last_bytes > 0, link.all_reduce_s(last_bytes, workers), 0.0)
        bucket_s = link.all_reduce_s(BUCKET_BYTES, workers)
        divisor = np.maximum(size, 1.0)
        start = np.where(size > 0, first / divisor, 1.0), link.all_reduce_s(first, workers) + full * bucket_s + later_s
        buckets = [start]
        for count in (full, np.minimum(full, 1.0)):
            ready = (FIRST_BUCKET_BYTES + (full - count + 1) * BUCKET_BYTES) / divisor
            tail_s = count * bucket_s + later_s
            buckets.append((np.where(full > 0, ready, start[0]), np.where(full > 0, tail_s, start[1])))
        return (*buckets, (1.0, later_s))

    def visible_s(
        self, size_bytes: Numbers, backward_s: Numbers, workers: Numbers, costs: SumCosts = PLAIN_SUMS
    ) -> Numbers:
        """Returns the seconds of a sum that its last backward does not hide: max_k (T_k - (1 - q_k) D).

        Gradient bytes become ready evenly over the backward. q_k is the share of the bytes in buckets up to k, T_k the
        seconds of bucket k and all later ones, D those of the backward.
        """
        visible_s: Numbers = 0.0
        for ready, tail_s in self.buckets(size_bytes, workers, costs):
            visible_s = np.maximum(visible_s, tail_s - (1 - ready) * backward_s)
        return visible_s + costs.work_s_per_byte * size_bytes


FREE_LINK = SumLink()


@dataclass(frozen=True)
class PortLoad:
    """Seconds per byte at a port, for a stage's input (and its gradient), its output and its weights."""

    before: float
    after: float
    weights: float


def busiest_ports(ports: Iterable[PortLoad]) -> tuple[PortLoad, ...]:
    """Returns the ports that no other port dominates, in a fixed order."""
    undominated: list[PortLoad] = []
    for port in sorted(set(ports), key=lambda port: (port.before, port.after, port.weights), reverse=True):
        load = (port.before, port.after, port.weights)
        others = ((other.before, other.after, other.weights) for other in undominated)
        if any(load) and not any(all(a <= b for a, b in zip(load, other, strict=True)) for other in others):
            undominated.append(port)
    return tuple(undominated)


@dataclass(frozen=True)
class Site:
    """The workers of a stage: their speed, memory and ports.

    Attributes:
        speed: speed of the slowest worker, relative to the profile's device.
        memory_bytes: memory of the smallest worker; None: unlimited.
        ports: the `busiest_ports` that messages cross.
    """

    replicas: int
    speed: float = 1.0
    memory_bytes: int | None = None
    sum_link: SumLink = FREE_LINK
    sum_costs: SumCosts = PLAIN_SUMS
    ports: tuple[PortLoad, ...] = ()

    @classmethod
    def of(
        cls,
        cluster: Cluster,
        workers: Sequence[int],
        before: int | None = None,
        after: int | None = None,
        terms: Terms = PLAIN,
    ) -> Site:
        """Returns the site of a stage on some workers of a cluster.

        `before` is the last worker of the previous stage, `after` the first of the next; None at the model's ends.
        Messages of other stages through the same port are unknown here (`ports_s` counts them).
        """
        count = len(workers)
        sum_bytes = float(all_reduce_bytes(1, count, how=cluster.all_reduce)) / count  # one sum per `count` minibatches
        sum_bytes *= terms.sums.share
        ports: dict[PortLoad, None] = {}
        for number, level in enumerate(cluster.levels):
            members_by_component = Counter(cluster.component(number, worker) for worker in workers)
            sides = [None if side is None else cluster.component(number, side) for side in (before, after)]
            rate = level.link_bytes_per_s
            for component, members in members_by_component.items():
                share = members / count
                first, second = (
                    share * terms.message_share / rate if side not in (None, component) else 0.0 for side in sides
                )
                ports[PortLoad(first, second, sum_bytes / rate if len(members_by_component) > 1 else 0.0)] = None
        memories = [memory for worker in workers if (memory := cluster.memories[worker]) is not None]
        return cls(
            count,
            min(cluster.speeds[worker] for worker in workers),
            min(memories, default=None),
            SumLink.across(cluster, cluster.reach(*workers)),
            terms.sums,
            busiest_ports(ports),
        )

    def sum_s(self, parameter_bytes: Numbers, backward_s: Numbers) -> Numbers:
        """Returns the seconds of a sum that a backward does not hide, with the processor's work for it."""
        if self.replicas == 1:
            return 0.0
        return self.sum_link.visible_s(parameter_bytes, backward_s / self.speed, self.replicas, self.sum_costs)

    def compute_s(
        self, forward_s: Numbers, backward_s: Numbers, update_s: Numbers, parameter_bytes: Numbers
    ) -> Numbers:
        """Returns the seconds of compute per minibatch, with the visible part of sums."""
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
        """Returns the seconds per minibatch: of compute, or of the busiest port if that is slower."""
        compute_s = self.compute_s(forward_s, backward_s, update_s, parameter_bytes)
        return np.maximum(compute_s, self.port_s(parameter_bytes, before_bytes, after_bytes))


def ports_s(
    cluster: Cluster,
    stage_workers: Sequence[Sequence[int]],
    output_bytes: Sequence[float],
    parameter_bytes: Sequence[float],
    message_share: float = 1.0,
) -> dict[tuple[int, int], float]:
    """Returns the seconds per minibatch of each port in use, by (level, component), over all stages of a plan.

    Minibatch k goes from replica k mod r of a stage to replica k mod r' of the next, so each pair of replicas that are
    equal modulo gcd(r, r') exchanges one in lcm(r, r') minibatches. `stage_workers` has each stage's workers.
    """
    ports: defaultdict[tuple[int, int], float] = defaultdict(float)
    edges = (0.0, *output_bytes[: len(stage_workers) - 1], 0.0)
    for workers, received_bytes, sent_bytes, size in zip(
        stage_workers, edges, edges[1:], parameter_bytes, strict=False
    ):
        port_bytes = (received_bytes + sent_bytes) * message_share
        port_bytes += float(all_reduce_bytes(size, len(workers), how=cluster.all_reduce))
        for worker in workers:
            ports[0, worker] += port_bytes / len(workers) / cluster.levels[0].link_bytes_per_s
    for number, level in enumerate(cluster.levels[1:], 1):
        components_by_stage = [[cluster.component(number, worker) for worker in workers] for workers in stage_workers]
        rate = level.link_bytes_per_s
        for sending, receiving, size in zip(components_by_stage, components_by_stage[1:], output_bytes, strict=False):
            remainders, cycle = gcd(len(sending), len(receiving)), lcm(len(sending), len(receiving))
            for remainder in range(remainders):
                senders, receivers = Counter(sending[remainder::remainders]), Counter(receiving[remainder::remainders])
                for sender, sending_count in senders.items():
                    for receiver, receiving_count in receivers.items():
                        if sender != receiver:
                            seconds = sending_count * receiving_count / cycle * size * message_share / rate
                            ports[number, sender] += seconds
                            ports[number, receiver] += seconds
        for components, size in zip(components_by_stage, parameter_bytes, strict=True):
            if len(set(components)) > 1:
                count = len(components)
                for component in set(components):
                    ports[number, component] += (
                        float(all_reduce_bytes(size, count, how=cluster.all_reduce)) / count / rate
                    )
    return dict(ports)
