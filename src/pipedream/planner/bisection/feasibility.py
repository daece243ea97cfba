"""What stages need on a line: how few workers for a period, and how many microbatches fit in flight."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from pipedream.planner.arrays import BoolArray, FloatArray, IntArray
from pipedream.planner.bisection.lower_bounds import RelaxedLine, StageCosts, period_s
from pipedream.planner.tables.search_space import SearchSpace
from pipedream.planner.workers.worker_line import WorkerLine


@dataclass(frozen=True, eq=False)
class StageNeeds:
    """The stages that pipelines of at least two stages may have, and what each needs.

    Attributes:
        index: of each stage in `costs`, as [from, to]; -1 where there is no stage.
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
        ways = {"never": (False,), "always": (True,), "auto": (False, True) if line.cluster.is_limited else (False,)}[
            recompute
        ]
        costs = {recompute: StageCosts.of(space, places, allowed, recompute) for recompute in ways}
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
        above = compute_s[compute_s > 0]
        return float(above.min() if len(above) else 1.0) / (4 * self.workers * max(self.line.cluster.speeds))

    def for_period(self, period: float, low: PeriodNeeds | None = None, high: PeriodNeeds | None = None) -> PeriodNeeds:
        """Returns what a period needs, given the needs of a shorter and of a longer one."""
        alone, several = {}, {}
        fastest_s = period * max(self.line.cluster.speeds)  # seconds of work that a worker does in a period
        for recompute, costs in self.costs.items():
            count = len(costs.first)
            # A stage needs at least the workers for its own work, and must leave those for all other work.
            few = np.ceil(costs.compute_s / fastest_s * (1 - 1e-12))
            rest = (self.work_s - self.costs[min(self.costs)].compute_s) / fastest_s
            useful = np.floor(self.workers - rest * (1 - 1e-12) + 1e-9).astype(int)
            alone[recompute] = self._alone_s[recompute] <= period
            least = np.maximum(few.astype(int), 2 if high is None else high.several[recompute])
            most = np.full(count, self.workers + 1) if low is None else low.several[recompute]
            several[recompute] = least
            if not np.isinf(period):
                several[recompute] = self.relaxed.fewest_workers(costs, period, least, most, useful)
        return PeriodNeeds(self, period, alone, several)

    @cached_property
    def _alone_s(self) -> dict[bool, FloatArray]:
        how = self.line.cluster.sums
        return {
            recompute: period_s(costs, self.relaxed.sites(np.array(1)), how) for recompute, costs in self.costs.items()
        }

    def most_in_flight(self, memory_bytes: float, replicas: int, recompute: bool) -> IntArray:
        """Returns the most in flight for which each stage has memory, up to the number of workers.

        Of several replicas, two need the most memory, because their share of a minibatch is the largest.
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
                some = open_[middle == count]
                need = self.space.need_bytes(first[some], last[some], int(count), update_delay, recompute, replicas)
                fits = need + self.space.spare_bytes <= memory_bytes
                low[some[fits]] = count
                high[some[~fits]] = count
        return low


@dataclass(frozen=True, eq=False)
class PeriodNeeds:
    """What a period needs.

    Attributes:
        alone: which stages one worker runs within it, without and with (the key) recomputation.
        several: the fewest workers, 2 or more, that run each stage within it; one more than exist if there are too few.
    """

    needs: StageNeeds
    period: float
    alone: dict[bool, BoolArray]
    several: dict[bool, IntArray]

    @cached_property
    def feasible(self) -> BoolArray:
        feasible: BoolArray = np.any(
            [self.alone[recompute] | (self.several[recompute] <= self.needs.workers) for recompute in self.needs.costs],
            0,
        )
        return feasible

    def fewest_workers(self) -> IntArray:
        """Returns the fewest workers that run the layers from each place on; `_far` if there are too few."""
        needs, workers = self.needs, self.needs.workers
        memory = needs.line.memory_bytes
        far = self._far
        fewest = np.full(len(needs.places), far)
        fewest[-1] = 0
        tables = []
        for recompute in needs.costs:
            rows = [
                np.where(self.alone[recompute], 1, far),
                np.where(self.several[recompute] > workers, far, self.several[recompute]),
            ]
            rows[0] = rows[0] if memory is not None else np.minimum(*rows)
            fitting = (
                [needs.most_in_flight(memory, count, recompute) for count in (1, max(workers, 2))]
                if memory is not None
                else []
            )
            tables.append([self._tabulate(row) for row in (*rows, *fitting)])
        for i in range(len(fewest) - 2, -1, -1):
            after = fewest[i + 1 :]
            best = far
            for single, many, *fitting in tables:
                counts = single[i, i + 1 :]
                if fitting:
                    counts = np.where(after + 1 <= fitting[0][i, i + 1 :], counts, far)
                    room = fitting[1][i, i + 1 :]
                    shared = np.maximum(many[i, i + 1 :], np.maximum(after - 1, 0) // np.maximum(room - 1, 1) + 1)
                    counts = np.minimum(counts, np.where((room >= 2) | ((after == 0) & (room >= 1)), shared, far))
                best = min(best, int((counts + after).min()))
            fewest[i] = min(best, far)
        return fewest

    def fewest_before(self) -> IntArray:
        """Returns the fewest workers that run the layers before each place, ignoring memory."""
        far = self._far
        ways = [
            np.where(
                self.alone[recompute],
                1,
                np.where(self.several[recompute] > self.needs.workers, far, self.several[recompute]),
            )
            for recompute in self.needs.costs
        ]
        table = self._tabulate(np.minimum.reduce(ways))
        fewest = np.full(len(self.needs.places), far)
        fewest[0] = 0
        for j in range(1, len(fewest)):
            fewest[j] = min(far, int((fewest[:j] + table[:j, j]).min()))
        return fewest

    @property
    def _far(self) -> int:
        """More workers than exist, even if added up."""
        return 4 * self.needs.workers + 4

    def _tabulate(self, row: IntArray) -> IntArray:
        """As a table [from, to]."""
        table = np.append(row, self._far if row.dtype != bool else False)
        return table[self.needs.index]
