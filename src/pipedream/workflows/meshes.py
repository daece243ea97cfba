"""Planning with meshes that the planner chooses: one for all stages, and one for each."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from math import inf
from typing import Any, NoReturn

from pipedream import planner, schedules
from pipedream.core.errors import PipelineError, PlanError, ShortageError
from pipedream.core.hardware.cluster import Cluster
from pipedream.core.model.profile import Profile
from pipedream.core.plan.mesh import Mesh
from pipedream.core.plan.plan import Plan
from pipedream.core.plan.ranks import profile_of_rank
from pipedream.core.units import format_bytes, format_seconds
from pipedream.workflows.methods import MOST_SIMULATED, occupancy_of, takes_long

AUTO = "auto"
"""The text in place of a mesh with which the planner chooses one for each stage."""

NO_MESH = "none"
"""In words what '' means: each worker is a single rank."""

NOT_MEASURED = "not measured, a rank of "
"""Begins the notes of a profile about meshes that are not legal for its model."""

_SLOWER = (1.0, 2.0, 4.0, 16.0)  # of `Finalist`

OnOneMesh = Callable[[Profile, Cluster, Mapping[str, Any]], planner.Comparison]
"""(profile of a rank, its workers, the options of `plan`) -> the plans where all workers have that mesh."""


def meshes_known(profile: Profile, cluster: Cluster) -> list[Mesh]:
    """Returns the meshes that a stage may have: a single rank, and those whose rank the profile knows.

    Raises:
        PlanError: it knows none.
    """
    if not profile.ranks:
        why = "".join(f" ({note})" for note in profile.notes if note.startswith(NOT_MEASURED))
        raise PlanError(
            f"mesh='auto' was asked for, but the profile has no measurement of a rank of any mesh{why}; profile with a "
            "layout that cuts the model's tensors and meshes='auto' (pipedream profile RECIPE --mesh auto)"
        )
    measured = dict.fromkeys(Mesh(rank.mesh) for rank in profile.ranks)
    return [Mesh(), *(mesh for mesh in measured if 1 < mesh.size <= cluster.workers)]


def choose_meshes(
    profile: Profile,
    cluster: Cluster,
    on_one_mesh: OnOneMesh,
    score: Callable[[Plan], planner.Score],
    options: Mapping[str, Any],
) -> planner.Comparison:
    """Returns the fastest plan, by simulation as far as that is asked for, of those on one mesh and those on several.

    Args:
        cluster: its workers are ranks.
        options: of `plan`, without the mesh.

    Raises:
        PlanError: nothing fits, or the options exclude a mesh for each stage and no single one works.
    """
    meshes = meshes_known(profile, cluster)
    single = _Single(profile, cluster, on_one_mesh, options)
    compared: list[planner.Comparison] = []
    refused: list[tuple[Mesh | None, PipelineError]] = []
    slower: list[Mesh] = []
    for mesh in sorted(meshes, key=single.least_s):
        best_s = min(
            (_order(comparison)[0] for comparison in compared if comparison.candidates[0].period_s is not None),
            default=inf,
        )
        if single.least_s(mesh) >= best_s:
            slower.append(mesh)
            continue
        try:
            compared.append(single.on(mesh))
        except PipelineError as error:
            refused.append((mesh, error))
    mixed: Sequence[planner.Comparison] = ()
    try:
        mixed = _mixed(profile, cluster, meshes, score, options, min(compared, key=_order, default=None))
    except PipelineError as error:
        refused.append((None, error))
    if not compared and not mixed:
        _refuse(cluster, refused)
    return _fastest(compared, mixed, _others(single, slower if single.simulates else meshes, score))


@dataclass(frozen=True)
class _Single:
    """Plans whose workers all have one mesh."""

    profile: Profile
    cluster: Cluster
    on_one_mesh: OnOneMesh
    options: Mapping[str, Any]

    @property
    def simulates(self) -> bool:
        return self.options["strategy"] == "simulate" and self.cluster.workers <= MOST_SIMULATED

    def on(self, mesh: Mesh, **changes: Any) -> planner.Comparison:
        """Raises a `PipelineError` if there is no plan, or if it leaves ranks idle that must not be."""
        workers = self.cluster.of_meshes(mesh.size)
        comparison = _on_mesh(self.on_one_mesh(self._rank(mesh), workers, {**self.options, **changes}), mesh)
        plan, ranks = comparison.plan, self.cluster.workers
        if self.options["all_workers"] and plan.ranks < ranks:
            raise PlanError(f"the plan {plan.config} takes {plan.ranks} of {ranks} ranks; give as many as it takes")
        return comparison

    def least_s(self, mesh: Mesh) -> float:
        """Returns seconds per minibatch that no plan on a mesh can beat: all passes, divided by the workers' speeds."""
        rank = self._rank(mesh)
        rank = rank.in_parts(rank.parts)
        return (rank.forward_s + rank.backward_s) / (sum(self.cluster.speeds) / mesh.size)

    def _rank(self, mesh: Mesh) -> Profile:
        return profile_of_rank(self.profile, mesh, self.cluster) if mesh.dimensions else self.profile


