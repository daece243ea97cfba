"""The best plan of each family, over all orders of the workers that are searched (`planner.workers`)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from math import isqrt

import numpy as np

from pipedream.core.plan.plan import Plan
from pipedream.planner.cycles import shorten_cycle
from pipedream.planner.dynamic_program.pruning import prune_places, thin_out
from pipedream.planner.dynamic_program.recurrence import (
    DynamicProgram,
    Shortage,
    State,
    states_of_counts,
    straight_states,
    tie_break_key,
)
from pipedream.planner.tables.search_space import SearchSpace, with_positions
from pipedream.planner.workers import WorkerLine, list_orders

_States = tuple[State, ...]

_MAX_WORK = 5e8
"""Comparisons of costs in all searches for one plan: about ten seconds."""

_MAX_ORDERS = 5_000

_MAX_CYCLES_WORK = 3e8
"""Comparisons in searches for a plan that repeats itself sooner, if each had the states of the first one."""

_MAX_STATES = 3e8
"""Comparisons in one dynamic program, about ten seconds; above this, neighbouring layers are joined first."""

_MAX_ANY_COUNT = 256
"""Workers up to which a stage may have any number of replicas; with more, a power of two or three times one."""


@dataclass(frozen=True, eq=False)
class PipelineSearch:
    """The searches of a space, over several lines of workers.

    Attributes:
        lines: in the order in which they win ties.
        order_kind: in words; '' if there is only one line.
        describes_alternatives: as in `planner.search.PlanSearch`.
    """

    space: SearchSpace
    lines: tuple[WorkerLine, ...]
    order_kind: str
    describes_alternatives: bool = True
    _pipelines: dict[bool, Plan | None] = field(default_factory=dict, init=False)

    @classmethod
    def of(cls, space: SearchSpace) -> PipelineSearch:
        max_orders = int(min(max(_MAX_WORK // _estimate_work(space), 1), _MAX_ORDERS))
        orders, kind = list_orders(space.cluster, max_orders)
        return cls(space, tuple(WorkerLine.of(space.cluster, order, space.terms) for order in orders), kind)

    @property
    def workers(self) -> int:
        return self.space.cluster.workers

    @cached_property
    def coarse_space(self) -> SearchSpace:
        """The space in which pipelines of any shape are searched: with fewer places to cut if it is too large."""
        if _estimate_work(self.space) <= _MAX_STATES:
            return self.space
        groups = max(isqrt(int(_MAX_STATES / _count_states(self.workers))) - 1, 2)
        return replace(with_positions(self.space, thin_out(self.space, groups)), is_complete=False)

    @property
    def optimality(self) -> str:
        return "best found" if self.coarse_space is not self.space or self.space.spare_bytes else "optimal"

    @property
    def order_note(self) -> str:
        if self.space.cluster.is_flat:
            return ""
        return f" on consecutive workers{f' {self.order_kind}' if self.order_kind else ''}"

    def best_single_stage(self, counts: Iterable[int]) -> Plan | None:
        """Returns the fastest plan of one stage; ties go to the first count."""
        best: tuple[float, int, WorkerLine, bool] | None = None
        end = len(self.space.profile.layers)
        forward_s, backward_s = self.space.passes_s(0, end)
        tried = np.array(list(counts))
        sites = [line.site_list(self.workers - tried, tried) for line in self.lines]
        for number, count in enumerate(tried.tolist()):
            for line, row in zip(self.lines, sites, strict=True):
                site, most = row[number], row[number].memory_bytes
                for recompute in self.space.choices.recomputing:
                    if most is not None and self.space.need_bytes(0, end, 1, 0, recompute, count) > most:
                        continue
                    passes_s = forward_s, backward_s + forward_s if recompute else backward_s
                    seconds = float(self.space.period_s(passes_s, 0, end, site))
                    if best is None or seconds < best[0]:
                        best = seconds, count, line, recompute
                    break
        if best is None:
            return None
        seconds, count, line, recompute = best
        return replace(
            self.space.build_plan((), (count,), order=line.take_last(count), recompute=(recompute,)), bound_s=seconds
        )

    def best_pipeline(self, all_workers: bool) -> Plan | None:
        """Returns the best pipeline of at least two stages in `coarse_space`.

        Its cycle is one that can be proved, if possible (`planner.cycles`).
        """
        if all_workers not in self._pipelines:
            search = partial(self._find_pipeline, all_workers)
            plan = search()
            if plan is not None:
                tried = max(int(_MAX_CYCLES_WORK // _estimate_work(self.coarse_space)), 1)
                plan = shorten_cycle(plan, self.workers, search, tried)
            if plan is not None and self.coarse_space is not self.space:
                fine = self.best_with_counts(plan.replicas)  # the same replicas, cut between any two layers
                plan = min((plan, fine or plan), key=tie_break_key)
            self._pipelines[all_workers] = plan
        return self._pipelines[all_workers]

    def _find_pipeline(self, all_workers: bool, cycle: int = 0) -> Plan | None:
        return self._find_best(self.coarse_space, *self._list_states(all_workers, cycle), allow_single_stage=False)

    @cached_property
    def best_straight(self) -> Plan | None:
        """The fastest straight pipeline of at least two stages in `coarse_space`."""
        longest = min(len(self.coarse_space.positions) - 1, self.workers)
        if longest < 2:
            return None
        return self._find_best(self.coarse_space, straight_states(longest), None, allow_single_stage=False)

    def best_with_counts(self, counts: tuple[int, ...]) -> Plan | None:
        if len(counts) == 1:
            return self.best_single_stage(counts)
        starts = ((sum(counts), counts[0]),)
        return self._find_best(self.space, states_of_counts(counts), starts, allow_single_stage=True)

    def shortage_of_pipelines(self, all_workers: bool) -> Shortage:
        return self._find_shortage(self.coarse_space, *self._list_states(all_workers), allow_single_stage=False)

    def shortage_of_counts(self, counts: tuple[int, ...]) -> Shortage:
        starts = ((sum(counts), counts[0]),)
        return self._find_shortage(self.space, states_of_counts(counts), starts, allow_single_stage=True)

    def _list_states(self, all_workers: bool, cycle: int = 0) -> tuple[_States, _States | None]:
        counts = [count for count in _list_counts(self.workers) if not cycle % count]
        states = tuple((w, count) for w in range(1, self.workers + 1) for count in counts if count <= w)
        return states, tuple(state for state in states if state[0] == self.workers) if all_workers else None

    def _build_programs(
        self, space: SearchSpace, states: _States, starts: _States | None, allow_single_stage: bool
    ) -> Iterable[DynamicProgram]:
        return (DynamicProgram(space, states, starts, allow_single_stage, line) for line in self.lines)

    def _find_best(
        self,
        space: SearchSpace,
        states: tuple[State, ...],
        starts: tuple[State, ...] | None,
        *,
        allow_single_stage: bool,
    ) -> Plan | None:
        programs = self._build_programs(space, states, starts, allow_single_stage)
        plans = [plan for program in programs if (plan := prune_places(program).best()) is not None]
        best = min(plans, key=tie_break_key, default=None)  # ties go to the first program
        return None if best is None else replace(best, bound_s=best.slowest_stage_s)

    def _find_shortage(
        self,
        space: SearchSpace,
        states: tuple[State, ...],
        starts: tuple[State, ...] | None,
        *,
        allow_single_stage: bool,
    ) -> Shortage:
        programs = self._build_programs(space, states, starts, allow_single_stage)
        return min((prune_places(program).shortage for program in programs), key=lambda short: short.missing_bytes)


def _estimate_work(space: SearchSpace) -> float:
    return _count_states(space.cluster.workers) * len(space.positions) ** 2


def _count_states(workers: int) -> float:
    return float(sum(workers + 1 - count for count in _list_counts(workers)))


def _list_counts(workers: int) -> list[int]:
    """Returns the numbers of replicas that a stage may have."""
    if workers <= _MAX_ANY_COUNT:
        return list(range(1, workers + 1))
    return [count for count in range(1, workers + 1) if count & -count in (count, count // 3)]
