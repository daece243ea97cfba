"""Plans whose stages have meshes of their own, each with its simulation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import inf
from typing import Any

from pipedream import planner, schedules
from pipedream.core.errors import PipelineError
from pipedream.core.model.profile import Profile
from pipedream.core.plan.mesh import Mesh
from pipedream.core.plan.plan import Plan
from pipedream.core.units import format_seconds
from pipedream.plan_request import AUTO, PlanRequest
from pipedream.workflows.methods import MOST_SIMULATED, occupancy_of, takes_long

_SLOWER = (1.0, 2.0, 4.0, 16.0)  # of `Finalist`


def compare_mixed(
    profile: Profile,
    request: PlanRequest,
    meshes: Sequence[Mesh],
    score_plan: Callable[[Plan], planner.Score],
    best: planner.Comparison | None,
) -> Sequence[planner.Comparison]:
    """Returns the plans whose stages have meshes of their own; none where the request excludes them.

    Args:
        best: of the plans on one mesh; those that cannot be faster are not simulated.
    """
    if request.schedule == AUTO:  # that of the fastest plan on one mesh
        if best is None:
            return []
        request = replace(request, schedule=best.plan.schedule, microbatches=best.plan.microbatches)
    if request.shape in ("straight", "data-parallel") or request.strategy == "2bw":
        return []
    if schedules.layout_of(request.schedule) is not None or schedules.is_torch_csv(request.schedule):
        return []
    search = _MixedSearch(profile, request, meshes)
    flushes = schedules.properties_of(request.schedule).flushes
    simulates = is_simulated(request)
    rows: list[planner.Comparison] = []
    for plan, finalist in search.plan_finalists():
        candidate = planner.Candidate(
            plan.schedule,
            plan.microbatches,
            plan.depth_mode,
            max(plan.update_delay),
            finalist,
            mesh=_format_meshes(plan),
        )
        candidate = planner.candidate_from_plan(candidate, plan, flushes)
        least_s = min((rank_by_seconds(row)[0] for row in (*rows, *([best] if best else []))), default=inf)
        if simulates and candidate.bound_s >= least_s:
            candidate = replace(candidate, why=f"cannot take less than {format_seconds(candidate.bound_s)}")
        elif simulates and not takes_long(plan):
            candidate = planner.with_score(candidate, score_plan(plan))
        rows.append(planner.Comparison(plan, (candidate,)))
    return rows


def is_simulated(request: PlanRequest) -> bool:
    """Returns whether plans are simulated; the request's cluster has ranks as workers."""
    return request.strategy == "simulate" and request.workers_and_links.workers <= MOST_SIMULATED


def rank_by_seconds(comparison: planner.Comparison) -> tuple[float, ...]:
    """Returns the order of plans: fewer seconds, by simulation if there is one; then fewer stages and ranks."""
    plan, period_s = comparison.plan, comparison.candidates[0].period_s
    return plan.period_s if period_s is None else period_s, len(plan.stages), plan.ranks


@dataclass(frozen=True, eq=False)
class _MixedSearch:
    profile: Profile
    request: PlanRequest
    meshes: Sequence[Mesh]

    def plan_finalists(self) -> list[tuple[Plan, str]]:
        """Returns different plans of several searches, each with its search in words."""
        shape = self._shape
        plans: dict[tuple[Any, ...], tuple[Plan, str]] = {}
        for slower in _SLOWER if is_simulated(self.request) and isinstance(shape, str) else (1.0,):
            finalist = planner.Finalist(shape if isinstance(shape, str) else "-".join(map(str, shape)), slower)
            try:
                plan = self._plan(finalist)
            except PipelineError:
                if slower == 1.0:
                    raise
            else:
                plans.setdefault((plan.stages, plan.in_flight), (plan, str(finalist)))
        return list(plans.values())

    def _plan(self, finalist: planner.Finalist) -> Plan:
        """Plans for the method, with its own number of microbatches if none is given, as `workflows.plan` does."""
        schedule, microbatches, in_flight = self.request.schedule, self.request.microbatches, self.request.in_flight
        search = self._search(microbatches or 1)
        plan = search.best(finalist.shape, in_flight, finalist.slower)
        built = schedules.build(schedule, plan, microbatches)
        if microbatches is None and built.microbatches > 1:  # again, with those of the method
            batch = search.space.profile.batch
            parts = max(built.microbatches if batch == 1 else min(built.microbatches, batch), *plan.replicas)
            plan = self._search(parts).best(finalist.shape, in_flight, finalist.slower)
            built = schedules.build(schedule, plan, parts)
        note = plan.note
        if built.microbatches > 1:
            note += f"; estimated for a full pipeline, without {built.name}'s own updates"
            plan = replace(plan, bound_s=0.0)
        return replace(plan, schedule=built.name, microbatches=built.microbatches, note=note)

    @cached_property
    def _places(self) -> tuple[int, ...] | None:
        """The first layers of the stages after the first, if the request gives cuts."""
        if self.request.cuts is None:
            return None
        places = tuple(planner.place_of(self.profile.graph, cut) for cut in self.request.cuts)
        planner.check_cuts(self.profile, places)
        return places

    @property
    def _shape(self) -> str | tuple[int, ...]:
        shape = self.request.shape
        if self._places is not None and isinstance(shape, str) and shape in planner.SHAPES:
            return (1,) * (len(self._places) + 1)
        return shape

    def _search(self, parts: int) -> planner.MeshSearch:
        request = self.request
        if parts not in self._searches:
            recomputes = schedules.properties_of(request.schedule).recomputes
            self._searches[parts] = planner.MeshSearch.of(
                self.profile,
                request.workers_and_links,
                self.meshes,
                recompute="always" if recomputes else request.recompute,
                all_ranks=request.all_workers,
                cuts=self._places,
                occupancy=occupancy_of(request.schedule, parts),
                microbatches=parts,
                update_delay=request.update_delay,
            )
        return self._searches[parts]

    @cached_property
    def _searches(self) -> dict[int, planner.MeshSearch]:
        return {}


def _format_meshes(plan: Plan) -> str:
    return "/".join(map(str, plan.meshes)) if plan.ranks > plan.workers else ""
