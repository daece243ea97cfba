"""Plans with meshes: the given ones, or those that the planner chooses."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, partial
from math import inf
from typing import Any, NoReturn

from pipedream import planner, schedules
from pipedream.core.errors import PipelineError, PlanError, ShortageError
from pipedream.core.hardware.cluster import Cluster
from pipedream.core.model.profile import Profile
from pipedream.core.plan.plan import Plan
from pipedream.core.plan.ranks import Mesh, meshes_of
from pipedream.core.units import format_bytes, format_seconds
from pipedream.extensions.meshes.search import MeshSearch
from pipedream.extensions.meshes.space import profile_of_rank
from pipedream.extensions.meshes.workers import of_meshes
from pipedream.plan_request import AUTO, PlanRequest
from pipedream.workflows.methods import MAX_SIMULATED, occupancy_of, score_if_quick, takes_long
from pipedream.workflows.plan import plan_once, suggest_on_shortage
from pipedream.workflows.stage_search import make_candidate

NOT_MEASURED = "not measured, a rank of "
"""Prefix of a profile's notes about meshes that are not legal for its model."""

Compare = Callable[..., planner.Comparison]
"""Plans for single ranks: (profile of a rank, request without a mesh, rival_s=seconds of a pipeline to beat)."""

_SLOWER_FACTORS = (1.0, 2.0, 4.0, 16.0)  # of `SearchVariant`


def takes(request: PlanRequest) -> bool:
    """Returns whether a request is one for meshes."""
    return bool(request.mesh)


def compare(
    profile: Profile, request: PlanRequest, names: Sequence[str] = ()
) -> tuple[planner.Comparison, Profile, PlanRequest]:
    """Plans for meshes; returns the comparison, and the profile and request of what its plan's workers are.

    Args:
        names: the methods that the schedule 'auto' compares; () compares all that are allowed.
    """
    if request.mesh == AUTO:
        score_once = cache(score_if_quick)

        def score_plan(plan: Plan) -> planner.Score:
            return score_once(replace(plan, note="", bound_s=0.0))  # several searches find the same stages

        compare_workers = partial(plan_once, names=names, score_plan=score_plan)
        choice = _MeshChoice(profile, replace(request, mesh=""), compare_workers, score_plan)
        return choice.choose(), profile, request
    with suggest_on_shortage(profile, request):
        rank, rank_request = take_one_rank(profile, request, plan_once)
        comparison = plan_once(rank, rank_request, names)
    return replace(comparison, plan=add_mesh(comparison.plan, request.mesh)), rank, rank_request


def take_one_rank(profile: Profile, request: PlanRequest, compare: Compare) -> tuple[Profile, PlanRequest]:
    """Returns one rank's profile on the request's mesh, and the request with such ranks as workers.

    With a mesh for each stage, the stages begin where `compare` cuts those of single ranks.
    """
    cluster, meshes = request.workers_and_links, meshes_of(request.mesh)
    sizes = {mesh.size for mesh in meshes}
    workers = of_meshes(cluster, sizes.pop()) if len(sizes) == 1 else cluster
    if len(set(meshes)) == 1:
        return profile_of_rank(profile, meshes[0], cluster), replace(request, cluster=workers, mesh="")
    unlimited = replace(request, cluster=replace(workers, memory_bytes=None), mesh="")
    stages = compare(profile, unlimited).plan.stages
    ranks = {mesh: _profile_rank(profile, mesh, cluster) for mesh in set(meshes)}
    parts = [
        (ranks[mesh], ranks[mesh].layers[stage.first : stage.last])
        for stage, mesh in zip(stages, meshes_of(request.mesh, len(stages)), strict=True)
    ]
    updates_s = (
        rank.update_s * sum(layer.trained_bytes for layer in layers) / max(rank.trained_bytes, 1)
        for rank, layers in parts
    )
    layers = tuple(layer for _, layers in parts for layer in layers)
    rank_profile = replace(profile, layers=layers, update_s=max(profile.update_fixed_s, sum(updates_s)))
    rank_request = replace(
        request,
        cluster=workers,
        cuts=tuple(stage.first for stage in stages[1:]),
        shape=tuple(stage.replicas for stage in stages),
        chunks=None,
        mesh="",
    )
    return rank_profile, rank_request


