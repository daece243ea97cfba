"""Planning: a profiled model cut into stages, by the planner that the options ask for."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from typing import Any

from pipedream import planner, schedules
from pipedream.core.errors import PipelineError, PlanError, ShortageError
from pipedream.core.hardware.cluster import Cluster
from pipedream.core.model.graph_txt import GraphText
from pipedream.core.model.profile import LayerProfile, Profile
from pipedream.core.plan.mesh import meshes_of
from pipedream.core.plan.plan import Plan
from pipedream.core.plan.ranks import profile_of_rank
from pipedream.core.progress import progress
from pipedream.workflows.exclusions import check_options
from pipedream.workflows.layouts import lay_out_stages
from pipedream.workflows.meshes import AUTO, NO_MESH, choose_meshes
from pipedream.workflows.methods import (
    MOST_SIMULATED,
    adapt_plan_to_method,
    occupancy_of,
    plan_from_file,
    score,
    select_methods,
    takes_long,
    versions_of,
)

_FEW_WORKERS = 8  # up to here all replica counts are tried, at most 128
_STRATEGIES = ("simulate", "search", "2bw")


def plan(
    profile: Profile | GraphText,
    cluster: Cluster | None = None,
    *,
    schedule: str = "pipedream",
    microbatches: int | None = None,
    in_flight: str | tuple[int, ...] = "noam",
    shape: str | tuple[int, ...] = "any",
    cuts: tuple[int | str, ...] | None = None,
    update_delay: int = 0,
    all_workers: bool = False,
    recompute: str = "never",
    cost_model: str = "pipedream",
    allow_asynchronous: bool = False,
    strategy: str = "simulate",
    chunks: int | None = None,
    mesh: str = "",
) -> Plan:
    """Cuts a profiled model into stages so that training is as fast as possible and each stage fits the memory.

    Args:
        profile: or a graph.txt of the original PipeDream.
        cluster: workers and links; by default those of this run. If its processes are on several machines (torchrun,
            srun), the links are measured for some seconds, and rank 0 prints what was found; every rank calls it.
        schedule: the method, whose weight versions count against the memory; 'auto' takes the fastest, see `choose`; a
            CSV file in PyTorch's notation determines the stages too.
        microbatches: m, the microbatches of a minibatch.
        in_flight: depth: 'noam', 'full', 'auto' (the deepest that fits), or a count for each stage.
        shape: 'any' takes the fastest of one worker, data parallelism and pipelines; 'pipeline' at least two stages;
            'straight' one stage for each worker; 'data-parallel' one stage; replica counts: '2-1' or (2, 1).
        cuts: where a new stage begins: indices of layers, or names of layers or modules ('model.layers.4'), of which
            the first layer counts. Each stage has one worker unless `shape` gives counts.
        update_delay: 1 lets replicated stages run their next forward before they update.
        all_workers: 'any' and 'pipeline' must use every worker.
        recompute: stages that keep only their input and repeat the forward: 'never', 'always', or 'auto' where the
            memory requires it.
        cost_model: 'pipedream', or 'classic' for the original planner's, see `classic`.
        allow_asynchronous: 'auto' may choose a method whose gradients are late.
        strategy: 'simulate': 'any' and 'pipeline' take the finalist of several searches with the fewest simulated
            seconds, up to 128 workers; 'search': the plan with the fastest slowest stage, without simulation; '2bw':
            that of PipeDream-2BW's planner (`pipedream.planner.two_bw`).
        chunks: stages of each worker, for methods that interleave (`layouts.lay_out_stages`).
        mesh: of the ranks of every worker, such as ``model:2`` (docs/meshes.md), or one for each stage, such as
            ``data:2/model:2/-``, for a shape that gives counts; such stages are cut where those of single ranks would
            be. The cluster's workers are ranks then. Seconds and bytes are those of one rank; the profile must know the
            meshes (``profile(meshes=...)``). 'auto' chooses one for each stage, or none, together with cuts and
            replicas (docs/meshes.md); 'none' or '' is a single rank.

    Raises:
        PlanError: nothing fits, the model or the cluster does not allow the shape, or options exclude each other.
    """
    options = {
        "schedule": schedule,
        "microbatches": microbatches,
        "in_flight": in_flight,
        "shape": shape,
        "cuts": cuts,
        "update_delay": update_delay,
        "all_workers": all_workers,
        "recompute": recompute,
        "cost_model": cost_model,
        "allow_asynchronous": allow_asynchronous,
        "strategy": strategy,
        "chunks": chunks,
    }
    if mesh == AUTO:
        return _on_any_meshes(profile, cluster, options).plan
    with _naming_meshes(profile, cluster, mesh):
        profile, cluster, of_ranks = _of_ranks(profile, cluster, mesh, options)
        return _with_mesh(_compared(profile, cluster, **of_ranks).plan, mesh)


def _on_any_meshes(
    profile: Profile | GraphText, cluster: Cluster | None, options: Mapping[str, Any], names: Sequence[str] = ()
) -> planner.Comparison:
    check_options({**options, "mesh": AUTO})
    measured = profile.profile() if isinstance(profile, GraphText) else profile

    score_once = cache(_score)

    def score_known(plan: Plan) -> planner.Score:  # several searches find the same stages
        return score_once(replace(plan, note="", bound_s=0.0))

    def on_one_mesh(rank_profile: Profile, workers: Cluster, mesh_options: Mapping[str, Any]) -> planner.Comparison:
        return _compared(rank_profile, workers, names=names, score_of=score_known, **mesh_options)

    return choose_meshes(measured, cluster or _own_cluster(profile), on_one_mesh, score_known, options)


@contextmanager
def _naming_meshes(profile: Profile | GraphText, cluster: Cluster | None, mesh: str) -> Iterator[None]:
    """Adds to a shortage of memory that a mesh may help."""
    try:
        yield
    except ShortageError as error:
        if _text(mesh) or isinstance(profile, GraphText) or (cluster is not None and cluster.workers < 2):
            raise
        helps = "a stage may also be cut over several ranks: plan with mesh='auto' (--mesh auto)"
        if not profile.ranks:
            helps += ", from a profile with a layout and meshes='auto' (--mesh auto)"
        raise ShortageError(f"{error}; {helps}", error.need_bytes) from None


def _text(mesh: str) -> str:
    return "" if mesh == NO_MESH else mesh


def _of_ranks(
    profile: Profile | GraphText, cluster: Cluster | None, mesh: str, options: Mapping[str, Any]
) -> tuple[Profile | GraphText, Cluster | None, Mapping[str, Any]]:
    """Returns what a rank needs, the workers that it is a part of, and the options for both."""
    if not _text(mesh):
        return profile, cluster, options
    measured = profile.profile() if isinstance(profile, GraphText) else profile
    joined, meshes = cluster or _own_cluster(profile), meshes_of(mesh)
    sizes = {mesh_of_stage.size for mesh_of_stage in meshes}
    workers = joined.of_meshes(sizes.pop()) if len(sizes) == 1 else joined
    if len(set(meshes)) == 1:
        return profile_of_rank(measured, meshes[0], joined), workers, options
    cut = _compared(measured, replace(workers, memory_bytes=None), **options).plan.stages
    ranks = {
        mesh_of_stage: profile_of_rank(measured, mesh_of_stage, joined) if mesh_of_stage.dimensions else measured
        for mesh_of_stage in set(meshes)
    }
    parts = [
        (ranks[mesh_of_stage], ranks[mesh_of_stage].layers[stage.first : stage.last])
        for stage, mesh_of_stage in zip(cut, meshes_of(mesh, len(cut)), strict=True)
    ]
    updates_s = (rank.update_s * _weights(layers) / max(_weights(rank.layers), 1) for rank, layers in parts)
    layers = tuple(layer for _, layers in parts for layer in layers)
    rank_profile = replace(measured, layers=layers, update_s=max(measured.update_fixed_s, sum(updates_s)))
    cuts, shape = tuple(stage.first for stage in cut[1:]), tuple(stage.replicas for stage in cut)
    return rank_profile, workers, {**options, "cuts": cuts, "shape": shape, "chunks": None}


def _weights(layers: Sequence[LayerProfile]) -> int:
    return sum(layer.parameter_bytes for layer in layers)


def _with_mesh(plan: Plan, mesh: str) -> Plan:
    if not _text(mesh):
        return plan
    meshed, sizes = plan.with_mesh(mesh), {mesh_of_stage.size for mesh_of_stage in meshes_of(mesh)}
    if len(sizes) > 1 and meshed.ranks > plan.cluster.workers:
        raise PlanError(
            f"the plan {meshed.config} with the meshes {mesh} takes {meshed.ranks} ranks, but there are "
            f"{plan.cluster.workers}; give the workers of each stage (shape='1-1', --config 1-1), or more ranks"
        )
    return meshed


def choose(
    profile: Profile | GraphText,
    cluster: Cluster,
    *,
    schedule: str = "auto",
    names: Sequence[str] = (),
    **options: Any,
) -> planner.Comparison:
    """Plans as `plan` does, and also returns what was compared.

    The schedule 'auto' finds the method, stages, microbatches and depth with the fewest simulated seconds per
    minibatch, each update being made of one minibatch. Data parallelism and one worker are always among the candidates
    or the references: as PyTorch's DistributedDataParallel, with a minibatch for each worker, and at an equal global
    batch, with each minibatch divided among the workers.

    Args:
        names: the methods that 'auto' compares; () compares all that are allowed.
        options: of `plan`. 'auto' keeps microbatches, in_flight, shape and update_delay where they are given, and
            otherwise searches them.

    Raises:
        PlanError: no method works, or a name is not known. Also those of `plan`.
    """
    options = (plan.__kwdefaults__ or {}) | options
    mesh, options = options["mesh"], {name: value for name, value in options.items() if name != "mesh"}
    options |= {"schedule": schedule}
    if mesh == AUTO:
        comparison = _on_any_meshes(profile, cluster, options, names)
    else:
        with _naming_meshes(profile, cluster, mesh):
            profile, of_meshes, of_ranks = _of_ranks(profile, cluster, mesh, options)
            cluster = of_meshes or cluster
            comparison = _compared(profile, cluster, names=names, **of_ranks)
    measured = profile.profile() if isinstance(profile, GraphText) else profile
    first, *rest = comparison.candidates
    if first.period_s is None:
        first = _simulated(first, comparison.plan)
    references = tuple(_references(measured, cluster, comparison.candidates, options["recompute"]))
    chosen = comparison.plan if mesh == AUTO else _with_mesh(comparison.plan, mesh)
    return replace(comparison, plan=chosen, candidates=(first, *rest), references=references)


def _compared(
    profile: Profile | GraphText,
    cluster: Cluster | None,
    *,
    schedule: str,
    microbatches: int | None,
    in_flight: str | tuple[int, ...],
    shape: str | tuple[int, ...],
    cuts: tuple[int | str, ...] | None,
    update_delay: int,
    all_workers: bool,
    recompute: str,
    cost_model: str,
    allow_asynchronous: bool,
    strategy: str,
    chunks: int | None,
    names: Sequence[str] = (),
    score_of: Callable[[Plan], planner.Score] | None = None,
) -> planner.Comparison:
    if cost_model not in ("pipedream", "classic"):
        raise PlanError(f"cost model {cost_model!r} is not known; write pipedream or classic")
    if strategy not in _STRATEGIES:
        raise PlanError(f"strategy {strategy!r} is not known; write simulate, search or 2bw")
    if cluster is not None and not isinstance(cluster, Cluster):
        raise PlanError(f"{cluster!r} was given as the cluster; give a Cluster, such as pipedream.Cluster.flat(4)")
    chosen = {"schedule": schedule, "cost_model": cost_model, "strategy": strategy, "chunks": chunks, "cuts": cuts}
    search: dict[str, Any] = {"microbatches": microbatches, "in_flight": in_flight, "shape": shape}
    search |= {"update_delay": update_delay, "recompute": recompute}
    check_options(chosen | search)
    if cluster is None:
        cluster = _own_cluster(profile)
    measured = profile.profile() if isinstance(profile, GraphText) else profile
    _warn_of_another_device(measured, cluster)
    if cost_model == "classic":
        straight = shape == "straight"
        return _only(classic(profile, cluster, straight=straight, schedule=schedule, in_flight=in_flight).plan, shape)
    _check_microbatches(measured, microbatches)
    if strategy == "2bw":
        return _only(_two_bw(measured.without_tied_groups(), cluster, microbatches, recompute), shape)
    search["all_workers"] = all_workers
    if schedule == "auto":
        methods = select_methods(names, allow_asynchronous=allow_asynchronous)
        return planner.choose(measured, cluster, methods, score, occupancy_of, **search)
    if schedules.properties_of(schedule).same_updates:
        measured = measured.without_tied_groups()
    if schedules.layout_of(schedule) is not None:
        always = recompute == "always"
        plan = lay_out_stages(measured, cluster, schedule, chunks=chunks, microbatches=microbatches, recompute=always)
        return _only(plan, shape)
    if schedules.is_torch_csv(schedule):
        if isinstance(shape, tuple) or shape not in planner.SHAPES:
            planner.parse_counts(shape)  # refuses what are no counts
        plan = plan_from_file(measured, cluster, schedule, microbatches, cuts, depth=in_flight, recompute=recompute)
        return _only(plan, shape)
    simulate = strategy == "simulate"
    return _search(measured, cluster, schedule, cuts=cuts, simulate=simulate, score_of=score_of or _score, **search)


def _warn_of_another_device(profile: Profile, cluster: Cluster) -> None:
    gpus = sorted({device for device in cluster.devices if not device.startswith("cpu")})
    if gpus and profile.device.startswith("cpu"):
        warnings.warn(
            f"the workers have {', '.join(gpus)}, but the profile was measured on {profile.device}: the plan is one "
            f"for CPUs; profile on such a GPU (--device cuda), or from a datasheet (--device meta --as {gpus[0]})",
            stacklevel=4,
        )


def _own_cluster(profile: Profile | GraphText) -> Cluster:
    from pipedream.workflows.own_cluster import own_cluster  # loads torch

    device = profile.device if isinstance(profile, Profile) else ""
    cluster, measured = own_cluster("cuda" if device.startswith("cuda") else "cpu")
    if measured:
        print(measured, flush=True)
    return cluster


def _check_microbatches(profile: Profile, microbatches: int | None) -> None:
    if microbatches is not None and 1 < profile.batch < microbatches:
        raise PlanError(
            f"{microbatches} microbatches were asked of minibatches of {profile.batch} samples; ask for at most as "
            "many, or profile larger minibatches"
        )


def _two_bw(profile: Profile, cluster: Cluster, microbatches: int | None, recompute: str) -> Plan:
    planner.check_recompute(recompute)
    plan = planner.two_bw(
        profile,
        cluster,
        lambda m: occupancy_of("pipedream_2bw", m),
        microbatches=microbatches,
        recompute={"never": False, "auto": None, "always": True}[recompute],
    )
    return replace(plan, schedule="pipedream_2bw")


def _search(
    profile: Profile,
    cluster: Cluster,
    schedule: str,
    *,
    shape: str | tuple[int, ...],
    cuts: tuple[int | str, ...] | None,
    microbatches: int | None,
    in_flight: str | tuple[int, ...],
    update_delay: int,
    recompute: str,
    all_workers: bool,
    simulate: bool,
    score_of: Callable[[Plan], planner.Score],
) -> planner.Comparison:
    counts = None if isinstance(shape, str) and shape in planner.SHAPES else planner.parse_counts(shape)
    method = schedules.properties_of(schedule)
    if method.recomputes:
        recompute = "always"

    @cache
    def searches(parts: int) -> planner.PlanSearch:
        return planner.PlanSearch.of(
            profile,
            cluster,
            occupancy=occupancy_of(schedule, parts),
            microbatches=parts,
            update_delay=update_delay,
            recompute=recompute,
            all_workers=all_workers,
        )

    def planned(parts: int, shape: str | tuple[int, ...] = shape, slower: float = 1.0) -> Plan:
        if cuts is None:
            return searches(parts).best(shape, in_flight, slower)
        return planner.manual_plan(
            profile,
            cluster,
            cuts,
            counts,
            occupancy=occupancy_of(schedule, parts),
            microbatches=parts,
            in_flight=in_flight,
            update_delay=update_delay,
            recompute=recompute,
        )

    def best(shape: str | tuple[int, ...] = shape, slower: float = 1.0) -> Plan:
        plan = planned(microbatches or 1, shape, slower)
        automatic = cuts is None and shape in ("any", "pipeline")
        if automatic and microbatches is not None and method.splits_minibatch and max(plan.replicas) > microbatches:
            # Each replica takes part in each update, so a stage has at most as many as a minibatch has parts.
            plan = _fewer_replicas(planned, microbatches, cluster.workers, one_stage=shape == "any", every=all_workers)
        plan = adapt_plan_to_method(plan, profile, schedule, microbatches)
        if microbatches is not None:
            return plan
        most = profile.batch if profile.batch > 1 else plan.microbatches  # one sample: it may be unknown
        if (
            plan.first_stage_over_memory is not None or plan.microbatches > most
        ):  # again, with the microbatches of the method
            m = max(min(plan.microbatches, most), *plan.replicas)
            plan = adapt_plan_to_method(planned(m, shape, slower), profile, schedule, m)
        return plan

    automatic = cuts is None and shape in ("any", "pipeline")
    if not (simulate and automatic) or cluster.workers > MOST_SIMULATED:
        with progress("planning"):
            return _only(best(), shape)
    tried = planner.finalists(shape, profile, cluster.workers, all_workers)
    plans: dict[tuple[Any, ...], tuple[str, Plan]] = {}
    refused: list[planner.Candidate] = []
    errors: list[PipelineError] = []
    with progress("planning", len(tried)) as advance:
        for finalist in tried:
            advance()
            try:
                plan = best(*finalist)
            except PipelineError as error:
                errors.append(error)
                refused.append(planner.Candidate(schedule, microbatches or 1, "", 0, str(finalist), why=str(error)))
                continue
            key = plan.microbatches, plan.stages, plan.in_flight, plan.update_delay, plan.order
            plans.setdefault(key, (str(finalist), plan))
    if not plans:
        raise errors[0]
    rows = [(_candidate(plan, finalist_text), plan) for finalist_text, plan in plans.values()]
    # A minibatch of one sample may be one of unknown size.
    possible = [row for row in rows if profile.batch == 1 or row[1].microbatches <= profile.batch] or rows
    try:
        compared = planner.fastest(possible, score_of, refused)
    except PlanError:  # none can be simulated
        return planner.Comparison(rows[0][1], (rows[0][0],))
    together = profile.ties_in_words() if cluster.workers > 1 else ""
    note = "; ".join([compared.fastest_in_words(), *([together] if together else [])])
    bound_s = min(rows[0][1].bound_s, compared.plan.slowest_stage_s)
    return replace(compared, plan=replace(compared.plan, note=note, bound_s=bound_s))


def _score(plan: Plan) -> planner.Score:
    if takes_long(plan):
        raise PlanError(f"the replicas of {plan.config} repeat themselves too seldom to be simulated")
    return score(plan)


def _candidate(plan: Plan, shape: str | tuple[int, ...]) -> planner.Candidate:
    text = shape if isinstance(shape, str) else "-".join(map(str, shape))
    flushes = schedules.properties_of(plan.schedule or "pipedream").flushes
    candidate = planner.Candidate(plan.schedule, plan.microbatches, plan.depth_mode, max(plan.update_delay), text)
    return planner.candidate_from_plan(candidate, plan, flushes)


def _only(plan: Plan, shape: str | tuple[int, ...]) -> planner.Comparison:
    """What was asked leaves nothing to compare."""
    return planner.Comparison(plan, (_candidate(plan, shape),))


def _simulated(candidate: planner.Candidate, plan: Plan) -> planner.Candidate:
    try:
        return planner.scored(candidate, _score(plan))
    except PipelineError as error:
        return replace(candidate, why=str(error))


def _references(
    profile: Profile, cluster: Cluster, candidates: Sequence[planner.Candidate], recompute: str
) -> Iterator[planner.Candidate]:
    """Yields data parallelism, with a minibatch for each worker and with a part of one, and one worker."""
    simulated = {
        (candidate.schedule, candidate.microbatches, candidate.config)
        for candidate in candidates
        if candidate.period_s is not None
    }
    workers = cluster.workers
    split = [("1f1b", workers, "data-parallel")] if 1 < workers <= profile.batch else []
    for schedule, m, shape in [("pipedream", 1, "data-parallel"), *split, ("pipedream", 1, "1")]:
        config = str(workers) if shape == "data-parallel" else shape
        if (schedule, m, config) in simulated:
            continue
        simulated.add((schedule, m, config))
        try:
            reference = plan(
                profile, cluster, schedule=schedule, microbatches=m if m > 1 else None, shape=shape, recompute=recompute
            )
        except PlanError as error:
            yield planner.Candidate(schedule, m, "noam", 0, shape, why=str(error))
        else:
            yield _simulated(_candidate(reference, shape), reference)


def _fewer_replicas(
    planned: Callable[[int, tuple[int, ...]], Plan], most: int, workers: int, *, one_stage: bool, every: bool
) -> Plan:
    """Returns the fastest plan whose stages have at most so many replicas."""
    shapes = _counts(workers, most)
    if not every:
        shapes += [(count,) for count in range(1, most + 1)] + [(1,) * stages for stages in range(2, workers)]
    plans, refused = [], None
    for counts in dict.fromkeys(shapes):
        if one_stage or len(counts) > 1:
            try:
                plans.append(planned(most, counts))
            except PlanError as error:
                refused = error
    if not plans:
        raise refused or PlanError(f"no plan gives each stage at most {most} workers; split minibatches further")
    return min(plans, key=lambda plan: (plan.slowest_stage_s, len(plan.stages), plan.workers))


def _counts(workers: int, most: int) -> list[tuple[int, ...]]:
    """The replica counts of all workers, up to `most` each; with many workers only equal ones, and one more stage."""
    if workers <= _FEW_WORKERS:
        return [
            (first, *rest)
            for first in range(1, min(workers, most) + 1)
            for rest in (_counts(workers - first, most) if workers > first else [()])
        ]
    equal = range(1, most + 1)
    return [(size,) * (workers // size) + ((workers % size,) if workers % size else ()) for size in equal]


def classic(
    profile: Profile | GraphText,
    cluster: Cluster,
    *,
    straight: bool = False,
    schedule: str = "pipedream",
    in_flight: str | tuple[int, ...] = "noam",
) -> planner.Classic:
    """Returns the answer of the original PipeDream's planner, with its predicted seconds; see docs/cost_models.md.

    Args:
        profile: or a graph.txt of the original.
        cluster: workers and bandwidths, without a limit on memory.
        straight: one worker for each stage.
        schedule, in_flight: for the predicted bytes; they do not affect the cut.

    Raises:
        PlanError: see `pipedream.planner.classic`.
    """
    return planner.classic(profile, cluster, straight=straight, versions=versions_of(schedule), in_flight=in_flight)
