"""The fewest workers that a stage needs for a period on a line, and the most microbatches that fit in flight.

For lower bounds, a stage needs the fewest workers that stay within a period wherever it is on the line. For each count
of workers, a *relaxed* site has the best properties of all runs of that many workers on the line: the fastest
all-reduce, the least load of each port, the largest memory. Counts are divided into spans within which the relaxed
seconds of a stage only fall as workers are added, so bisection finds the least count of a span:

- its compute, and each byte of a ring, 2 (r - 1) / r^2, fall for r >= 2;
- a span ends where a run must leave a component; each count has the best network of the counts up to it;
- the latency of an all-reduce grows with r: a span has that of its first count, and ends at a power of two.

On one level of identical workers, without latency, nothing is relaxed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise

import numpy as np

from pipedream.core.hardware.cluster import Cluster
from pipedream.core.plan.cost import SumLink
from pipedream.planner.arrays import BoolArray, FloatArray, IntArray
from pipedream.planner.tables.search_space import SearchSpace
from pipedream.planner.workers import SiteArrays, WorkerLine

_CHUNK = 1 << 14  # stages at a time: several times faster if they stay in the cache


@dataclass(frozen=True, eq=False)
class StageCosts:
    """The costs of each stage in flat arrays, as `Site.period_s` needs them.

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


def period_s(costs: StageCosts, sites: SiteArrays, cluster: Cluster) -> FloatArray:
    """Returns the seconds per minibatch of stages, each on its own site: `Site.period_s` for arrays."""
    link = SumLink(sites.sum_bytes_per_s, sites.sum_latency_s, cluster.sums)
    backward_s = costs.backward_s / sites.speed
    summed_s = link.visible_s(costs.parameter_bytes, backward_s, sites.replicas, cluster.sum_costs)
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
        span_ends = sorted(end for end in ends if end <= self.workers)
        return list(zip([1, *(end + 1 for end in span_ends[:-1])], span_ends, strict=True))

    @cached_property
    def _sites(self) -> SiteArrays:
        rows = list(self._iterate_best_sites())
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

    def _iterate_best_sites(self) -> Iterator[list[float]]:
        for count in range(1, self.workers + 1):
            first = np.arange(self.workers - count + 1)
            sites = self.line.site_arrays(first, np.full(len(first), count))
            maxima = [sites.speed.max(), sites.memory_bytes.max(), sites.sum_bytes_per_s.max()]
            ports = [row.min() for port in self._pick_ports(sites) for row in port]
            yield [*maxima, sites.sum_latency_s.min(), *ports]

    @staticmethod
    def _pick_ports(sites: SiteArrays) -> tuple[list[FloatArray], list[FloatArray], list[FloatArray]]:
        """Returns the port of each level that most of a run's messages cross."""
        busiest: tuple[list[FloatArray], list[FloatArray], list[FloatArray]] = ([], [], [])
        for begin, end in pairwise((0, *range(1, len(sites.before) + 1, 3))):
            rows = [np.stack(port[begin:end]) for port in (sites.before, sites.after, sites.weights)]
            chosen = (rows[0] + rows[1]).argmax(axis=0)[None]
            for kind, row in zip(busiest, rows, strict=True):
                kind.append(np.take_along_axis(row, chosen, axis=0)[0])
        return busiest

    def fewest_workers(
        self, costs: StageCosts, period: float, low: IntArray, high: IntArray, most_workers: IntArray
    ) -> IntArray:
        """Returns the fewest workers, 2 or more, that keep each stage within a period.

        The result is one more than the line has if no count up to `most_workers` is enough. `low` and `high` are known
        bounds, inclusive.
        """
        fewest = np.where(high <= most_workers, high, self.workers + 1)
        undecided = np.flatnonzero((low < fewest) & (low <= most_workers))
        for begin in range(0, len(undecided), _CHUNK):
            chunk = undecided[begin : begin + _CHUNK]
            fewest[chunk] = self._find_fewest(costs[chunk], period, low[chunk], fewest[chunk], most_workers[chunk])
        return fewest

    def _find_fewest(
        self, costs: StageCosts, period: float, low: IntArray, high: IntArray, most_workers: IntArray
    ) -> IntArray:
        fewest, cluster = high.copy(), self.line.cluster
        undecided = np.arange(len(low))
        for begin, end in self.spans:
            if begin < 2 or not len(undecided):
                continue
            too_few, enough = np.maximum(begin, low[undecided]), np.minimum(end, most_workers[undecided])
            is_searched = (too_few <= enough) & (too_few < fewest[undecided])
            searched, too_few, enough = undecided[is_searched], too_few[is_searched] - 1, enough[is_searched]
            if not len(searched):
                continue
            is_possible = period_s(costs[searched], self.sites(enough), cluster) <= period
            searched, too_few, enough = searched[is_possible], too_few[is_possible], enough[is_possible]
            while len(open_ := np.flatnonzero(enough - too_few > 1)):
                middle = (too_few[open_] + enough[open_]) // 2
                is_enough = period_s(costs[searched[open_]], self.sites(middle), cluster) <= period
                enough[open_[is_enough]] = middle[is_enough]
                too_few[open_[~is_enough]] = middle[~is_enough]
            fewest[searched] = np.minimum(fewest[searched], enough)
            undecided = undecided[(fewest[undecided] > end) & (most_workers[undecided] > end)]
        return fewest


