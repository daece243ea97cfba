"""Searches the stages for one method: the fastest in simulation, or with the fastest slowest stage."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, partial
from math import inf
from typing import Any

from pipedream import planner, schedules
from pipedream.core.errors import PipelineError, PlanError, ShortageError
from pipedream.core.model.profile import Profile
from pipedream.core.plan.choices import Choices
from pipedream.core.plan.plan import Plan
from pipedream.core.plan.plan_costs import NO_GAP
from pipedream.core.progress import progress
from pipedream.core.schedule.occupancy import MethodProperties
from pipedream.plan_request import PlanRequest
from pipedream.planner.comparison import MEASURED_SHARE
from pipedream.planner.search import list_compositions
from pipedream.planner.tables.search_space import apply_depth
from pipedream.workflows.methods import MAX_SIMULATED, adapt_plan_to_method, occupancy_of, space_of

_ALL_COUNTS_UP_TO = 8  # workers; at most 128 replica counts


@dataclass(frozen=True, eq=False)
class StageSearch:
    """Plans for a method that leaves the stages to the planner."""

    profile: Profile
    request: PlanRequest
    _searches: dict[int, planner.PlanSearch] = field(default_factory=dict)

    def compare(self, score_plan: Callable[[Plan], planner.Score], rival_s: float = inf) -> planner.Comparison:
        """Returns the fastest plan by simulation; or the planner's best, if the request does not ask for simulations.

        `rival_s` as in `planner.compare_by_simulation`.
        """
        request, workers = self.request, self.request.workers_and_links.workers
        if not self._is_simulated:
            with progress("planning"):
                plan = self.plan_best(request.shape)
            return compare_alone(plan, request)
        score_plan = cache(score_plan)
        rows, refused = self._plan_finalists(score_plan, rival_s)
        # A profile of unknown minibatch size has one sample.
        batch = self.profile.batch
        possible = [row for row in rows if batch == 1 or row[1].microbatches <= batch] or rows
        try:
            comparison = planner.compare_by_simulation(possible, score_plan, refused, rival_s)
        except PlanError:  # none can be simulated
            return planner.Comparison(rows[0][1], (rows[0][0],))
        if comparison.candidates[0].why:
            return comparison
        ties = self.profile.ties_in_words() if workers > 1 else ""
        note = "; ".join([comparison.fastest_in_words(), *([ties] if ties else [])])
        bound_s = min(rows[0][1].bound_s, comparison.plan.slowest_stage_s)
        return replace(comparison, plan=replace(comparison.plan, note=note, bound_s=bound_s))

    def plan_best(self, shape: str | tuple[int, ...], link_factor: float = 1.0, limit_s: float = inf) -> Plan:
        """Returns the plan with the fastest slowest stage, with the microbatches of the method if none are given.

        `limit_s` as in `planner.PlanSearch.best`.
        """
        microbatches, is_over = self.request.microbatches, False
        try:
            plan = self.plan_with_microbatches(microbatches or 1, shape, link_factor, limit_s)
        except ShortageError:
            if microbatches is not None or not self._method.splits_minibatch:
                raise
            # Whole minibatches do not fit; those that the method splits may.
            plan, is_over = self._without_memory.plan_with_microbatches(1, shape, link_factor), True
        is_split = microbatches is not None and self._method.splits_minibatch
        if is_split and self._is_automatic(shape) and max(plan.replicas) > (microbatches or 1):
            # Each replica takes part in each update, so a stage has at most as many as a minibatch has parts.
            plan = self._plan_for_few_microbatches(microbatches or 1, one_stage=shape == "any")
        adapt = partial(adapt_plan_to_method, self.profile, self._choices, self.request.schedule)
        plan = adapt(plan, microbatches)
        limit = self.profile.batch if self.profile.batch > 1 else plan.microbatches  # 1: perhaps unknown
        is_over |= plan.first_stage_over_memory is not None or plan.microbatches > limit
        if microbatches is not None or not is_over:
            return plan
        m = max(min(plan.microbatches, limit), *plan.replicas)  # again, with those of the method
        return adapt(self.plan_with_microbatches(m, shape, link_factor), m)

    def _plan_finalists(
        self, score_plan: Callable[[Plan], planner.Score], rival_s: float
    ) -> tuple[list[tuple[planner.Candidate, Plan]], list[planner.Candidate]]:
        """Returns different plans of several searches, and the searches that failed.

        Further pipelines are left out if the first search proves them slower than `rival_s`, and those that send less
        if the first plan's messages cost nothing. Those slower than a simulated pipeline lack their depth and bytes.
        """
        request = self.request
        assert isinstance(request.shape, str), "an automatic shape is a word"
        workers = request.workers_and_links.workers
        finalists = planner.list_finalists(request.shape, self.profile, workers, request.all_workers)
        rows: dict[tuple[Any, ...], tuple[planner.Candidate, Plan]] = {}
        refused: list[planner.Candidate] = []
        errors: list[PipelineError] = []
        bound_s, limit_s, reaches_bound = 0.0, inf, False
        with progress("planning", len(finalists)) as advance:
            for finalist in finalists:
                advance()
                is_pipeline = finalist.shape not in ("any", "data-parallel") and not finalist.shape.isdecimal()
                if is_pipeline and bound_s > rival_s * (1 + NO_GAP):
                    continue
                if finalist.link_factor != 1 and reaches_bound:
                    continue
                is_known = any(len(plan.stages) > 1 for _, plan in rows.values())  # the fastest of all is a pipeline
                if finalist == planner.SearchVariant("pipeline") and is_known:
                    continue
                try:
                    plan = self.plan_best(*finalist, limit_s if is_pipeline else inf)
                except PipelineError as error:
                    errors.append(error)
                    m = request.microbatches or 1
                    refused.append(planner.Candidate(request.schedule, m, "", 0, str(finalist), why=str(error)))
                    continue
                candidate = make_candidate(plan, str(finalist))
                if is_pipeline and limit_s < inf:
                    least_s = max(candidate.least_s, MEASURED_SHARE * plan.slowest_stage_s)
                    candidate = replace(candidate, least_s=least_s)
                key = plan.microbatches, plan.stages, plan.in_flight, plan.update_delay, plan.worker_order
                rows.setdefault(key, (candidate, plan))
                # A delay of updates, or the runtime's own time, may hide sums that the search counts.
                hides_sums = request.update_delay or plan.runtime or plan.costs.on_gpus
                if hides_sums or finalist not in (finalists[0], planner.SearchVariant("pipeline")):
                    continue
                simulated_s = inf
                with suppress(PipelineError):
                    if max(candidate.least_s, plan.bound_s) <= rival_s:
                        simulated_s = score_plan(plan).period_s
                if finalist == finalists[0]:
                    bound_s, reaches_bound = plan.bound_s, simulated_s <= plan.slowest_stage_s * (1 + NO_GAP)
                if plan.bound_s and len(plan.stages) > 1:
                    limit_s = min(rival_s, simulated_s) * (1 + NO_GAP) / MEASURED_SHARE
        try:
            if copied := self._copy_over_sites():
                rows.setdefault((copied.worker_order,), (make_candidate(copied, "a copy on each site"), copied))
        except PipelineError as error:
            errors.append(error)
        if not rows:
            shortages = [error for error in errors if isinstance(error, ShortageError)]
            raise min(shortages, key=lambda error: error.need_bytes) if shortages == errors else errors[0]
        return [*rows.values()], refused

    def _copy_over_sites(self) -> Plan | None:
        """Plans for one component of the outermost level, and copies the plan to the others.

        Only sums then cross sites, which pays off if weights are averaged rarely. Replica j of each stage is in site j
        modulo the number of sites, so a minibatch stays within its site.
        """
        request, cluster = self.request, self.request.workers_and_links
        *levels, outermost = cluster.levels
        if not (levels and request.choices.sums.averages_weights) or outermost.sizes or cluster.kinds:
            return None
        sites, site = outermost.width, replace(cluster, levels=tuple(levels))
        plan = StageSearch(self.profile, replace(request, cluster=site)).plan_best("pipeline")
        order: list[int] = []
        for stage in plan.stages:
            first = len(order) // sites
            site_workers = range(first, first + stage.replicas)
            order += [number * site.workers + worker for worker in site_workers for number in range(sites)]
        stages = tuple(replace(stage, replicas=sites * stage.replicas) for stage in plan.stages)
        parts = plan.microbatches
        space = space_of(self.profile, cluster, request.choices, request.schedule, parts)
        choices = space.choices.of_plan([stage.replicas for stage in stages])
        plan = replace(plan, cluster=cluster, stages=stages, worker_order=tuple(order), choices=choices)
        plan = apply_depth(space, plan, request.in_flight)
        return adapt_plan_to_method(self.profile, request.choices, request.schedule, plan, request.microbatches)

    def plan_with_microbatches(
        self, parts: int, shape: str | tuple[int, ...], link_factor: float = 1.0, limit_s: float = inf
    ) -> Plan:
        request = self.request
        if request.cuts is None:
            return self._search(parts).best(shape, request.in_flight, link_factor, limit_s)
        return planner.manual_plan(
            self.profile,
            request.workers_and_links,
            request.cuts,
            None if request.shape in planner.SHAPES else planner.parse_counts(request.shape),
            occupancy=occupancy_of(request.schedule, parts),
            microbatches=parts,
            in_flight=request.in_flight,
            update_delay=request.update_delay,
            choices=self._choices,
        )

    def _plan_for_few_microbatches(self, limit: int, *, one_stage: bool) -> Plan:
        """Returns the fastest plan whose stages have at most `limit` replicas."""
        workers = self.request.workers_and_links.workers
        shapes = _list_counts(workers, limit)
        if not self.request.all_workers:
            shapes += [(count,) for count in range(1, limit + 1)] + [(1,) * stages for stages in range(2, workers)]
        plans, refused = [], None
        for counts in dict.fromkeys(shapes):
            if one_stage or len(counts) > 1:
                try:
                    plans.append(self.plan_with_microbatches(limit, counts))
                except PlanError as error:
                    refused = error
        if not plans:
            raise refused or PlanError(f"no plan gives each stage at most {limit} workers; split minibatches further")
        return min(plans, key=lambda plan: (plan.slowest_stage_s, len(plan.stages), plan.workers))

    @property
    def _is_simulated(self) -> bool:
        request = self.request
        is_small = request.workers_and_links.workers <= MAX_SIMULATED
        return request.strategy == "simulate" and self._is_automatic(request.shape) and is_small

    def _is_automatic(self, shape: str | tuple[int, ...]) -> bool:
        return self.request.cuts is None and shape in ("any", "pipeline")

    @cached_property
    def _method(self) -> MethodProperties:
        return schedules.properties_of(self.request.schedule)

    @cached_property
    def _without_memory(self) -> StageSearch:
        cluster = self.request.workers_and_links.without_memory_limits()
        return StageSearch(self.profile, replace(self.request, cluster=cluster))

    @property
    def _choices(self) -> Choices:
        choices = self.request.choices
        return choices.choosing(recompute="always") if self._method.recomputes else choices

    def _search(self, parts: int) -> planner.PlanSearch:
        if parts not in self._searches:
            where = self.profile, self.request.workers_and_links, self._choices
            space = space_of(*where, self.request.schedule, parts, update_delay=self.request.update_delay)
            self._searches[parts] = planner.PlanSearch(space, self.request.all_workers)
        return self._searches[parts]


def make_candidate(plan: Plan, shape: str) -> planner.Candidate:
    """Returns a plan as a candidate that is not simulated yet."""
    method = schedules.properties_of(plan.schedule or "pipedream")
    candidate = planner.Candidate(plan.schedule, plan.microbatches, plan.depth_mode, max(plan.update_delay), shape)
    return planner.candidate_from_plan(candidate, plan, method)


def compare_alone(plan: Plan, request: PlanRequest) -> planner.Comparison:
    """Returns the comparison for a plan without alternatives."""
    shape = request.shape if isinstance(request.shape, str) else "-".join(map(str, request.shape))
    return planner.Comparison(plan, (make_candidate(plan, shape),))


def _list_counts(workers: int, limit: int) -> list[tuple[int, ...]]:
    """Lists replica counts that use all workers, up to `limit` each; of many workers, equal counts and a remainder."""
    if workers <= _ALL_COUNTS_UP_TO:
        return list_compositions(workers, limit)
    equal = range(1, limit + 1)
    return [(size,) * (workers // size) + ((workers % size,) if workers % size else ()) for size in equal]
