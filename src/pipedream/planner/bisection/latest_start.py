"""A pipeline within a period whose stages begin as late on the line as they can, with the true seconds of each site."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from pipedream.planner.arrays import BoolArray, IntArray
from pipedream.planner.bisection.feasibility import PeriodNeeds, StageNeeds
from pipedream.planner.bisection.lower_bounds import period_s

_TRIED = 128  # candidates to try at once, the most promising first
_ROUNDS = 4


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


def latest_start_pipeline(period_needs: PeriodNeeds, all_workers: bool) -> list[PlacedStage] | None:
    """Returns the stages of a pipeline within a period (up to rounding), or None if none is found.

    Several suffixes are kept for each place: the one that begins last, and, for each level, the one that begins last at
    the start of a component.
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
            period_needs, starts, i, int(needed_before[i]), all_workers and i == 0
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
        cls, period_needs: PeriodNeeds, starts: IntArray, i: int, needed_before: int, exact: bool
    ) -> _StageCandidates:
        """Those of place i that leave `needed_before` workers; if `exact`, they begin at the first one."""
        needs = period_needs.needs
        ends = np.flatnonzero((needs.index[i] >= 0) & (starts.max(axis=0) > needed_before))
        stages = needs.index[i, ends]
        feasible = period_needs.feasible[stages]
        ends, stages = ends[feasible], stages[feasible]
        rows: list[list[IntArray]] = []
        for suffix, row in enumerate(starts):
            fronts = row[ends]
            distinct = (fronts > needed_before) & ((suffix == 0) | (fronts != starts[0][ends]))
            for recompute in needs.costs:
                for chosen, counts in _count_workers(period_needs, recompute, stages, fronts):
                    some = np.flatnonzero(distinct & chosen)
                    for replicas in _list_counts(needs, fronts[some], counts[some], exact):
                        suffixes, redoes = np.full(len(some), suffix), np.full(len(some), int(recompute))
                        rows.append([ends[some], suffixes, fronts[some] - replicas, replicas, redoes])
        columns = [np.concatenate(column) for column in zip(*rows, strict=True)]
        fine = columns[2] >= needed_before
        order = np.argsort(-columns[2][fine], kind="stable")[: _TRIED * _ROUNDS]
        return cls(i, *(column[fine][order] for column in columns))

    def best(self, needs: StageNeeds, period: float) -> list[PlacedStage | None]:
        """For each level, the one that fits and begins last at a component's start."""
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

    def _fits(self, needs: StageNeeds, part: slice, period: float) -> BoolArray:
        worker, replicas, recompute = self.worker[part], self.replicas[part], self.recompute[part].astype(bool)
        stage = needs.index[self.place, self.last[part]]
        sites = needs.line.site_arrays(worker, replicas)
        in_flight = (needs.workers - worker - 1) // replicas + 1
        fits = np.zeros(len(worker), dtype=bool)
        for redoes, costs in needs.costs.items():
            some = np.flatnonzero(recompute == redoes)
            if not len(some):
                continue
            here = sites[some]
            room = np.full(len(some), needs.workers)
            for memory in np.unique(here.memory_bytes):
                for many in (False, True):
                    alike = (here.memory_bytes == memory) & ((here.replicas > 1) == many)
                    if alike.any() and not np.isinf(memory):
                        room[alike] = needs.most_in_flight(memory, 1 + many, redoes)[stage[some][alike]]
            seconds = period_s(costs[stage[some]], here, needs.line.cluster.sums)
            fits[some] = (seconds <= period) & (in_flight[some] <= room)
        return fits


def _count_workers(
    period_needs: PeriodNeeds, recompute: bool, stages: IntArray, fronts: IntArray
) -> Iterator[tuple[BoolArray, IntArray]]:
    """Yields which stages may precede suffixes (from `fronts` on), and the fewest workers: one, then several."""
    needs = period_needs.needs
    memory = needs.line.memory_bytes
    after = needs.workers - fronts
    single, many = np.ones(len(stages), dtype=int), period_needs.several[recompute][stages]
    fits_one, fits_many = period_needs.alone[recompute][stages], np.ones(len(stages), dtype=bool)
    if memory is not None:
        fits_one &= after + 1 <= needs.most_in_flight(memory, 1, recompute)[stages]
        room = needs.most_in_flight(memory, 2, recompute)[stages]
        fits_many = (room >= 2) | ((after == 0) & (room >= 1))
        many = np.maximum(many, np.maximum(after - 1, 0) // np.maximum(room - 1, 1) + 1)
    yield fits_one, single
    yield fits_many & (many <= fronts), many


def _list_counts(needs: StageNeeds, fronts: IntArray, counts: IntArray, exact: bool) -> list[IntArray]:
    if exact:
        return [np.where(fronts >= counts, fronts, 0)]
    options = [counts]
    if len(counts) and counts.max() > 1:
        options.append(counts + 1)
        for level in range(1, len(needs.line.cluster.levels)):
            options.append(fronts - needs.line.start(level, np.maximum(fronts - counts, 0)))
    return options
