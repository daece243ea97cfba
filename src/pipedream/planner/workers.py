"""The workers in a line, and the site of each run of them: what a search over any cluster chooses among.

Workers of a component of the network are adjacent. Of orders that differ only by swapping like components, only
one is searched. The line is assumed to have further workers before and after it; a stage at the input or the output
exchanges nothing with them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, pairwise, product
from math import factorial, prod

import numpy as np

from pipedream.core.hardware.cluster import Cluster
from pipedream.core.plan.cost import PLAIN, PortLoad, Site, SumLink, Terms, all_reduce_bytes, busiest_ports
from pipedream.planner.arrays import FloatArray, IntArray, RunExtremes


def list_orders(cluster: Cluster, max_orders: int) -> tuple[tuple[tuple[int, ...], ...], str]:
    """Returns orders of a cluster's workers, and in words which these are; '' if there is only one.

    All orders if they are not too many, else those that keep like parts adjacent, the cluster's own first; else only
    that one.
    """
    root = _build_tree(cluster)
    own_order = tuple(range(cluster.workers))
    count = root.count(interleave=True)
    if count == 1:
        return (own_order,), ""
    if count <= max_orders:
        return tuple(root.orders(interleave=True)), f"in any of {count} orders of those that differ"
    count = root.count(interleave=False)
    if count < max_orders:  # the cluster's own order may be one more
        others = (order for order in root.orders(interleave=False) if order != own_order)
        return (own_order, *others), f"in the cluster's order or any of {count} that keep like ones adjacent"
    return (own_order,), "in the cluster's order only"


@dataclass(frozen=True)
class _Node:
    """A component, with its parts, or a worker. Those of one `kind` differ at most in the order of their parts."""

    kind: int
    worker: int = 0
    parts: tuple[_Node, ...] = ()

    def count(self, *, interleave: bool) -> int:
        if not self.parts:
            return 1
        kind_counts = Counter(part.kind for part in self.parts)
        part_orders = {part.kind: part.count(interleave=interleave) for part in self.parts}
        if interleave:
            total: int = factorial(len(self.parts)) // prod(factorial(count) for count in kind_counts.values())
            for kind, count in kind_counts.items():
                total *= part_orders[kind] ** count
            return total
        return factorial(len(kind_counts)) * prod(part_orders.values())  # like parts all have the same order inside

    def orders(self, *, interleave: bool) -> Iterator[tuple[int, ...]]:
        """Yields its orders, its own first; without `interleave`, only those that keep like parts adjacent."""
        if not self.parts:
            yield (self.worker,)
            return
        parts_by_kind: dict[int, list[_Node]] = {}
        for part in self.parts:
            parts_by_kind.setdefault(part.kind, []).append(part)
        kinds, groups = list(parts_by_kind), list(parts_by_kind.values())
        if interleave:
            original = tuple(kinds.index(part.kind) for part in self.parts)
            rows = [original, *(row for row in _arrange([len(group) for group in groups]) if row != original)]
        else:
            blocks = _arrange([1] * len(kinds))
            rows = [tuple(g for g in block for _ in groups[g]) for block in blocks]
        for row in rows:
            members = [iter(group) for group in groups]
            parts = [list(next(members[g]).orders(interleave=interleave)) for g in row]
            keys = range(len(row)) if interleave else row  # like parts all have the same order inside
            counts = dict(sorted(zip(keys, map(len, parts), strict=True)))
            for numbers in product(*map(range, counts.values())):
                chosen = dict(zip(counts, numbers, strict=True))
                yield tuple(worker for key, orders in zip(keys, parts, strict=True) for worker in orders[chosen[key]])


def _build_tree(cluster: Cluster) -> _Node:
    kinds: dict[tuple[object, ...], int] = {}  # what makes components alike -> their kind

    def find_kind(properties: tuple[object, ...]) -> int:
        return kinds.setdefault(properties, len(kinds))

    worker_properties = zip(cluster.speeds, cluster.memories, strict=True)
    nodes = [_Node(find_kind(properties), worker) for worker, properties in enumerate(worker_properties)]
    inner_starts = cluster.starts(0)
    for starts in [*(cluster.starts(level) for level in range(1, len(cluster.levels))), (0, cluster.workers)]:
        indices = {start: index for index, start in enumerate(inner_starts)}
        components = []
        for first, end in pairwise(starts):
            parts = tuple(nodes[indices[first] : indices[end]])
            components.append(_Node(find_kind(("parts", *sorted(part.kind for part in parts))), parts=parts))
        nodes, inner_starts = components, starts
    return nodes[0]


def _arrange(counts: list[int]) -> Iterator[tuple[int, ...]]:
    """Yields each arrangement of `counts[k]` items of each kind k, in lexicographic order."""
    if not any(counts):
        yield ()
        return
    for kind, count in enumerate(counts):
        if count:
            rest = [n - (other == kind) for other, n in enumerate(counts)]
            for row in _arrange(rest):
                yield (kind, *row)


@dataclass(frozen=True, eq=False)
class WorkerLine:
    """The workers of a cluster in the order in which stages take them."""

    cluster: Cluster
    order: tuple[int, ...]
    terms: Terms

    @classmethod
    def of(cls, cluster: Cluster, order: Iterable[int] = (), terms: Terms = PLAIN) -> WorkerLine:
        return cls(cluster, tuple(order) or tuple(range(cluster.workers)), terms)

    def take_last(self, workers: int) -> tuple[int, ...]:
        """Returns `Plan.worker_order` of a plan on the last `workers` of the line; () if it is the default."""
        order = self.order[len(self.order) - workers :]  # in a flat cluster as good as any others
        return () if self.cluster.is_flat or order == tuple(range(workers)) else order

    def site_list(self, first: IntArray, replicas: IntArray) -> list[Site]:
        """Returns the sites as `Site.of` does for stages between neighbours on the line, but many at once."""
        numbers, ports = self._list_columns(first, replicas)
        distinct: dict[tuple[float, ...], Site] = {}
        sites = []
        rows = np.stack([*numbers, *chain.from_iterable(ports)], axis=-1)
        kinds = len(ports[0])  # few rows differ, and a Site takes long to make
        for row in map(tuple, rows.tolist()):
            if row not in distinct:
                count, speed, memory, rate, latency_s, *loads = row
                by_port = zip(loads[:kinds], loads[kinds : 2 * kinds], loads[2 * kinds :], strict=True)
                distinct[row] = Site(
                    int(count),
                    speed,
                    None if memory == np.inf else int(memory),
                    SumLink(rate, latency_s, self.cluster.all_reduce),
                    self.terms.sums,
                    busiest_ports(PortLoad(*port) for port in by_port),
                )
            sites.append(distinct[row])
        return sites

    def _list_columns(self, first: IntArray, replicas: IntArray) -> tuple[list[FloatArray], list[list[FloatArray]]]:
        """Returns the fields of many sites but their ports, and the loads of ports: before, after, of weights.

        The ports have one row at level 0, where all are equal, and three at each other level: of the component where
        the site begins, of the one where it ends, and of the largest between them.
        """
        last = first + replicas - 1
        before: list[FloatArray] = []
        after: list[FloatArray] = []
        weights: list[FloatArray] = []
        sum_bytes = all_reduce_bytes(1, replicas, how=self.cluster.all_reduce)
        # A tree's formula holds from two replicas on.
        sum_share = np.where(replicas > 1, sum_bytes, 0) / replicas * self.terms.sums.share
        reach = np.zeros(first.shape, dtype=int)
        for number, level in enumerate(self.cluster.levels):
            runs, rate = self._runs[number], level.link_bytes_per_s
            message_rate = rate / self.terms.message_share
            first_run, last_run = runs.index[first], runs.index[last]
            is_split = first_run != last_run
            reach = np.where(is_split, number, reach)
            sum_s_per_byte = np.where(is_split, sum_share / rate, 0.0)
            if not number:
                s_per_byte = 1 / replicas / message_rate
                before, after, weights = [s_per_byte], [s_per_byte], [sum_s_per_byte]
                continue
            run_before, run_after = runs.index[first - 1], runs.index[np.minimum(last + 1, len(self.order) - 1)]
            # At the ends of the line, where an index wraps or stays, further workers are assumed in other components.
            is_entered = (first == 0) | (run_before != first_run)
            is_exited = (last == len(self.order) - 1) | (run_after != last_run)
            start = np.minimum(runs.ends[first_run] - first, replicas) / replicas / message_rate
            end = np.where(is_split, (last + 1 - runs.starts[last_run]) / replicas / message_rate, 0.0)
            between = np.where(is_split, runs.largest(first_run + 1, last_run), 0) / replicas / message_rate
            # Unless the neighbour stage lies in the same component, each port carries the messages of its workers.
            before += [start * is_entered, end, between]
            after += [start * (is_exited | is_split), end * is_exited, between]
            weights += [sum_s_per_byte, sum_s_per_byte, np.where(between > 0, sum_s_per_byte, 0.0)]
        links = np.array([self.cluster.sum_link(number) for number in range(len(self.cluster.levels))])
        speeds, memories = (run.between(first, last + 1) for run in (self._speeds, self._memories))
        return [replicas.astype(float), speeds, memories, *links[reach].T], [before, after, weights]

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
    index: IntArray  # the run of each position
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
        # Clipped, because `where` looks up empty runs too.
        largest: IntArray = np.where(
            first < end, self.sizes.between(np.minimum(first, end - 1).clip(0), end.clip(1)), 0
        )
        return largest