@dataclass(frozen=True, eq=False)
class StageNeeds:
    """The stages that pipelines of at least two stages may have, and what each needs.

    Attributes:
        index: index of each stage in `costs`, as [from, to]; -1 where there is no stage.
        costs: without and with (the key) recomputation.
    """

    space: SearchSpace
    line: WorkerLine
    places: IntArray
    index: IntArray
    costs: dict[bool, StageCosts]
    relaxed: RelaxedLine
    _in_flight: dict[tuple[int, int, bool], IntArray] = field(default_factory=dict)

    @classmethod
    def of(cls, space: SearchSpace, line: WorkerLine, recompute: str) -> StageNeeds:
        places = np.array(space.positions)
        allowed = space.precedes.copy()
        allowed[0, -1] = False
        index = np.full(allowed.shape, -1)
        index[allowed] = np.arange(allowed.sum())
        modes = {"never": (False,), "always": (True,), "auto": (False, True) if line.cluster.is_limited else (False,)}[
            recompute
        ]
        costs = {recompute: StageCosts.of(space, places, allowed, recompute) for recompute in modes}
        return cls(space, line, places, index, costs, RelaxedLine(line))

    @property
    def workers(self) -> int:
        return len(self.line.order)

    @property
    def work_s(self) -> float:
        """Seconds of the whole model on one worker of speed 1."""
        recompute = min(self.costs)
        end = int(self.places[-1])
        forward_s, backward_s = self.space.passes_s(0, end)
        return float(forward_s * (1 + recompute) + backward_s + self.space.update_s(0, end))

    @property
    def smallest_s(self) -> float:
        compute_s = self.costs[min(self.costs)].compute_s
        positive_s = compute_s[compute_s > 0]
        return float(positive_s.min() if len(positive_s) else 1.0) / (4 * self.workers * max(self.line.cluster.speeds))

    def for_period(self, period: float, low: PeriodNeeds | None = None, high: PeriodNeeds | None = None) -> PeriodNeeds:
        """Returns what a period needs, given the needs of a shorter and of a longer one."""
        fits_single, several = {}, {}
        fastest_s = period * max(self.line.cluster.speeds)  # seconds of work that a worker does in a period
        for recompute, costs in self.costs.items():
            count = len(costs.first)
            # A stage needs at least the workers for its own work, and must leave enough for all other work.
            own_workers = np.ceil(costs.compute_s / fastest_s * (1 - 1e-12))
            other_workers = (self.work_s - self.costs[min(self.costs)].compute_s) / fastest_s
            most_workers = np.floor(self.workers - other_workers * (1 - 1e-12) + 1e-9).astype(int)
            fits_single[recompute] = self._single_worker_s[recompute] <= period
            at_least = np.maximum(own_workers.astype(int), 2 if high is None else high.several[recompute])
            at_most = np.full(count, self.workers + 1) if low is None else low.several[recompute]
            several[recompute] = at_least
            if not np.isinf(period):
                several[recompute] = self.relaxed.fewest_workers(costs, period, at_least, at_most, most_workers)
        return PeriodNeeds(self, period, fits_single, several)

    @cached_property
    def _single_worker_s(self) -> dict[bool, FloatArray]:
        alone = self.relaxed.sites(np.array(1))
        return {recompute: period_s(costs, alone, self.line.cluster) for recompute, costs in self.costs.items()}

    def most_in_flight(self, memory_bytes: float, replicas: int, recompute: bool) -> IntArray:
        """Returns the most microbatches in flight that each stage has memory for, up to the number of workers.

        Two replicas need more memory than any higher number, because their share of a minibatch is the largest.
        """
        key = int(min(memory_bytes, 2**62)), replicas, recompute
        if key not in self._in_flight:
            self._in_flight[key] = self._find_most_in_flight(memory_bytes, replicas, recompute)
        return self._in_flight[key]

    def _find_most_in_flight(self, memory_bytes: float, replicas: int, recompute: bool) -> IntArray:
        costs, update_delay = self.costs[recompute], self.space.update_delay if replicas > 1 else 0
        first, last = self.places[costs.first], self.places[costs.last]
        most = np.full(len(first), self.workers)
        if np.isinf(memory_bytes):
            return most
        low, high = np.zeros(len(first), dtype=int), most + 1  # it fits at `low`, and not at `high`
        while len(open_ := np.flatnonzero(high - low > 1)):
            middle = (low[open_] + high[open_]) // 2
            for count in np.unique(middle):
                part = open_[middle == count]
                need = self.space.need_bytes(first[part], last[part], int(count), update_delay, recompute, replicas)
                fits = need + self.space.spare_bytes <= memory_bytes
                low[part[fits]] = count
                high[part[~fits]] = count
        return low


