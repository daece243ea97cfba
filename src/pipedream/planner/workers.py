"""The workers in a line, and the site of each run of them: what a search over any cluster chooses among.

Workers of a component of the network are adjacent. Of orders that differ only by swapping like components, one is
searched. The line is assumed to have further workers before and after it; a stage at the input or the output exchanges
nothing with them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise, product
from math import factorial, prod

import numpy as np

from pipedream.core.hardware.cluster import Cluster
from pipedream.core.plan.cost import PortLoad, Site, SumLink, all_reduce_bytes, busiest_ports
from pipedream.planner.arrays import FloatArray, IntArray, RunExtremes


@dataclass(frozen=True)
class LineOrders:
    """Some orders of a cluster's workers.

    Attributes:
        orders: the cluster's own comes first.
        kind: in words; '' if there is only one order.
    """

    orders: tuple[tuple[int, ...], ...]
    kind: str = ""

    @classmethod
    def of(cls, cluster: Cluster, most: int) -> LineOrders:
        """Returns all orders if there are at most `most`; else those that keep like parts adjacent; else only one."""
        root = _build_tree(cluster)
        count = root.count(apart=True)
        if count == 1:
            return cls((tuple(range(cluster.workers)),))
        if count <= most:
            return cls(tuple(root.orders(apart=True)), f"in any of {count} orders of those that differ")
        count = root.count(apart=False)
        plain = tuple(range(cluster.workers))
        if count < most:
            others = [order for order in root.orders(apart=False) if order != plain]
            return cls((plain, *others), f"in the cluster's order or any of {count} that keep like ones adjacent")
        return cls((plain,), "in the cluster's order only")


@dataclass(frozen=True)
class _Node:
    """A component, with its parts, or a worker. Components of equal likeness differ at most in their order."""

    likeness: int
    worker: int = 0
    parts: tuple[_Node, ...] = ()

    def count(self, *, apart: bool) -> int:
        if not self.parts:
            return 1
        alike = Counter(part.likeness for part in self.parts)
        inside = {part.likeness: part.count(apart=apart) for part in self.parts}
        if apart:
            ways: int = factorial(len(self.parts)) // prod(factorial(many) for many in alike.values())
            for likeness, many in alike.items():
                ways *= inside[likeness] ** many
            return ways
        return factorial(len(alike)) * prod(inside.values())

    def orders(self, *, apart: bool) -> Iterator[tuple[int, ...]]:
        """Its own first; with `apart`, also those that separate like parts."""
        if not self.parts:
            yield (self.worker,)
            return
        alike: dict[int, list[_Node]] = {}
        for part in self.parts:
            alike.setdefault(part.likeness, []).append(part)
        names = list(alike)
        if apart:
            original = tuple(names.index(part.likeness) for part in self.parts)
            rows = [original, *(row for row in _arrange([len(alike[name]) for name in names]) if row != original)]
        else:
            blocks = _arrange([1] * len(names))
            rows = [tuple(kind for kind in row for _ in alike[names[kind]]) for row in blocks]
        for row in rows:
            yield from self._expand(row, [alike[name] for name in names], apart)

    def _expand(self, row: tuple[int, ...], alike: list[list[_Node]], apart: bool) -> Iterator[tuple[int, ...]]:
        taken = [0] * len(alike)
        parts = []
        for kind in row:
            parts.append(alike[kind][taken[kind]])
            taken[kind] += 1
        if apart:
            for choice in product(*(list(part.orders(apart=True)) for part in parts)):
                yield tuple(worker for inside in choice for worker in inside)
            return
        lists = {kind: [list(part.orders(apart=False)) for part in alike[kind]] for kind in set(row)}
        for numbers in product(*(range(len(orders[0])) for orders in lists.values())):
            chosen = dict(zip(lists, numbers, strict=True))
            taken = [0] * len(alike)
            order: list[int] = []
            for kind in row:
                order += lists[kind][taken[kind]][chosen[kind]]
                taken[kind] += 1
            yield tuple(order)


def _build_tree(cluster: Cluster) -> _Node:
    numbers: dict[tuple[object, ...], int] = {}  # a number for each likeness

    def number(likeness: tuple[object, ...]) -> int:
        return numbers.setdefault(likeness, len(numbers))

    alike = zip(cluster.speeds, cluster.memories, strict=True)
    nodes = [_Node(number(likeness), worker) for worker, likeness in enumerate(alike)]
    below = cluster.starts(0)
    for ends in [*(cluster.starts(level) for level in range(1, len(cluster.levels))), (0, cluster.workers)]:
        places = {start: place for place, start in enumerate(below)}
        grouped = []
        for first, last in pairwise(ends):
            parts = tuple(nodes[places[first] : places[last]])
            grouped.append(_Node(number((len(ends), *sorted(part.likeness for part in parts))), parts=parts))
        nodes, below = grouped, ends
    return nodes[0]


def _arrange(counts: list[int]) -> Iterator[tuple[int, ...]]:
    """Yields each arrangement of `counts[k]` items of each kind k, in lexicographic order."""
    if not any(counts):
        yield ()
        return
    for kind, count in enumerate(counts):
        if count:
            rest = [left - (other == kind) for other, left in enumerate(counts)]
            for row in _arrange(rest):
                yield (kind, *row)


@dataclass(frozen=True, eq=False)
class SiteArrays:
    """Many sites: the fields of `core.plan.cost.Site` as arrays.

    The ports have one row at level 0, where all are equal, and three at each other level: of the component where the
    site begins, of the one where it ends, and of the largest between them.
    """

    replicas: IntArray
    speed: FloatArray
    memory_bytes: FloatArray
    sum_bytes_per_s: FloatArray
    sum_latency_s: FloatArray
    before: list[FloatArray]
    after: list[FloatArray]
    weights: list[FloatArray]

    def __getitem__(self, chosen: IntArray) -> SiteArrays:
        return SiteArrays(
            replicas=self.replicas[chosen],
            speed=self.speed[chosen],
            memory_bytes=self.memory_bytes[chosen],
            sum_bytes_per_s=self.sum_bytes_per_s[chosen],
            sum_latency_s=self.sum_latency_s[chosen],
            before=[row[chosen] for row in self.before],
            after=[row[chosen] for row in self.after],
            weights=[row[chosen] for row in self.weights],
        )


@dataclass(frozen=True, eq=False)
class WorkerLine:
    """The workers of a cluster in the order in which stages take them."""

    cluster: Cluster
    order: tuple[int, ...]

    @classmethod
    def of(cls, cluster: Cluster, order: Iterable[int] = ()) -> WorkerLine:
        return cls(cluster, tuple(order) or tuple(range(cluster.workers)))

    def taken(self, workers: int) -> tuple[int, ...]:
        """Returns `Plan.worker_order` of a plan on the last `workers` of the line; () if it is the default."""
        order = self.order[len(self.order) - workers :]
        return () if self.cluster.is_flat or order == tuple(range(workers)) else order

    def site_list(self, first: IntArray, replicas: IntArray) -> list[Site]:
        """Returns the sites as `Site.of` does for stages between neighbours on the line."""
        arrays = self.site_arrays(first, replicas)
        distinct: dict[tuple[float, ...], Site] = {}
        sites = []
        numbers = [arrays.replicas, arrays.speed, arrays.memory_bytes, arrays.sum_bytes_per_s, arrays.sum_latency_s]
        rows = np.stack([*map(np.asarray, numbers), *arrays.before, *arrays.after, *arrays.weights], axis=-1)
        kinds = len(arrays.before)
        for row in map(tuple, rows.tolist()):
            if row not in distinct:
                count, speed, memory, rate, latency_s, *ports = row
                each = zip(ports[:kinds], ports[kinds : 2 * kinds], ports[2 * kinds :], strict=True)
                distinct[row] = Site(
                    int(count),
                    speed,
                    None if memory == np.inf else int(memory),
                    SumLink(rate, latency_s, self.cluster.sums),
                    self.cluster.sum_costs,
                    busiest_ports(PortLoad(*port) for port in each),
                )
            sites.append(distinct[row])
        return sites

    def site_arrays(self, first: IntArray, replicas: IntArray) -> SiteArrays:
        last = first + replicas - 1
        before: list[FloatArray] = []
        after: list[FloatArray] = []
        weights: list[FloatArray] = []
        summed = (
            np.where(replicas > 1, all_reduce_bytes(1, np.maximum(replicas, 2), how=self.cluster.sums), 0) / replicas
        ) * self.cluster.sum_costs.share
        reach = np.zeros(first.shape, dtype=int)
        for number, level in enumerate(self.cluster.levels):
            runs, rate = self._runs[number], level.link_bytes_per_s
            message_rate = rate / self.cluster.message_share
            here, there = runs.of[first], runs.of[last]
            leaves = here != there
            reach = np.where(leaves, number, reach)
            ring = np.where(leaves, summed / rate, 0.0)
            if not number:
                share = 1 / replicas / message_rate
                before, after, weights = [share], [share], [ring]
                continue
            front, back = runs.of[first - 1], runs.of[np.minimum(last + 1, len(self.order) - 1)]
            comes, goes = (first == 0) | (front != here), (last == len(self.order) - 1) | (back != there)
            start = np.minimum(runs.ends[here] - first, replicas) / replicas / message_rate
            end = np.where(leaves, (last + 1 - runs.starts[there]) / replicas / message_rate, 0.0)
            between = np.where(leaves, runs.largest(here + 1, there), 0) / replicas / message_rate
            before += [start * comes, end, between]
            after += [start * (goes | leaves), end * goes, between]
            weights += [ring, ring, np.where(between > 0, ring, 0.0)]
        links = np.array([self.cluster.sum_link(number) for number in range(len(self.cluster.levels))])
        return SiteArrays(
            replicas,
            self._speeds.between(first, last + 1),
            self._memories.between(first, last + 1),
            links[reach, 0],
            links[reach, 1],
            before,
            after,
            weights,
        )

    def start(self, level: int, position: IntArray) -> IntArray:
        runs = self._runs[level]
        return runs.starts[runs.of[position]]

    @cached_property
    def memory_bytes(self) -> int | None:
        """Memory of the largest worker; None if one is unlimited."""
        most = max(np.inf if memory is None else memory for memory in self.cluster.memories)
        return None if most == np.inf else int(most)

    @cached_property
    def _runs(self) -> list[_ComponentRuns]:
        return [
            _ComponentRuns.of_components([self.cluster.component(number, worker) for worker in self.order])
            for number in range(len(self.cluster.levels))
        ]

    @cached_property
    def _speeds(self) -> RunExtremes:
        return RunExtremes.of(np.array([self.cluster.speeds[worker] for worker in self.order]), np.minimum)

    @cached_property
    def _memories(self) -> RunExtremes:
        memories = [self.cluster.memories[worker] for worker in self.order]
        return RunExtremes.of(
            np.array([np.inf if memory is None else memory for memory in memories], dtype=float), np.minimum
        )


@dataclass(frozen=True, eq=False)
class _ComponentRuns:
    of: IntArray
    starts: IntArray
    ends: IntArray
    sizes: RunExtremes

    @classmethod
    def of_components(cls, components: list[int]) -> _ComponentRuns:
        row = np.array(components)
        begins = np.concatenate([[True], row[1:] != row[:-1]])
        if len(set(components)) != int(begins.sum()):
            raise ValueError("the workers of a component must be adjacent in the order")
        starts = np.flatnonzero(begins)
        ends = np.append(starts[1:], len(row))
        return cls(np.cumsum(begins) - 1, starts, ends, RunExtremes.of(ends - starts, np.maximum))

    def largest(self, first: IntArray, end: IntArray) -> IntArray:
        largest: IntArray = np.where(
            first < end, self.sizes.between(np.minimum(first, end - 1).clip(0), end.clip(1)), 0
        )
        return largest
