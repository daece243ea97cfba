"""How few workers a stage needs to stay within a period, wherever it is on the line: for lower bounds.

For each count of workers, a *relaxed* site has the best of any run of that many workers on the line: the fastest
all-reduce, the least load of each port, the largest memory. Counts are taken in spans within which the relaxed seconds
of a stage only fall as workers are added, so that bisection finds the least count of a span:

- its compute, and each byte of a ring, 2 (r - 1) / r^2, fall for r >= 2;
- spans end where a run must leave a component; within one the best network so far is taken;
- the latency of an all-reduce grows with r: that of a span's first count is taken, and spans end at powers of two.

On one level of identical workers, without latency, nothing is relaxed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np

from pipedream.core.plan.cost import visible_sum_s
from pipedream.planner.arrays import BoolArray, FloatArray, IntArray
from pipedream.planner.tables.search_space import SearchSpace
from pipedream.planner.workers.worker_line import SiteArrays, WorkerLine

_AT_ONCE = 1 << 14  # stages at a time: several times faster if they stay in the cache


@dataclass(frozen=True, eq=False)
class StageCosts:
    """What each stage costs, as flat arrays, as `Site.period_s` takes them.

    Attributes:
        first, last: indices into the positions of the space.
    """

    first: IntArray
    last: IntArray
    forward_s: FloatArray
    backward_s: FloatArray
    update_s: FloatArray
    parameter_bytes: IntArray
    before_bytes: IntArray
    after_bytes: IntArray

    @classmethod
    def of(cls, space: SearchSpace, places: IntArray, allowed: BoolArray, recompute: bool) -> StageCosts:
        first, last = np.nonzero(allowed)
        ends = places[first], places[last]
        forward, backward = (np.asarray(row, dtype=float) for row in space.passes_s(*ends))
        update = np.broadcast_to(np.asarray(space.update_s(*ends), dtype=float), first.shape)
        parameters, before, after = (np.asarray(row) for row in space.bytes_of(*ends))
        backward = backward + forward if recompute else backward
        return cls(first, last, forward, backward, update, parameters, before, after)

    def __getitem__(self, chosen: IntArray) -> StageCosts:
        return StageCosts(*(getattr(self, name)[chosen] for name in self.__dataclass_fields__))

    @property
    def compute_s(self) -> FloatArray:
        """Seconds on one worker of speed 1."""
        return self.forward_s + self.backward_s + self.update_s


def period_s(costs: StageCosts, sites: SiteArrays, how: str) -> FloatArray:
    """Returns the seconds per minibatch of stages, each on its own site: `Site.period_s` for arrays."""
    summed_s = visible_sum_s(
        costs.parameter_bytes,
        costs.backward_s / sites.speed,
        sites.replicas,
        sites.sum_bytes_per_s,
        sites.sum_latency_s,
        how=how,
    )
    busiest: FloatArray = (costs.compute_s / sites.speed + summed_s * (sites.replicas > 1)) / sites.replicas
    for before, after, weights in zip(sites.before, sites.after, sites.weights, strict=True):
        port_s = before * costs.before_bytes + after * costs.after_bytes + weights * costs.parameter_bytes
        busiest = np.maximum(busiest, port_s)
    return busiest


@dataclass(frozen=True, eq=False)
class RelaxedLine:
    """The relaxed sites of a line, for each count of workers."""

    line: WorkerLine

    @property
    def workers(self) -> int:
        return len(self.line.order)

    def sites(self, replicas: IntArray) -> SiteArrays:
        return self._sites[replicas]

    @cached_property
    def spans(self) -> list[tuple[int, int]]:
        cluster = self.line.cluster
        ends = {1, self.workers, *(2**k for k in range(self.workers.bit_length()))}
        for number in range(1, len(cluster.levels)):
            starts = np.array(cluster.starts(number))
            ends.add(int(np.diff(starts).max()))
        kept = sorted(end for end in ends if end <= self.workers)
        return list(zip([1, *(end + 1 for end in kept[:-1])], kept, strict=True))

    @cached_property
    def _sites(self) -> SiteArrays:
        rows = list(self._find_best())
        table = np.array([rows[0], *rows])  # index 0 is not used
        levels = len(self.line.cluster.levels)
        ports = [list(table[:, 4 + k * levels : 4 + (k + 1) * levels].T) for k in range(3)]
        for low, high in self.spans:
            span = slice(low, high + 1)
            for column in (0, 1, 2):
                table[span, column] = np.maximum.accumulate(table[span, column])
            for row in (table[:, 3], *(row for port in ports for row in port)):
                row[span] = np.minimum.accumulate(row[span])
            counts = np.arange(low, high + 1)
            steps = np.ceil(np.log2(counts)) if self.line.cluster.sums == "tree" else counts - 1
            table[span, 3] *= steps[0] / np.maximum(steps, 1)
        speed, memory, bandwidth, latency = (table[:, k].copy() for k in range(4))
        return SiteArrays(np.arange(self.workers + 1), speed, memory, bandwidth, latency, *ports)

    def _find_best(self) -> Iterator[list[float]]:
        for count in range(1, self.workers + 1):
            first = np.arange(self.workers - count + 1)
            sites = self.line.site_arrays(first, np.full(len(first), count))
            most = [sites.speed.max(), sites.memory_bytes.max(), sites.sum_bytes_per_s.max()]
            ports = [row.min() for port in self._pick_ports(sites) for row in port]
            yield [*most, sites.sum_latency_s.min(), *ports]

    @staticmethod
    def _pick_ports(sites: SiteArrays) -> tuple[list[FloatArray], list[FloatArray], list[FloatArray]]:
        """The port of each level that most of a run's messages cross."""
        busiest: tuple[list[FloatArray], list[FloatArray], list[FloatArray]] = ([], [], [])
        for begin, end in pairwise((0, *range(1, len(sites.before) + 1, 3))):
            rows = [np.stack(port[begin:end]) for port in (sites.before, sites.after, sites.weights)]
            chosen = (rows[0] + rows[1]).argmax(axis=0)[None]
            for kind, row in zip(busiest, rows, strict=True):
                kind.append(np.take_along_axis(row, chosen, axis=0)[0])
        return busiest

    def fewest_workers(
        self, costs: StageCosts, period: float, low: IntArray, high: IntArray, useful: IntArray
    ) -> IntArray:
        """Returns the fewest workers, 2 or more, that keep each stage within a period.

        One more than the line has if no count is enough, or only one above `useful`, the most that each stage may have.
        `low` and `high` are known bounds, included.
        """
        fewest = np.where(high <= useful, high, self.workers + 1)
        left = np.flatnonzero((low < fewest) & (low <= useful))
        for begin in range(0, len(left), _AT_ONCE):
            some = left[begin : begin + _AT_ONCE]
            fewest[some] = self._find_fewest(costs[some], period, low[some], fewest[some], useful[some])
        return fewest

    def _find_fewest(
        self, costs: StageCosts, period: float, low: IntArray, high: IntArray, useful: IntArray
    ) -> IntArray:
        fewest, how = high.copy(), self.line.cluster.sums
        left = np.arange(len(low))
        for begin, end in self.spans:
            if begin < 2 or not len(left):
                continue
            few, many = np.maximum(begin, low[left]), np.minimum(end, useful[left])
            tried = (few <= many) & (few < fewest[left])
            some, few, many = left[tried], few[tried] - 1, many[tried]
            if not len(some):
                continue
            within = period_s(costs[some], self.sites(many), how) <= period
            some, few, many = some[within], few[within], many[within]
            while len(open_ := np.flatnonzero(many - few > 1)):
                middle = (few[open_] + many[open_]) // 2
                good = period_s(costs[some[open_]], self.sites(middle), how) <= period
                many[open_[good]] = middle[good]
                few[open_[~good]] = middle[~good]
            fewest[some] = np.minimum(fewest[some], many)
            left = left[(fewest[left] > end) & (useful[left] > end)]
        return fewest
