"""The workers in a line, and what each run of them allows: the sites that a search over any cluster chooses among.

Stages take consecutive workers of the line, which runs through the tree of the network: the workers of a component
stand side by side. In front of the line and behind it others are taken to be: of what crosses to them a stage at the
input or the output has nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from pipedream.core.hardware.cluster import Cluster
from pipedream.core.plan.cost import all_reduce_bytes
from pipedream.core.plan.site import PortLoad, Site, busiest_ports

__all__ = ["Sites", "WorkerLine"]


@dataclass(frozen=True, eq=False)
class Sites:
    """Many sites: the fields of `core.plan.site.Site` as arrays.

    Of the ports there is one row at level 0, where all of a site are alike, and three at each other level: of the
    component where the site begins, of that where it ends, and of the largest between them.
    """

    replicas: Any
    speed: Any
    memory_bytes: Any
    sum_bytes_per_s: Any
    sum_latency_s: Any
    before: Any
    behind: Any
    weights: Any

    def __getitem__(self, chosen: Any) -> Sites:
        """Returns some of them."""
        fields = [getattr(self, name) for name in self.__dataclass_fields__]
        return Sites(
            *([row[chosen] for row in field] if isinstance(field, list) else field[chosen] for field in fields)
        )


@dataclass(frozen=True, eq=False)
class WorkerLine:
    """The workers of a cluster in the order in which stages take them.

    Attributes:
        cluster: whose.
        order: all its workers, those of each component of the network side by side.
    """

    cluster: Cluster
    order: tuple[int, ...]

    @classmethod
    def of(cls, cluster: Cluster, order: Iterable[int] = ()) -> WorkerLine:
        """Returns the line of a cluster; as its workers stand unless an order is given."""
        return cls(cluster, tuple(order) or tuple(range(cluster.workers)))

    def taken(self, workers: int) -> tuple[int, ...]:
        """Returns `Plan.order` of a plan on the last so many of the line; () where the first ones are as good."""
        order = self.order[len(self.order) - workers :]
        return () if self.cluster.is_flat or order == tuple(range(workers)) else order

    def site(self, first: int, replicas: int) -> Site:
        """Returns the site of a stage on so many workers of the line from one on."""
        return self.each(np.array([first]), np.array([replicas]))[0]

    def each(self, first: Any, replicas: Any) -> list[Site]:
        """Returns the sites of stages: each the one that `Site.of` returns between neighbours on the line."""
        found = self.sites(first, replicas)
        known: dict[tuple[float, ...], Site] = {}
        sites = []
        numbers = [found.replicas, found.speed, found.memory_bytes, found.sum_bytes_per_s, found.sum_latency_s]
        rows = np.stack([*map(np.asarray, numbers), *found.before, *found.behind, *found.weights], axis=-1)
        kinds = len(found.before)
        for row in map(tuple, rows.tolist()):
            if row not in known:
                count, speed, memory, rate, latency_s, *ports = row
                each = zip(ports[:kinds], ports[kinds : 2 * kinds], ports[2 * kinds :], strict=True)
                known[row] = Site(
                    int(count),
                    speed,
                    None if memory == np.inf else int(memory),
                    rate,
                    latency_s,
                    self.cluster.sums,
                    busiest_ports(PortLoad(*one) for one in each),
                )
            sites.append(known[row])
        return sites

    def sites(self, first: Any, replicas: Any) -> Sites:
        """Returns the same as arrays, for arrays of first workers and of counts."""
        first, replicas = np.asarray(first), np.asarray(replicas)
        last = first + replicas - 1
        before: list[Any] = []
        behind: list[Any] = []
        weights: list[Any] = []
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
                before, behind, weights = [share], [share], [ring]
                continue
            front, back = runs.of[first - 1], runs.of[np.minimum(last + 1, len(self.order) - 1)]
            comes, goes = (first == 0) | (front != here), (last == len(self.order) - 1) | (back != there)
            start = np.minimum(runs.ends[here] - first, replicas) / replicas / rate
            end = np.where(leaves, (last + 1 - runs.starts[there]) / replicas / rate, 0.0)
            between = np.where(leaves, runs.largest(here + 1, there), 0) / replicas / rate
            before += [start * comes, end, between]
            behind += [start * (goes | leaves), end * goes, between]
            weights += [ring, ring, np.where(between > 0, ring, 0.0)]
        links = np.array([self.cluster.sum_link(number) for number in range(len(self.cluster.levels))])
        return Sites(
            replicas,
            self._least(self._speeds, first, last),
            self._least(self._memories, first, last),
            links[reach, 0],
            links[reach, 1],
            before,
            behind,
            weights,
        )

    def start(self, level: int, worker: Any) -> Any:
        """Returns where on the line the component of a level begins that these workers of it belong to."""
        runs = self._runs[level]
        return runs.starts[runs.of[worker]]

    @cached_property
    def memory_bytes(self) -> int | None:
        """Memory of the largest worker; None where one is not limited."""
        most = max(np.inf if memory is None else memory for memory in self.cluster.memories)
        return None if most == np.inf else int(most)

    @cached_property
    def _runs(self) -> list[_Runs]:
        return [
            _Runs.of_components([self.cluster.component(number, worker) for worker in self.order])
            for number in range(len(self.cluster.levels))
        ]

    @cached_property
    def _speeds(self) -> _Extremes:
        return _Extremes.of(np.array([self.cluster.speeds[worker] for worker in self.order]), np.minimum)

    @cached_property
    def _memories(self) -> _Extremes:
        known = [self.cluster.memories[worker] for worker in self.order]
        return _Extremes.of(np.array([np.inf if one is None else one for one in known], dtype=float), np.minimum)

    @staticmethod
    def _least(table: _Extremes, first: Any, last: Any) -> Any:
        return table.between(first, last + 1)


@dataclass(frozen=True, eq=False)
class _Runs:
    """The components of a level along the line: of each worker which, and where each begins and ends."""

    of: Any
    starts: Any
    ends: Any
    sizes: _Extremes

    @classmethod
    def of_components(cls, components: list[int]) -> _Runs:
        row = np.array(components)
        begins = np.concatenate([[True], row[1:] != row[:-1]])
        if len(set(components)) != int(begins.sum()):
            raise ValueError("the workers of a component must stand side by side in the order")
        starts = np.flatnonzero(begins)
        ends = np.append(starts[1:], len(row))
        return cls(np.cumsum(begins) - 1, starts, ends, _Extremes.of(ends - starts, np.maximum))

    def largest(self, first: Any, behind: Any) -> Any:
        """Returns the size of the largest component from one on and before another; of none 0."""
        return np.where(first < behind, self.sizes.between(np.minimum(first, behind - 1).clip(0), behind.clip(1)), 0)


@dataclass(frozen=True, eq=False)
class _Extremes:
    """Least or greatest of any run of a row, each from two runs of a power of two; one table where all are alike."""

    tables: Any
    extreme: np.ufunc

    @classmethod
    def of(cls, row: Any, extreme: np.ufunc) -> _Extremes:
        tables, width = [row], 1
        if (row == row[0]).all():
            return cls(row[None], extreme)
        while 2 * width <= len(row):
            before = tables[-1]
            after = before.copy()
            after[:-width] = extreme(before[:-width], before[width:])
            tables.append(after)
            width *= 2
        return cls(np.stack(tables), extreme)

    def between(self, first: Any, behind: Any) -> Any:
        if len(self.tables) == 1:  # of a row of one, or of likes
            return self.tables[0][first]
        power = np.frexp(behind - first)[1] - 1
        return self.extreme(self.tables[power, first], self.tables[power, behind - (1 << power)])