def add_mesh(plan: Plan, mesh: str) -> Plan:
    """Turns a plan for single ranks of meshes into the plan for the meshes."""
    meshed, sizes = plan.with_mesh(mesh), {mesh.size for mesh in meshes_of(mesh)}
    if len(sizes) > 1 and meshed.ranks > plan.cluster.workers:
        raise PlanError(
            f"the plan {meshed.config} with the meshes {mesh} takes {meshed.ranks} ranks, but there are "
            f"{plan.cluster.workers}; give the workers of each stage (shape='1-1', --config 1-1), or more ranks"
        )
    return meshed


@dataclass(frozen=True)
class _MeshChoice:
    """The choice of the fastest plan on one mesh or on several, by simulation if the request asks for it.

    Attributes:
        request: its cluster's workers are ranks.
        compare: plans for workers that all have one mesh.
    """

    profile: Profile
    request: PlanRequest
    compare: Compare
    score_plan: Callable[[Plan], planner.Score]

    def choose(self) -> planner.Comparison:
        """Raises a `PlanError` if nothing fits, or if options exclude a mesh for each stage and no single one works."""
        comparisons: list[planner.Comparison] = []
        errors: list[tuple[Mesh | None, PipelineError]] = []
        too_slow: list[Mesh] = []

        def compare_mixed() -> Sequence[planner.Comparison]:
            rows = [row for row in comparisons if not row.candidates[0].why]
            try:
                return self._compare_mixed(min(rows, key=_rank_by_seconds, default=None))
            except PipelineError as error:
                errors.append((None, error))
                return ()

        is_auto = self.request.schedule == AUTO
        meshes = sorted(self._meshes, key=self.compute_bound_s)
        # Most plans on one mesh need no simulation once these are known, unless the method is chosen on one mesh.
        mixed = () if is_auto else compare_mixed()
        for mesh in meshes:
            simulated = (row.candidates[0].period_s for row in (*mixed, *comparisons))
            rival_s = min((seconds for seconds in simulated if seconds is not None), default=inf)
            if self.compute_bound_s(mesh) >= rival_s:
                too_slow.append(mesh)
                continue
            try:
                comparisons.append(self.compare_on(mesh, rival_s=rival_s))
            except PipelineError as error:
                errors.append((mesh, error))
        mixed = compare_mixed() if is_auto else mixed
        if not comparisons and not mixed:
            _refuse(self._cluster, errors)
        return _choose_fastest(comparisons, mixed, self._list_others(too_slow))

    @property
    def _cluster(self) -> Cluster:
        return self.request.workers_and_links

    @property
    def _is_simulated(self) -> bool:
        return self.request.strategy == "simulate" and self._cluster.workers <= MAX_SIMULATED

    @cached_property
    def _meshes(self) -> list[Mesh]:
        """The meshes that a stage may have: a single rank, and those that the profile has measured."""
        if not self.profile.ranks:
            why = "".join(f" ({note})" for note in self.profile.notes if note.startswith(NOT_MEASURED))
            raise PlanError(
                f"mesh='auto' was asked for, but the profile has no measurement of a rank of any mesh{why}; profile "
                "with a layout that shards the model's tensors and meshes='auto' (pipedream profile RECIPE --mesh auto)"
            )
        measured = dict.fromkeys(Mesh(rank.mesh) for rank in self.profile.ranks)
        return [Mesh(), *(mesh for mesh in measured if 1 < mesh.size <= self._cluster.workers)]

    def compare_on(
        self, mesh: Mesh, shape: str | tuple[int, ...] | None = None, rival_s: float = inf
    ) -> planner.Comparison:
        """Returns the plans on a mesh. Raises a `PipelineError` if there is none, or if ranks idle that must not."""
        request = replace(self.request, cluster=of_meshes(self._cluster, mesh.size))
        request = request if shape is None else replace(request, shape=shape)
        comparison = self.compare(_profile_rank(self.profile, mesh, self._cluster), request, rival_s=rival_s)
        comparison = _add_mesh_to_all(comparison, mesh)
        plan = comparison.plan
        if request.all_workers and plan.ranks < self._cluster.workers:
            raise PlanError(
                f"the plan {plan.config} takes {plan.ranks} of {self._cluster.workers} ranks; give as many as it takes"
            )
        return comparison

    def compute_bound_s(self, mesh: Mesh) -> float:
        """Returns a lower bound on the seconds per minibatch on a mesh: all passes, divided by the workers' speeds."""
        rank = _profile_rank(self.profile, mesh, self._cluster)
        rank = rank.in_parts(rank.parts)
        return (rank.forward_s + rank.backward_s) / (sum(self._cluster.speeds) / mesh.size)

    def _list_others(self, too_slow: Sequence[Mesh]) -> list[planner.Candidate]:
        """Lists the best plans of the kinds that were not compared.

        These kinds are one worker on a mesh; without simulation also pipelines and data parallelism.
        """
        if self.request.shape != "any" or self.request.cuts is not None:
            return []
        kinds = [(mesh, "1") for mesh in (too_slow if self._is_simulated else self._meshes)]
        kinds += [] if self._is_simulated else [(Mesh(), shape) for shape in ("straight", "data-parallel")]
        candidates: list[planner.Candidate] = []
        for mesh, shape in kinds:
            with suppress(PipelineError):
                comparison = self.compare_on(mesh, shape)
                row = comparison.candidates[0]
                is_missing = self._is_simulated and row.period_s is None
                candidates.append(planner.with_score(row, self.score_plan(comparison.plan)) if is_missing else row)
        return candidates

    def _compare_mixed(self, best: planner.Comparison | None) -> Sequence[planner.Comparison]:
        """Returns plans with a mesh for each stage; none where the request excludes them.

        Those that cannot be faster than the best on one mesh are not simulated.
        """
        request = self.request
        if request.schedule == AUTO:  # that of the fastest plan on one mesh
            if best is None:
                return []
            request = replace(request, schedule=best.plan.schedule, microbatches=best.plan.microbatches)
        if request.shape in ("straight", "data-parallel") or request.strategy == "2bw":
            return []
        if schedules.stage_order_of(request.schedule) is not None or schedules.is_schedule_file(request.schedule):
            return []
        rows: list[planner.Comparison] = []
        for plan, finalist in _MixedSearch(self.profile, request, self._meshes).plan_finalists(self._is_simulated):
            mesh = "/".join(map(str, plan.meshes)) if plan.ranks > plan.workers else ""
            candidate = replace(make_candidate(plan, finalist), mesh=mesh)
            best_s = min((_rank_by_seconds(row)[0] for row in (*rows, *([best] if best else []))), default=inf)
            if self._is_simulated and candidate.least_s >= best_s:
                candidate = replace(candidate, why=f"cannot take less than {format_seconds(candidate.least_s)}")
            elif self._is_simulated and not takes_long(plan):
                candidate = planner.with_score(candidate, self.score_plan(plan))
            rows.append(planner.Comparison(plan, (candidate,)))
        return rows


