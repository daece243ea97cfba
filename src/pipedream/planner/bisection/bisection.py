"""Bisection over the period, for pipelines too long for the dynamic program.

Two questions about a period, both answered from the output backwards:

- **lower bound** (`planner.bisection.lower_bounds`): if each stage has the fewest workers that it needs wherever it is,
  how few run the layers from each place on? More than exist proves that no pipeline on consecutive workers is this
  fast: fewer workers after a stage are never worse for it, because it then holds less in flight.
- **plan** (`planner.bisection.latest_start`): with the true seconds of each position, what is the last worker at which
  the layers from each place on can begin?

On one level of identical workers without latency the two agree, up to the tolerance. On several levels, a suffix that
begins earlier may have a better position, which is rarely tried.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from pipedream.core.plan.plan import Plan
from pipedream.planner.bisection.feasibility import PeriodNeeds, StageNeeds
from pipedream.planner.bisection.latest_start import latest_start_pipeline
from pipedream.planner.tables.search_space import SearchSpace
from pipedream.planner.workers.worker_line import WorkerLine

TOLERANCE = 1e-6
"""Relative tolerance of the lower bound."""

_COARSE = 1e-4  # if no plan reaches the bound

# Then periods above it are tried, each twice as far, and bisected.
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

    def best(self) -> Plan | None:
        """Returns the fastest plan found, with its bound; None if none fits the memory."""
        needs = StageNeeds.of(self.space, self.line, self.recompute)
        if needs.for_period(np.inf).fewest_workers()[0] > needs.workers:
            return None
        least_s = needs.work_s / sum(self.line.cluster.speeds) * (1 - 1e-12)
        low, high = self._bracket(needs.for_period(least_s))
        best: Plan | None = None
        for tolerance in (_COARSE, TOLERANCE):  # if no plan comes near the bound, a coarse one is enough
            low, high = self._narrow(low, high, tolerance)
            nearer = self._plan(high)
            best = nearer or best
            if nearer is None:
                break
        best = best or self._search_above(high)
        return None if best is None else replace(best, bound_s=min(low.period, best.slowest_stage_s))

    def _bracket(self, low: PeriodNeeds) -> tuple[PeriodNeeds, PeriodNeeds]:
        """A shorter and a longer period; the needs of the longer one can be met."""
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

    def _search_above(self, bound: PeriodNeeds) -> Plan | None:
        needs = bound.needs
        low, excess, best = bound, _FIRST_EXCESS, None
        while best is None:
            if excess > _LAST_EXCESS:
                return self._plan(needs.for_period(np.inf))
            high = needs.for_period(bound.period * (1 + excess), low)
            best, excess = self._plan(high), 2 * excess
            low = low if best is not None else high
        for _ in range(_STEPS):
            middle = needs.for_period((low.period + best.slowest_stage_s) / 2, low, high)
            candidate = self._plan(middle)
            if candidate is None:
                low = middle
            else:
                high, best = middle, min(best, candidate, key=lambda plan: plan.slowest_stage_s)
        return best

    def _plan(self, period: PeriodNeeds) -> Plan | None:
        stages = latest_start_pipeline(period, self.all_workers)
        if stages is None:
            return None
        places, counts = period.needs.places, tuple(stage.replicas for stage in stages)
        return self.space.plan(
            tuple(int(places[stage.first]) for stage in stages[1:]),
            counts,
            order=self.line.taken(sum(counts)),
            recompute=tuple(stage.recompute for stage in stages),
        )
