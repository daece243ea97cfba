"""The workers in a line, and the site of each run of them: what a search over any cluster chooses among.

Workers of a component are adjacent. The line is assumed to have further workers before and after it; a stage at the
input or the output exchanges nothing with them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from pipedream.core.hardware.cluster import Cluster
from pipedream.core.plan.cost import all_reduce_bytes
from pipedream.core.plan.site import PortLoad, Site, busiest_ports
from pipedream.planner.arrays import FloatArray, IntArray, RunExtremes


@dataclass(frozen=True, eq=False)
class SiteArrays:
    """Many sites: the fields of `core.plan.site.Site` as arrays.

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
                    rate,
                    latency_s,
                    self.cluster.sums,
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
        )
        reach = np.zeros(first.shape, dtype=int)
        for number, level in enumerate(self.cluster.levels):
            runs, rate = self._runs[number], level.link_bytes_per_s
            here, there = runs.of[first], runs.of[last]
            leaves = here != there
            reach = np.where(leaves, number, reach)
            ring = np.where(leaves, summed / rate, 0.0)
            if not number:
                share = 1 / replicas / rate
                before, after, weights = [share], [share], [ring]
                continue
            front, back = runs.of[first - 1], runs.of[np.minimum(last + 1, len(self.order) - 1)]
            comes, goes = (first == 0) | (front != here), (last == len(self.order) - 1) | (back != there)
            start = np.minimum(runs.ends[here] - first, replicas) / replicas / rate
            end = np.where(leaves, (last + 1 - runs.starts[there]) / replicas / rate, 0.0)
            between = np.where(leaves, runs.largest(here + 1, there), 0) / replicas / rate
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