def _profile_rank(profile: Profile, mesh: Mesh, cluster: Cluster) -> Profile:
    return profile_of_rank(profile, mesh, cluster) if mesh.dimensions else profile


def _add_mesh_to_all(comparison: planner.Comparison, mesh: Mesh) -> planner.Comparison:
    if not mesh.dimensions:
        return comparison
    rows = (
        replace(candidate, mesh=mesh.text, config="-".join(f"{count}x{mesh.size}" for count in candidate.replicas))
        for candidate in comparison.candidates
    )
    return replace(comparison, plan=comparison.plan.with_mesh(mesh.text), candidates=tuple(rows))


def _choose_fastest(
    compared: Sequence[planner.Comparison], mixed: Sequence[planner.Comparison], others: Sequence[planner.Candidate]
) -> planner.Comparison:
    """Merges comparisons into that of the fastest plan, whose note has the seconds of the best of each kind."""
    comparisons = (*compared, *mixed)
    best = min([row for row in comparisons if not row.candidates[0].why] or comparisons, key=_rank_by_seconds)
    first = best.candidates[0]
    candidates = (*(candidate for row in comparisons for candidate in row.candidates), *others)
    rest = [candidate for candidate in candidates if candidate is not first]
    rest.sort(key=lambda candidate: (inf if candidate.period_s is None else candidate.period_s, candidate.least_s))
    merged = planner.Comparison(best.plan, (first, *dict.fromkeys(rest)))
    simulated = sum(candidate.period_s is not None for candidate in merged.candidates)
    note = f"{simulated} plans were simulated" if simulated else ""
    note = "; ".join(filter(None, [note, "" if simulated and best not in mixed else best.plan.note]))
    bounds_s = [row.plan.bound_s for row in (mixed[:1] or compared)]  # the first has all plans on single meshes
    bound_s = min(*bounds_s, best.plan.slowest_stage_s)
    return replace(merged, plan=replace(best.plan, note=f"{merged.kinds_in_words()}; {note}", bound_s=bound_s))


