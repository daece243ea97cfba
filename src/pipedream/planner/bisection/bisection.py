"""Pipelines of many layers on many workers: bisection over the period, where the dynamic program has too many states.

Two questions about a period, both answered from the output backwards:

- **lower bound**: with the fewest workers that a stage needs wherever it stands (`planner.bisection.lower_bounds`),
  how few run the layers from each place on? Fewer behind a stage are never worse for it, for then it holds less in
  flight. If the model takes more than there are, no pipeline on consecutive workers of the line is as fast; that is
  the proof.
- **plan**: with the true seconds of where each stage stands (`planner.bisection.latest_start`), what is the last
  worker that a suffix can begin at?

On one level of like workers without latency the two agree, and the plan is optimal to the tolerance. On several levels
a suffix that begins earlier may stand better, which is hardly tried: the gap between the two is printed with the plan.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from pipedream.core.plan.plan import Plan
from pipedream.planner.bisection.feasibility import Needs, Period
from pipedream.planner.bisection.latest_start import latest
from pipedream.planner.tables.search_space import Space
from pipedream.planner.workers.worker_line import WorkerLine

__all__ = ["TOLERANCE", "Bisection"]

TOLERANCE = 1e-6
"""Of the lower bound, relative."""

_COARSE = 1e-4  # the same, where no plan reaches it

_FIRST_EXCESS, _LAST_EXCESS = 1 / 256, 1e9  # over the bound, where the plan does not reach it; each time twice as far
_STEPS = 3  # of the plan's own bisection then


@dataclass(frozen=True, eq=False)
class Bisection:
    """Pipelines of two stages or more on a line, replicated as they may be.

    Attributes:
        space: what each stage costs.
        line: of the workers.
        recompute: one of `planner.dynamic_program.recurrence.RECOMPUTE`.
        all_workers: none is left without work.
    """

    space: Space
    line: WorkerLine
    recompute: str = "never"
    all_workers: bool = False

    def best(self) -> Plan | None:
        """Returns the fastest plan found, with its bound; None where none fits the memory."""
        needs = Needs.of(self.space, self.line, self.recompute)
        if needs.at(np.inf).fewest()[0] > needs.workers:
            return None
        least_s = needs.work_s / sum(self.line.cluster.speeds) * (1 - 1e-12)
        low, high = self._bracket(needs.at(least_s))
        found: Plan | None = None
        for tolerance in (_COARSE, TOLERANCE):  # where no plan comes near the bound, it need not be known well
            low, high = self._narrowed(low, high, tolerance)
            nearer = self._plan(high)
            found = nearer or found
            if nearer is None:
                break
        found = found or self._nearest(high)
        return None if found is None else replace(found, bound_s=min(low.period, found.slowest_stage_s))

    def _bracket(self, low: Period) -> tuple[Period, Period]:
        """Returns two periods, of which the longer one's needs are met, from one that may be too short."""
        needs, factor = low.needs, 1.02
        while True:
            high = needs.at(max(low.period * factor, needs.smallest_s), low)
            if high.fewest()[0] <= needs.workers:
                return low, high
            low, factor = high, min(factor**2, 4.0)

    def _narrowed(self, low: Period, high: Period, tolerance: float) -> tuple[Period, Period]:
        """Bisects between a period whose needs are not met and one whose are."""
        needs = low.needs
        while high.period - low.period > tolerance * high.period:
            middle = needs.at((low.period + high.period) / 2, low, high)
            if middle.fewest()[0] <= needs.workers:
                high = middle
            else:
                low = middle
        return low, high

    def _nearest(self, bound: Period) -> Plan | None:
        """The fastest plan that bisection above the bound finds."""
        needs = bound.needs
        low, excess, best = bound, _FIRST_EXCESS, None
        while best is None:
            if excess > _LAST_EXCESS:
                return self._plan(needs.at(np.inf))
            high = needs.at(bound.period * (1 + excess), low)
            best, excess = self._plan(high), 2 * excess
            low = low if best is not None else high
        for _ in range(_STEPS):
            middle = needs.at((low.period + best.slowest_stage_s) / 2, low, high)
            found = self._plan(middle)
            if found is None:
                low = middle
            else:
                high, best = middle, min(best, found, key=lambda plan: plan.slowest_stage_s)
        return best

    def _plan(self, period: Period) -> Plan | None:
        stages = latest(period, self.all_workers)
        if stages is None:
            return None
        places, counts = period.needs.places, tuple(stage.replicas for stage in stages)
        return self.space.plan(
            tuple(int(places[stage.first]) for stage in stages[1:]),
            counts,
            order=self.line.taken(sum(counts)),
            recompute=tuple(stage.recompute for stage in stages),
        )
