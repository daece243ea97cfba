"""Bisection over the period, for pipelines too long for the dynamic program.

Two questions about a period are answered from the output backwards:

- **lower bound** (`RelaxedLine`): if each stage has the fewest workers that it needs wherever it is, how few run the
  layers from each place on? If they are more than exist, no pipeline on consecutive workers is this fast: fewer workers
  after a stage are never worse for it, because it then holds less in flight.
- **plan** (`Bisection`): with the true seconds of each position, what is the last worker at which the layers from each
  place on can begin?

On one level of identical workers without latency, the answers agree up to the tolerance. On several levels, a suffix
that begins earlier may have a better position, which is rarely tried.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from pipedream.core.plan.plan import Plan
from pipedream.planner.arrays import BoolArray, IntArray
from pipedream.planner.feasibility import PeriodNeeds, StageNeeds, period_s
from pipedream.planner.tables.search_space import SearchSpace
from pipedream.planner.workers import WorkerLine

_TRIED = 128  # candidates to try at once, the most promising first
_ROUNDS = 4  # of tries


@dataclass(frozen=True)
class PlacedStage:
    """A stage of a pipeline on a line.

    Attributes:
        first, last: indices of its places.
        worker: position of its first worker.
        suffix: which of the pipelines kept from its end on follows it.
    """

    first: int
    last: int
    worker: int
    replicas: int
    recompute: bool
    suffix: int = 0


def latest_start_pipeline(
    period_needs: PeriodNeeds, all_workers: bool, next_count: IntArray
) -> list[PlacedStage] | None:
    """Returns the stages of a pipeline within a period (up to rounding), or None if none is found.

    Several suffixes are kept for each place: the one that begins last, and, for each level, the one that begins last at
    the start of a component.

    Args:
        next_count: for each number up to one more than there are workers, the next count that a stage may have.
    """
    needs, period = period_needs.needs, period_needs.period * (1 + 1e-12)
    levels = len(needs.line.cluster.levels)
    end = len(needs.places) - 1
    starts = np.full((levels, end + 1), -1)  # the first worker of each suffix; -1: no suffix
    starts[:, end] = needs.workers
    needed_before = period_needs.fewest_before()
    stages: list[list[PlacedStage | None]] = [[None] * (end + 1) for _ in range(levels)]
    for i in range(end - 1, -1, -1):
        candidates = _StageCandidates.before_suffixes(
            period_needs, starts, i, int(needed_before[i]), all_workers and i == 0, next_count
        )
        for level, candidate in enumerate(candidates.best(needs, period)):
            if candidate is not None:
                starts[level, i], stages[level][i] = candidate.worker, candidate
    if starts[0, 0] < 0:
        return None
    chain: list[PlacedStage] = []
    place, level = 0, 0
    while place < end:
        stage = stages[level][place]
        assert stage is not None
        chain.append(stage)
        place, level = stage.last, stage.suffix
    return chain


@dataclass(frozen=True, eq=False)
class _StageCandidates:
    """Some stages that may begin at a place; those that begin last come first."""

    place: int
    last: IntArray
    suffix: IntArray
    worker: IntArray
    replicas: IntArray
    recompute: IntArray

    @classmethod
    def before_suffixes(
        cls,
        period_needs: PeriodNeeds,
        starts: IntArray,
        i: int,
        needed_before: int,
        exact: bool,
        next_count: IntArray,
    ) -> _StageCandidates:
        """Returns stages from place i that leave `needed_before` workers; with `exact`, they begin at the first one."""
        needs = period_needs.needs
        ends = np.flatnonzero((needs.index[i] >= 0) & (starts.max(axis=0) > needed_before))
        stages = needs.index[i, ends]
        feasible = period_needs.feasible[stages]
        ends, stages = ends[feasible], stages[feasible]
        rows: list[list[IntArray]] = []
        for suffix, row in enumerate(starts):
            suffix_starts = row[ends]
            distinct = (suffix_starts > needed_before) & ((suffix == 0) | (suffix_starts != starts[0][ends]))
            for recompute in needs.costs:
                for chosen, counts in _count_workers(period_needs, recompute, stages, suffix_starts):
                    part = np.flatnonzero(distinct & chosen)
                    for least in _list_counts(needs, suffix_starts[part], counts[part], exact):
                        replicas = next_count[least]
                        suffixes, redoes = np.full(len(part), suffix), np.full(len(part), int(recompute))
                        rows.append([ends[part], suffixes, suffix_starts[part] - replicas, replicas, redoes])
        columns = [np.concatenate(column) for column in zip(*rows, strict=True)]
        leaves_enough = columns[2] >= needed_before
        order = np.argsort(-columns[2][leaves_enough], kind="stable")[: _TRIED * _ROUNDS]
        return cls(i, *(column[leaves_enough][order] for column in columns))

    def best(self, needs: StageNeeds, period: float) -> list[PlacedStage | None]:
        """Returns, for each level, the stage that fits and begins last at a component's start."""
        best: list[PlacedStage | None] = [None] * len(needs.line.cluster.levels)
        for begin in range(0, len(self.last), _TRIED):
            fits = np.flatnonzero(self._fits(needs, slice(begin, begin + _TRIED), period)) + begin
            for level in range(len(best)):
                aligned = fits[needs.line.start(level, self.worker[fits]) == self.worker[fits]]
                if best[level] is None and len(aligned):
                    k = int(aligned[0])
                    last, worker, count = (int(column[k]) for column in (self.last, self.worker, self.replicas))
                    recompute, suffix = bool(self.recompute[k]), int(self.suffix[k])
                    best[level] = PlacedStage(self.place, last, worker, count, recompute, suffix)
            if len(fits):
                break
        return best

    def _fits(self, needs: StageNeeds, rows: slice, period: float) -> BoolArray:
        worker, replicas, recompute = self.worker[rows], self.replicas[rows], self.recompute[rows].astype(bool)
        stage = needs.index[self.place, self.last[rows]]
        sites = needs.line.site_arrays(worker, replicas)
        in_flight = (needs.workers - worker - 1) // replicas + 1
        fits = np.zeros(len(worker), dtype=bool)
        for redoes, costs in needs.costs.items():
            part = np.flatnonzero(recompute == redoes)
            if not len(part):
                continue
            part_sites = sites[part]
            limits = np.full(len(part), needs.workers)
            for memory in np.unique(part_sites.memory_bytes):
                for many in (False, True):
                    same_limit = (part_sites.memory_bytes == memory) & ((part_sites.replicas > 1) == many)
                    if same_limit.any() and not np.isinf(memory):
                        limits[same_limit] = needs.most_in_flight(memory, 1 + many, redoes)[stage[part][same_limit]]
            seconds = period_s(costs[stage[part]], part_sites, needs.line.cluster)
            fits[part] = (seconds <= period) & (in_flight[part] <= limits)
        return fits


