"""The lines that are searched, and the best plan of each family over all of them.

Workers and machines that are alike stand in the cluster's order; of unlike ones several orders are tried
(`planner.workers.line_orders`): all, up to symmetry, where they are few enough for the size of the model.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np

from pipedream.core.plan.plan import Plan
from pipedream.planner.bisection.bisection import Bisection
from pipedream.planner.dynamic_program.pruning import narrowed
from pipedream.planner.dynamic_program.recurrence import Pipelines, State, of_counts, rank, replicated, straights
from pipedream.planner.dynamic_program.shortage import Shortage
from pipedream.planner.tables.search_space import Space
from pipedream.planner.workers.line_orders import Orders
from pipedream.planner.workers.worker_line import WorkerLine

__all__ = ["PipelineSearch"]

_MOST_WORK = 5e8
"""Comparisons of costs in all searches of one plan: about ten seconds."""

_MOST_ORDERS = 5_000

_MOST_STATES = 3e8
"""Comparisons of one dynamic program; a larger one gives way to bisection."""


@dataclass(frozen=True, eq=False)
class PipelineSearch:
    """The searches of a space over its lines.

    Attributes:
        space: what each stage costs.
        recompute: see `Pipelines`.
        lines: in the order in which they win ties.
        kind: of orders, in words; '' where there is but one.
    """

    space: Space
    recompute: str
    lines: tuple[WorkerLine, ...]
    kind: str

    @classmethod
    def of(cls, space: Space, recompute: str = "never") -> PipelineSearch:
        """Returns the lines of a space's cluster."""
        orders = Orders.of(space.cluster, int(min(max(_MOST_WORK // _work(space), 1), _MOST_ORDERS)))
        return cls(space, recompute, tuple(WorkerLine.of(space.cluster, order) for order in orders.orders), orders.kind)

    @property
    def workers(self) -> int:
        """All workers of the cluster."""
        return self.space.cluster.workers

    @property
    def is_large(self) -> bool:
        """There are too many states for the dynamic program over replicated pipelines."""
        return _work(self.space) > _MOST_STATES

    @property
    def best(self) -> str:
        """What a pipeline found is."""
        return "best found" if self.is_large or self.space.spare_bytes else "optimal"

    @property
    def where(self) -> str:
        """The space that is searched, in words, where that is not every plan."""
        if self.space.cluster.is_flat:
            return ""
        return f" on consecutive workers{f' {self.kind}' if self.kind else ''}"

    def whole(self, counts: Iterable[int]) -> Plan | None:
        """Returns the fastest plan of one stage on so many workers, of equals the first; None where none fits."""
        best: tuple[float, int, WorkerLine, bool] | None = None
        end = len(self.space.profile.layers)
        forward_s, backward_s = self.space.passes_s(0, end)
        tried = np.array(list(counts))
        sites = [line.each(self.workers - tried, tried) for line in self.lines]
        for number, count in enumerate(tried.tolist()):
            for line, row in zip(self.lines, sites, strict=True):
                site, most = row[number], row[number].memory_bytes
                for again in {"never": (False,), "auto": (False, True), "always": (True,)}[self.recompute]:
                    if most is not None and self.space.need_bytes(0, end, 1, 0, again, count) > most:
                        continue
                    passes_s = forward_s, backward_s + forward_s if again else backward_s
                    seconds = float(self.space.period_s(passes_s, 0, end, site))
                    if best is None or seconds < best[0]:
                        best = seconds, count, line, again
                    break
        if best is None:
            return None
        seconds, count, line, again = best
        return replace(self.space.plan((), (count,), order=line.taken(count), recompute=(again,)), bound_s=seconds)

    def pipeline(self, all_workers: bool) -> Plan | None:
        """Returns the best pipeline of at least two stages, or the best that bisection finds; None where none fits."""
        if self.is_large:
            tried = (Bisection(self.space, line, self.recompute, all_workers).best() for line in self.lines)
            found = [plan for plan in tried if plan is not None]
            best = min(found, key=rank, default=None)
            return None if best is None else replace(best, bound_s=min(plan.bound_s for plan in found))
        return self._best(*self._states(all_workers), whole=False)

    def straight(self) -> Plan | None:
        """Returns the fastest straight pipeline of at least two stages; None where there is none, or none fits, and
        in large searches, where it would take longer than all else."""
        longest = min(len(self.space.positions) - 1, self.workers)
        return self._best(straights(longest), None, whole=False) if longest > 1 and not self.is_large else None

    def of_counts(self, counts: tuple[int, ...]) -> Plan | None:
        """Returns the best plan with these replicas of its stages; None where none fits."""
        return self._best(of_counts(counts), ((sum(counts), counts[0]),), whole=True)

    def shortage_of_pipelines(self, all_workers: bool) -> Shortage:
        """Returns what is in the way of `pipeline`, where there is none; in large searches of a straight one."""
        if self.is_large:
            return self._shortage(straights(min(len(self.space.positions) - 1, self.workers)), None, whole=False)
        return self._shortage(*self._states(all_workers), whole=False)

    def shortage_of_counts(self, counts: tuple[int, ...]) -> Shortage:
        """Returns what is in the way of `of_counts`, where there is none."""
        return self._shortage(of_counts(counts), ((sum(counts), counts[0]),), whole=True)

    def _states(self, all_workers: bool) -> tuple[tuple[State, ...], tuple[State, ...] | None]:
        states = replicated(self.workers)
        return states, tuple(state for state in states if state[0] == self.workers) if all_workers else None

    def _each(self, states: tuple[State, ...], starts: tuple[State, ...] | None, whole: bool) -> Iterable[Pipelines]:
        return (narrowed(Pipelines(self.space, states, starts, whole, line, self.recompute)) for line in self.lines)

    def _best(self, states: tuple[State, ...], starts: tuple[State, ...] | None, *, whole: bool) -> Plan | None:
        found = [plan for one in self._each(states, starts, whole) if (plan := one.best()) is not None]
        best = min(found, key=rank, default=None)  # of equals that of the first line
        return None if best is None else replace(best, bound_s=best.slowest_stage_s)

    def _shortage(self, states: tuple[State, ...], starts: tuple[State, ...] | None, *, whole: bool) -> Shortage:
        return min((one.shortage for one in self._each(states, starts, whole)), key=lambda short: short.missing_bytes)


def _work(space: Space) -> float:
    return space.cluster.workers**2 / 2 * len(space.positions) ** 2