def _refuse(cluster: Cluster, errors: Sequence[tuple[Mesh | None, PipelineError]]) -> NoReturn:
    """Raises the error of the plan that lacks the least memory; if none lacks memory, the first on one mesh."""
    errors = sorted(errors, key=lambda row: row[0] is None)
    shortages = [(error.need_bytes, mesh, error) for mesh, error in errors if isinstance(error, ShortageError)]
    if not shortages:
        raise errors[0][1]
    need_bytes, mesh, error = min(shortages, key=lambda row: row[0])
    memories = [memory for memory in cluster.memories if memory is not None]
    where = "whose stages have meshes of their own" if mesh is None else f"on the mesh {mesh}"
    missing = f"{format_bytes(need_bytes - min(memories))} more than a rank has" if memories else ""
    raise error.reworded(f"no plan fits on any mesh; nearest are those {where}, with {missing}: {error}")


def _rank_by_seconds(comparison: planner.Comparison) -> tuple[float, ...]:
    """Returns a sort key: seconds (simulated if possible), then stages, then ranks."""
    plan, period_s = comparison.plan, comparison.candidates[0].period_s
    return plan.period_s if period_s is None else period_s, len(plan.stages), plan.ranks


@dataclass(frozen=True, eq=False)
class _MixedSearch:
    profile: Profile
    request: PlanRequest
    meshes: Sequence[Mesh]
    _searches: dict[int, MeshSearch] = field(default_factory=dict)

    def plan_finalists(self, is_simulated: bool) -> list[tuple[Plan, str]]:
        """Returns the distinct plans of several searches, each with its search in words."""
        shape = self._shape if isinstance(self._shape, str) else "-".join(map(str, self._shape))
        plans: dict[tuple[Any, ...], tuple[Plan, str]] = {}
        for link_factor in _SLOWER_FACTORS if is_simulated and isinstance(self._shape, str) else (1.0,):
            finalist = planner.SearchVariant(shape, link_factor)
            try:
                plan = self._plan_finalist(finalist)
            except PipelineError:
                if link_factor == 1.0:
                    raise
            else:
                plans.setdefault((plan.stages, plan.in_flight), (plan, str(finalist)))
        return list(plans.values())

    def _plan_finalist(self, finalist: planner.SearchVariant) -> Plan:
        """Plans for the method, with its own number of microbatches if none is given, as `workflows.plan` does."""
        schedule, microbatches, in_flight = self.request.schedule, self.request.microbatches, self.request.in_flight
        search = self._search(microbatches or 1)
        plan = search.best(finalist.shape, in_flight, finalist.link_factor)
        built = schedules.build(schedule, plan, microbatches)
        if microbatches is None and built.microbatches > 1:  # again, with those of the method
            batch = search.space.profile.batch
            parts = max(built.microbatches if batch == 1 else min(built.microbatches, batch), *plan.replicas)
            plan = self._search(parts).best(finalist.shape, in_flight, finalist.link_factor)
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

    def _search(self, parts: int) -> MeshSearch:
        request = self.request
        if parts not in self._searches:
            recomputes = schedules.properties_of(request.schedule).recomputes
            self._searches[parts] = MeshSearch.of(
                self.profile,
                request.workers_and_links,
                self.meshes,
                choices=request.choices.choosing(recompute="always") if recomputes else request.choices,
                all_ranks=request.all_workers,
                cuts=self._places,
                occupancy=occupancy_of(request.schedule, parts),
                microbatches=parts,
                update_delay=request.update_delay,
            )
        return self._searches[parts]