def _count_workers(
    period_needs: PeriodNeeds, recompute: bool, stages: IntArray, suffix_starts: IntArray
) -> Iterator[tuple[BoolArray, IntArray]]:
    """Yields which stages may precede the suffixes, and their fewest workers: first one, then several."""
    needs = period_needs.needs
    memory = needs.line.memory_bytes
    workers_after = needs.workers - suffix_starts
    single, several = np.ones(len(stages), dtype=int), period_needs.several[recompute][stages]
    fits_single, fits_several = period_needs.fits_single[recompute][stages], np.ones(len(stages), dtype=bool)
    if memory is not None:
        fits_single &= workers_after + 1 <= needs.most_in_flight(memory, 1, recompute)[stages]
        max_in_flight = needs.most_in_flight(memory, 2, recompute)[stages]
        fits_several = (max_in_flight >= 2) | ((workers_after == 0) & (max_in_flight >= 1))
        several = np.maximum(several, np.maximum(workers_after - 1, 0) // np.maximum(max_in_flight - 1, 1) + 1)
    yield fits_single, single
    yield fits_several & (several <= suffix_starts), several


def _list_counts(needs: StageNeeds, suffix_starts: IntArray, counts: IntArray, exact: bool) -> list[IntArray]:
    if exact:
        return [np.where(suffix_starts >= counts, suffix_starts, 0)]
    options = [counts]
    if len(counts) and counts.max() > 1:
        options.append(counts + 1)
        for level in range(1, len(needs.line.cluster.levels)):
            options.append(suffix_starts - needs.line.start(level, np.maximum(suffix_starts - counts, 0)))
    return options


def _list_next_counts(workers: int, cycle: int) -> IntArray:
    """Returns, for each number up to `workers` + 1, the next count that divides a cycle; 0: any count does."""
    numbers = np.arange(workers + 2)
    counts = numbers[1:][cycle % numbers[1:] == 0]
    next_counts: IntArray = np.append(counts, 2 * workers + 2)[np.searchsorted(counts, numbers)]  # too many
    return next_counts


TOLERANCE = 1e-6
"""Relative tolerance of the lower bound."""

_COARSE_TOLERANCE = 1e-4  # if no plan reaches the bound

# Then periods above the bound are tried, each twice as far from it, and bisected.
_FIRST_EXCESS, _LAST_EXCESS = 1 / 256, 1e9
_STEPS = 3


@dataclass(frozen=True, eq=False)
class Bisection:
    """The search for a pipeline of at least two stages on a line of workers.

    Attributes:
        recompute: one of `recurrence.RECOMPUTE`.
        all_workers: leave no worker idle.
    """

    space: SearchSpace
    line: WorkerLine
    recompute: str = "never"
    all_workers: bool = False

    def best(self, cycle: int = 0) -> Plan | None:
        """Returns the fastest plan found, with the bound of all plans; None if none fits the memory.

        Args:
            cycle: all replica counts divide it; 0: any.
        """
        if self._nearest is None:
            return None
        low, high, best = self._nearest
        if cycle and best is not None:
            best = self._search_above(high.needs.for_period(best.slowest_stage_s, high), cycle)
        return None if best is None else replace(best, bound_s=min(low.period, best.slowest_stage_s))

    @cached_property
    def _nearest(self) -> tuple[PeriodNeeds, PeriodNeeds, Plan | None] | None:
        """The longest period known as too short, the next one, and the fastest plan found, whatever its cycle."""
        needs = StageNeeds.of(self.space, self.line, self.recompute)
        if needs.for_period(np.inf).fewest_workers()[0] > needs.workers:
            return None
        least_s = needs.work_s / sum(self.line.cluster.speeds) * (1 - 1e-12)
        low, high = self._bracket(needs.for_period(least_s))
        best: Plan | None = None
        for tolerance in (_COARSE_TOLERANCE, TOLERANCE):  # if no plan comes near the bound, a coarse one is enough
            low, high = self._narrow(low, high, tolerance)
            nearer = self._find_within(high, _list_next_counts(needs.workers, 0))
            best = nearer or best
            if nearer is None:
                break
        return low, high, best or self._search_above(high, 0)

    def _bracket(self, low: PeriodNeeds) -> tuple[PeriodNeeds, PeriodNeeds]:
        """Returns a shorter and a longer period; the needs of the longer one can be met."""
        needs, factor = low.needs, 1.02
        while True:
            high = needs.for_period(max(low.period * factor, needs.smallest_s), low)
            if high.fewest_workers()[0] <= needs.workers:
                return low, high
            low, factor = high, min(factor**2, 4.0)

    def _narrow(self, low: PeriodNeeds, high: PeriodNeeds, tolerance: float) -> tuple[PeriodNeeds, PeriodNeeds]:
        needs = low.needs
        while high.period - low.period > tolerance * high.period:
            middle = needs.for_period((low.period + high.period) / 2, low, high)
            if middle.fewest_workers()[0] <= needs.workers:
                high = middle
            else:
                low = middle
        return low, high

    def _search_above(self, bound: PeriodNeeds, cycle: int) -> Plan | None:
        needs = bound.needs
        next_count = _list_next_counts(needs.workers, cycle)
        low, excess, best = bound, _FIRST_EXCESS, None
        while best is None:
            if excess > _LAST_EXCESS:
                return self._find_within(needs.for_period(np.inf), next_count)
            high = needs.for_period(bound.period * (1 + excess), low)
            best, excess = self._find_within(high, next_count), 2 * excess
            low = low if best is not None else high
        for _ in range(1 if cycle else _STEPS):
            middle = needs.for_period((low.period + best.slowest_stage_s) / 2, low, high)
            candidate = self._find_within(middle, next_count)
            if candidate is None:
                low = middle
            else:
                high, best = middle, min(best, candidate, key=lambda plan: plan.slowest_stage_s)
        return best

    def _find_within(self, period: PeriodNeeds, next_count: IntArray) -> Plan | None:
        stages = latest_start_pipeline(period, self.all_workers, next_count)
        if stages is None:
            return None
        places, counts = period.needs.places, tuple(stage.replicas for stage in stages)
        return self.space.build_plan(
            tuple(int(places[stage.first]) for stage in stages[1:]),
            counts,
            order=self.line.take_last(sum(counts)),
            recompute=tuple(stage.recompute for stage in stages),
        )