def _others(single: _Single, meshes: Sequence[Mesh], score: Callable[[Plan], planner.Score]) -> list[planner.Candidate]:
    """The best plans of one kind that were not compared: one worker on meshes; without simulation also pipelines and
    data parallelism."""
    kinds = [(mesh, "1") for mesh in meshes]
    kinds += [] if single.simulates else [(Mesh(), shape) for shape in ("straight", "data-parallel")]
    candidates: list[planner.Candidate] = []
    for mesh, shape in kinds if single.options["shape"] == "any" and single.options["cuts"] is None else ():
        with suppress(PipelineError):
            comparison = single.on(mesh, shape=shape)
            (row,) = comparison.candidates[:1]
            simulated = single.simulates and row.period_s is None
            candidates.append(planner.scored(row, score(comparison.plan)) if simulated else row)
    return candidates


def _order(comparison: planner.Comparison) -> tuple[float, ...]:
    """Fewer seconds, by simulation if there is one; then fewer stages and ranks."""
    plan, period_s = comparison.plan, comparison.candidates[0].period_s
    return plan.period_s if period_s is None else period_s, len(plan.stages), plan.ranks


def _on_mesh(comparison: planner.Comparison, mesh: Mesh) -> planner.Comparison:
    if not mesh.dimensions:
        return comparison
    rows = (
        replace(candidate, mesh=mesh.text, config="-".join(f"{count}x{mesh.size}" for count in candidate.replicas))
        for candidate in comparison.candidates
    )
    return replace(comparison, plan=comparison.plan.with_mesh(mesh.text), candidates=tuple(rows))


def _mixed(
    profile: Profile,
    cluster: Cluster,
    meshes: Sequence[Mesh],
    score: Callable[[Plan], planner.Score],
    options: Mapping[str, Any],
    best: planner.Comparison | None,
) -> Sequence[planner.Comparison]:
    """Returns the plans whose stages have meshes of their own, each with its simulation."""
    schedule, microbatches, shape = options["schedule"], options["microbatches"], options["shape"]
    if schedule == "auto":  # that of the fastest plan on one mesh
        if best is None:
            return []
        schedule, microbatches = best.plan.schedule, best.plan.microbatches
    is_named = isinstance(shape, str) and shape in planner.SHAPES
    if shape in ("straight", "data-parallel") or options["strategy"] == "2bw":
        return []
    if schedules.layout_of(schedule) is not None or schedules.is_torch_csv(schedule):
        return []
    method = schedules.properties_of(schedule)
    cuts = options["cuts"]
    places = None if cuts is None else tuple(planner.place_of(profile.graph, cut) for cut in cuts)
    if places is not None:
        planner.check_cuts(profile, places)
    if places is not None and is_named:
        shape = (1,) * (len(places) + 1)

    @cache
    def search(parts: int) -> planner.MeshSearch:
        return planner.MeshSearch.of(
            profile,
            cluster,
            meshes,
            recompute="always" if method.recomputes else options["recompute"],
            all_ranks=options["all_workers"],
            cuts=places,
            occupancy=occupancy_of(schedule, parts),
            microbatches=parts,
            update_delay=options["update_delay"],
        )

    simulates = options["strategy"] == "simulate" and cluster.workers <= MOST_SIMULATED
    plans: dict[tuple[Any, ...], tuple[Plan, str]] = {}
    for slower in _SLOWER if simulates and isinstance(shape, str) else (1.0,):
        finalist = planner.Finalist(shape if isinstance(shape, str) else "-".join(map(str, shape)), slower)
        try:
            plan = _planned(search, schedule, microbatches, finalist, options["in_flight"])
        except PipelineError:
            if slower == 1.0:
                raise
        else:
            plans.setdefault((plan.stages, plan.in_flight), (plan, str(finalist)))
    rows: list[planner.Comparison] = []
    for plan, finalist_text in plans.values():
        way = planner.Candidate(
            plan.schedule, plan.microbatches, plan.depth_mode, max(plan.update_delay), finalist_text
        )
        way = planner.candidate_from_plan(replace(way, mesh=_mesh_text(plan)), plan, method.flushes)
        least = min((_order(comparison)[0] for comparison in (*rows, *([best] if best else []))), default=inf)
        if simulates and way.bound_s >= least:
            way = replace(way, why=f"cannot take less than {format_seconds(way.bound_s)}")
        elif simulates and not takes_long(plan):
            way = planner.scored(way, score(plan))
        rows.append(planner.Comparison(plan, (way,)))
    return rows


