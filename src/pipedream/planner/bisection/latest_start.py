"""For a period: a pipeline whose suffixes begin as late on the line as they can, with the true seconds of each site."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from pipedream.planner.bisection.feasibility import Needs, Period
from pipedream.planner.bisection.lower_bounds import period_s

__all__ = ["Found", "latest"]

_TRIED = 128  # candidates for a place at once, the most promising first
_ROUNDS = 4  # of them, at most


@dataclass(frozen=True)
class Found:
    """A stage that was found: from place to place, on so many workers of the line from one on."""

    first: int
    last: int
    worker: int
    replicas: int
    recompute: bool
    behind: int = 0  # which of the suffixes kept at its end goes on


def latest(known: Period, all_workers: bool) -> list[Found] | None:
    """Returns the stages of a pipeline within a period, but for rounding, or None where none is found.

    From each place on several suffixes are kept: the one that begins last, and the one that begins last at the start of
    a component, for each level. Which are tried in front of them: of each stage and number of workers behind it the
    fewest workers that may do, one more, and as many as reach back to the start of a component. A suffix that leaves
    too few workers for the layers in front of it goes no further.
    """
    needs, period = known.needs, known.period * (1 + 1e-12)
    levels = len(needs.line.cluster.levels)
    end = len(needs.places) - 1
    starts = np.full((levels, end + 1), -1)  # the first worker of each suffix; -1: none
    starts[:, end] = needs.workers
    ahead = known.ahead()
    stages: list[list[Found | None]] = [[None] * (end + 1) for _ in range(levels)]
    for i in range(end - 1, -1, -1):
        candidates = _Candidates.before(known, starts, i, int(ahead[i]), all_workers and i == 0)
        for level, found in enumerate(candidates.best(needs, period)):
            if found is not None:
                starts[level, i], stages[level][i] = found.worker, found
    if starts[0, 0] < 0:
        return None
    chain: list[Found] = []
    place, level = 0, 0
    while place < end:
        stage = stages[level][place]
        assert stage is not None
        chain.append(stage)
        place, level = stage.last, stage.behind
    return chain


@dataclass(frozen=True, eq=False)
class _Candidates:
    """Stages that may begin at a place, as arrays, the one that begins last on the line in front; not too many."""

    place: int
    last: Any
    suffix: Any
    worker: Any
    replicas: Any
    again: Any

    @classmethod
    def before(cls, known: Period, starts: Any, i: int, ahead: int, exact: bool) -> _Candidates:
        """Returns those of a place that leave so many workers ahead; `exact`: that begin at the line's first one."""
        needs = known.needs
        ends = np.flatnonzero((needs.index[i] >= 0) & (starts.max(axis=0) > ahead))
        pairs = needs.index[i, ends]
        able = known.able[pairs]
        ends, pairs = ends[able], pairs[able]
        rows: list[list[Any]] = []
        for suffix, row in enumerate(starts):
            fronts = row[ends]
            distinct = (fronts > ahead) & ((suffix == 0) | (fronts != starts[0][ends]))
            for again in needs.pairs:
                for chosen, counts in _counts(known, again, pairs, fronts):
                    some = np.flatnonzero(distinct & chosen)
                    for replicas in _options(needs, fronts[some], counts[some], exact):
                        same = np.full(len(some), suffix), np.full(len(some), int(again))
                        rows.append([ends[some], same[0], fronts[some] - replicas, replicas, same[1]])
        columns = [np.concatenate(column) for column in zip(*rows, strict=True)]
        fine = columns[2] >= ahead
        order = np.argsort(-columns[2][fine], kind="stable")[: _TRIED * _ROUNDS]
        return cls(i, *(column[fine][order] for column in columns))

    def best(self, needs: Needs, period: float) -> list[Found | None]:
        """Returns, for each level, the one within the period and the memory that begins last at a component's start."""
        best: list[Found | None] = [None] * len(needs.line.cluster.levels)
        for begin in range(0, len(self.last), _TRIED):
            fits = np.flatnonzero(self._fits(needs, slice(begin, begin + _TRIED), period)) + begin
            for level in range(len(best)):
                aligned = fits[needs.line.start(level, self.worker[fits]) == self.worker[fits]]
                if best[level] is None and len(aligned):
                    k = int(aligned[0])
                    last, worker, count = (int(column[k]) for column in (self.last, self.worker, self.replicas))
                    again, behind = bool(self.again[k]), int(self.suffix[k])
                    best[level] = Found(self.place, last, worker, count, again, behind)
            if len(fits):
                break
        return best

    def _fits(self, needs: Needs, part: slice, period: float) -> Any:
        worker, replicas, again = self.worker[part], self.replicas[part], self.again[part].astype(bool)
        pair = needs.index[self.place, self.last[part]]
        sites = needs.line.sites(worker, replicas)
        held = (needs.workers - worker - 1) // replicas + 1
        fits = np.zeros(len(worker), dtype=bool)
        for way, pairs in needs.pairs.items():
            some = np.flatnonzero(again == way)
            if not len(some):
                continue
            here = sites[some]
            room = np.full(len(some), needs.workers)
            for memory in np.unique(here.memory_bytes):
                for many in (False, True):
                    alike = (here.memory_bytes == memory) & ((here.replicas > 1) == many)
                    if alike.any() and not np.isinf(memory):
                        room[alike] = needs.held(memory, 1 + many, way)[pair[some][alike]]
            seconds = period_s(pairs[pair[some]], here, needs.line.cluster.sums)
            fits[some] = (seconds <= period) & (held[some] <= room)
        return fits


def _counts(known: Period, again: bool, pairs: Any, fronts: Any) -> Iterator[tuple[Any, Any]]:
    """Yields which stages may run in front of suffixes, and on how many workers at least: on one, and on more."""
    needs = known.needs
    memory = needs.line.memory_bytes
    behind = needs.workers - fronts
    one, many = np.ones(len(pairs), dtype=int), known.more[again][pairs]
    fits_one, fits_many = known.alone[again][pairs], np.ones(len(pairs), dtype=bool)
    if memory is not None:
        fits_one &= behind + 1 <= needs.held(memory, 1, again)[pairs]
        room = needs.held(memory, 2, again)[pairs]
        fits_many = (room >= 2) | ((behind == 0) & (room >= 1))
        many = np.maximum(many, np.maximum(behind - 1, 0) // np.maximum(room - 1, 1) + 1)
    yield fits_one, one
    yield fits_many & (many <= fronts), many


def _options(needs: Needs, fronts: Any, counts: Any, exact: bool) -> list[Any]:
    """Counts of workers to try in front of suffixes: the fewest, one more, and up to the start of a component."""
    if exact:
        return [np.where(fronts >= counts, fronts, 0)]
    options = [counts]
    if len(counts) and counts.max() > 1:
        options.append(counts + 1)
        for level in range(1, len(needs.line.cluster.levels)):
            options.append(fronts - needs.line.start(level, np.maximum(fronts - counts, 0)))
    return options