@dataclass(frozen=True, eq=False)
class PeriodNeeds:
    """The needs of stages for one period.

    Attributes:
        fits_single: which stages one worker runs within the period, without and with (the key) recomputation.
        several: the fewest workers, 2 or more, that do; one more than exist if there are too few.
    """

    needs: StageNeeds
    period: float
    fits_single: dict[bool, BoolArray]
    several: dict[bool, IntArray]

    @cached_property
    def feasible(self) -> BoolArray:
        feasible: BoolArray = np.any(
            [
                self.fits_single[recompute] | (self.several[recompute] <= self.needs.workers)
                for recompute in self.needs.costs
            ],
            0,
        )
        return feasible

    def fewest_workers(self) -> IntArray:
        """Returns the fewest workers that run the layers from each place on; `_too_many` if there are too few."""
        needs = self.needs
        memory = needs.line.memory_bytes
        too_many = self._too_many
        fewest = np.full(len(needs.places), too_many)
        fewest[-1] = 0
        tables = []
        for recompute in needs.costs:
            rows = self._count_workers(recompute)
            rows[0] = rows[0] if memory is not None else np.minimum(*rows)
            limits = (
                [needs.most_in_flight(memory, count, recompute) for count in (1, max(needs.workers, 2))]
                if memory is not None
                else []
            )
            tables.append([self._tabulate(row) for row in (*rows, *limits)])
        for i in range(len(fewest) - 2, -1, -1):
            after = fewest[i + 1 :]
            best = too_many
            for single, several, *limits in tables:
                counts = single[i, i + 1 :]
                if limits:
                    counts = np.where(after + 1 <= limits[0][i, i + 1 :], counts, too_many)
                    limit = limits[1][i, i + 1 :]
                    least = np.maximum(several[i, i + 1 :], np.maximum(after - 1, 0) // np.maximum(limit - 1, 1) + 1)
                    counts = np.minimum(counts, np.where((limit >= 2) | ((after == 0) & (limit >= 1)), least, too_many))
                best = min(best, int((counts + after).min()))
            fewest[i] = min(best, too_many)
        return fewest

    def fewest_before(self) -> IntArray:
        """Returns the fewest workers that run the layers before each place, ignoring memory."""
        too_many = self._too_many
        table = self._tabulate(np.minimum.reduce([row for way in self.needs.costs for row in self._count_workers(way)]))
        fewest = np.full(len(self.needs.places), too_many)
        fewest[0] = 0
        for j in range(1, len(fewest)):
            fewest[j] = min(too_many, int((fewest[:j] + table[:j, j]).min()))
        return fewest

    def _count_workers(self, recompute: bool) -> list[IntArray]:
        """Returns the workers of each stage if it has one, and if it has several."""
        several = self.several[recompute]
        return [
            np.where(self.fits_single[recompute], 1, self._too_many),
            np.where(several > self.needs.workers, self._too_many, several),
        ]

    @property
    def _too_many(self) -> int:
        """A count for impossible stages, more than the workers of any plan."""
        return 4 * self.needs.workers + 4

    def _tabulate(self, row: IntArray) -> IntArray:
        """Returns a row as a table [from, to]."""
        table = np.append(row, self._too_many if row.dtype != bool else False)
        return table[self.needs.index]