def _mesh_text(plan: Plan) -> str:
    return "/".join(map(str, plan.meshes)) if plan.ranks > plan.workers else ""


def _planned(
    search: Callable[[int], planner.MeshSearch],
    schedule: str,
    microbatches: int | None,
    finalist: planner.Finalist,
    in_flight: str | tuple[int, ...],
) -> Plan:
    """The plan for a method, with its own number of microbatches if none is given, as `workflows.plan` plans it."""
    mesh_search = search(microbatches or 1)
    plan = mesh_search.best(finalist.shape, in_flight, finalist.slower)
    built = schedules.build(schedule, plan, microbatches)
    if microbatches is None and built.microbatches > 1:  # again, with those of the method
        batch = mesh_search.space.profile.batch
        parts = max(built.microbatches if batch == 1 else min(built.microbatches, batch), *plan.replicas)
        plan = search(parts).best(finalist.shape, in_flight, finalist.slower)
        built = schedules.build(schedule, plan, parts)
    note = plan.note
    if built.microbatches > 1:
        note += f"; estimated for a full pipeline, without {built.name}'s own updates"
        plan = replace(plan, bound_s=0.0)
    return replace(plan, schedule=built.name, microbatches=built.microbatches, note=note)


def _fastest(
    compared: Sequence[planner.Comparison],
    mixed: Sequence[planner.Comparison],
    pure: Sequence[planner.Candidate],
) -> planner.Comparison:
    """All of them as one, whose plan says what the best of each kind takes."""
    every = (*compared, *mixed)
    best = min([comparison for comparison in every if not comparison.candidates[0].why] or every, key=_order)
    first = best.candidates[0]
    rest = [
        row
        for row in (*(row for comparison in (*compared, *mixed) for row in comparison.candidates), *pure)
        if row is not first
    ]
    rest.sort(key=lambda row: (inf if row.period_s is None else row.period_s, row.bound_s))
    merged = planner.Comparison(best.plan, (first, *dict.fromkeys(rest)))
    simulated = sum(row.period_s is not None for row in merged.candidates)
    how = f"{simulated} plans were simulated" if simulated else ""
    how = "; ".join(filter(None, [how, "" if simulated and best not in mixed else best.plan.note]))
    bounds_s = [
        comparison.plan.bound_s for comparison in (mixed[:1] or compared)
    ]  # the first has all plans on single meshes
    bound_s = min(*bounds_s, best.plan.slowest_stage_s)
    return replace(merged, plan=replace(best.plan, note=f"{merged.kinds_in_words()}; {how}", bound_s=bound_s))


def _refuse(cluster: Cluster, refused: Sequence[tuple[Mesh | None, PipelineError]]) -> NoReturn:
    """Raises the error of the plans that come nearest to fitting, or the first."""
    short = [(error.need_bytes, mesh, error) for mesh, error in refused if isinstance(error, ShortageError)]
    if not short:
        raise refused[0][1]
    need_bytes, mesh, error = min(short, key=lambda row: row[0])
    memories = [memory for memory in cluster.memories if memory is not None]
    where = "whose stages have meshes of their own" if mesh is None else f"on the mesh {mesh}"
    missing = f"{format_bytes(need_bytes - min(memories))} more than a rank has" if memories else ""
    raise ShortageError(f"no plan fits on any mesh; nearest are those {where}, with {missing}: {error}", need_bytes)
