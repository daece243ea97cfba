"""What the stages of a space need on a line: how few workers for a period, and how much they may hold in flight."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from pipedream.planner.bisection.lower_bounds import Pairs, Relaxed, period_s
from pipedream.planner.tables.search_space import Space
from pipedream.planner.workers.worker_line import WorkerLine

__all__ = ["Needs", "Period"]


@dataclass(frozen=True, eq=False)
class Needs:
    """The stages of pipelines of two stages or more, in a table of places by places.

    Attributes:
        space, line: as given.
        places: indices of layers where a stage may begin or end.
        index: row of each stage in `pairs`, by its places; -1 where there is none.
        pairs: the stages, without and with (the key) doing their forward again.
    """

    space: Space
    line: WorkerLine
    places: Any
    index: Any
    pairs: dict[bool, Pairs]
    relaxed: Relaxed
    _held: dict[tuple[int, int, bool], Any] = field(default_factory=dict)

    @classmethod
    def of(cls, space: Space, line: WorkerLine, recompute: str) -> Needs:
        """Returns the needs of a space on a line. `recompute` is one of `recurrence.RECOMPUTE`."""
        places = np.array(space.positions)
        allowed = space.precede.copy()
        allowed[0, -1] = False
        index = np.full(allowed.shape, -1)
        index[allowed] = np.arange(allowed.sum())
        ways = {"never": (False,), "always": (True,), "auto": (False, True) if line.cluster.is_limited else (False,)}[
            recompute
        ]
        pairs = {again: Pairs.of(space, places, allowed, again) for again in ways}
        return cls(space, line, places, index, pairs, Relaxed(line))

    @property
    def workers(self) -> int:
        """All workers of the line."""
        return len(self.line.order)

    @property
    def work_s(self) -> float:
        """Seconds of the whole model on one worker of speed 1."""
        again = min(self.pairs)
        end = int(self.places[-1])
        forward_s, backward_s = self.space.passes_s(0, end)
        return float(forward_s * (1 + again) + backward_s + self.space.update_s(0, end))

    @property
    def smallest_s(self) -> float:
        """The least seconds above zero that a stage computes: where the search begins if nothing else is known."""
        compute_s = self.pairs[min(self.pairs)].compute_s
        above = compute_s[compute_s > 0]
        return float(above.min() if len(above) else 1.0) / (4 * self.workers * max(self.line.cluster.speeds))

    def at(self, period: float, low: Period | None = None, high: Period | None = None) -> Period:
        """Returns what a period needs; `low` and `high` are of a shorter and a longer one that are known."""
        alone, more = {}, {}
        fastest_s = period * max(self.line.cluster.speeds)  # of work, in a period
        for again, pairs in self.pairs.items():
            count = len(pairs.first)
            # A stage has at least the workers that its work takes, and leaves those that all other work takes.
            few = np.ceil(pairs.compute_s / fastest_s * (1 - 1e-12))
            rest = (self.work_s - self.pairs[min(self.pairs)].compute_s) / fastest_s
            useful = np.floor(self.workers - rest * (1 - 1e-12) + 1e-9).astype(int)
            alone[again] = self._alone_s[again] <= period
            least = np.maximum(few.astype(int), 2 if high is None else high.more[again])
            most = np.full(count, self.workers + 1) if low is None else low.more[again]
            more[again] = least
            if not np.isinf(period):
                more[again] = self.relaxed.least(pairs, period, least, most, useful)
        return Period(self, period, alone, more)

    @cached_property
    def _alone_s(self) -> dict[bool, Any]:
        how = self.line.cluster.sums
        return {again: period_s(pairs, self.relaxed.at(1), how) for again, pairs in self.pairs.items()}

    def held(self, memory_bytes: float, replicas: int, again: bool) -> Any:
        """Returns for each stage the most in flight that so many replicas have the memory for, at most all workers.

        Two replicas need the most, for their share of a minibatch is the largest, and as many as there are the least.
        """
        key = int(min(memory_bytes, 2**62)), replicas, again
        if key not in self._held:
            self._held[key] = self._most_held(memory_bytes, replicas, again)
        return self._held[key]

    def _most_held(self, memory_bytes: float, replicas: int, again: bool) -> Any:
        pairs, update_delay = self.pairs[again], self.space.update_delay if replicas > 1 else 0
        first, last = self.places[pairs.first], self.places[pairs.last]
        most = np.full(len(first), self.workers)
        if np.isinf(memory_bytes):
            return most
        low, high = np.zeros(len(first), dtype=int), most + 1  # it fits at `low`, and not at `high`
        while len(open_ := np.flatnonzero(high - low > 1)):
            middle = (low[open_] + high[open_]) // 2
            for held in np.unique(middle):
                some = open_[middle == held]
                need = self.space.need_bytes(first[some], last[some], int(held), update_delay, again, replicas)
                fits = need + self.space.spare_bytes <= memory_bytes
                low[some[fits]] = held
                high[some[~fits]] = held
        return low


@dataclass(frozen=True, eq=False)
class Period:
    """What a period needs.

    Attributes:
        needs: of the stages.
        period: in seconds.
        alone: which stages one worker runs within it, without and with (the key) doing their forward again.
        more: the fewest workers of each, 2 or more; one more than there are if none, or if they leave too few for
            the other layers.
    """

    needs: Needs
    period: float
    alone: dict[bool, Any]
    more: dict[bool, Any]

    @cached_property
    def able(self) -> Any:
        """Which stages some count of workers may run within it."""
        return np.any([self.alone[again] | (self.more[again] <= self.needs.workers) for again in self.needs.pairs], 0)

    def fewest(self) -> Any:
        """Returns the fewest workers that run the layers from each place on, a large number if they are too few."""
        needs, workers = self.needs, self.needs.workers
        memory = needs.line.memory_bytes
        far = self._far
        found = np.full(len(needs.places), far)
        found[-1] = 0
        tables = []
        for again in needs.pairs:
            rows = [np.where(self.alone[again], 1, far), np.where(self.more[again] > workers, far, self.more[again])]
            rows[0] = rows[0] if memory is not None else np.minimum(*rows)
            held = [needs.held(memory, count, again) for count in (1, max(workers, 2))] if memory is not None else []
            tables.append([self._square(row) for row in (*rows, *held)])
        for i in range(len(found) - 2, -1, -1):
            behind = found[i + 1 :]
            best = far
            for one, many, *held in tables:
                counts = one[i, i + 1 :]
                if held:
                    counts = np.where(behind + 1 <= held[0][i, i + 1 :], counts, far)
                    room = held[1][i, i + 1 :]
                    shared = np.maximum(many[i, i + 1 :], np.maximum(behind - 1, 0) // np.maximum(room - 1, 1) + 1)
                    counts = np.minimum(counts, np.where((room >= 2) | ((behind == 0) & (room >= 1)), shared, far))
                best = min(best, int((counts + behind).min()))
            found[i] = min(best, far)
        return found

    def ahead(self) -> Any:
        """Returns the fewest workers that run the layers up to each place, whatever their memory holds."""
        far = self._far
        ways = [
            np.where(self.alone[again], 1, np.where(self.more[again] > self.needs.workers, far, self.more[again]))
            for again in self.needs.pairs
        ]
        table = self._square(np.minimum.reduce(ways))
        found = np.full(len(self.needs.places), far)
        found[0] = 0
        for j in range(1, len(found)):
            found[j] = min(far, int((found[:j] + table[:j, j]).min()))
        return found

    @property
    def _far(self) -> int:
        """Stands for too many workers: more than there are, with room to be added up."""
        return 4 * self.needs.workers + 4

    def _square(self, row: Any) -> Any:
        table = np.append(row, self._far if row.dtype != bool else False)
        return table[self.needs.index]
