"""Planning: a profiled model cut into stages, by the planner that the options ask for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from pipedream import planner, schedules
from pipedream.core.errors import PlanError
from pipedream.core.hardware.cluster import Cluster
from pipedream.core.model.graph_txt import GraphText
from pipedream.core.model.profile import Profile
from pipedream.core.plan.plan import Plan
from pipedream.core.progress import progress
from pipedream.workflows.exclusions import check_options
from pipedream.workflows.layouts import lay_out
from pipedream.workflows.methods import for_method, methods_of, occupancy_of, plan_of_file, score, versions_of

__all__ = ["choose", "classic", "plan"]


_FEW_WORKERS = 8  # up to here all replica counts are tried, at most 128


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
    strategy: str = "search",
    chunks: int | None = None,
) -> Plan:
    """Cuts a profiled model into stages so that the slowest is as fast as possible and each fits the memory.

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
        strategy: 'search', or '2bw' for the planner of PipeDream-2BW (`pipedream.planner.two_bw`).
        chunks: stages of each worker, for methods that interleave (`layouts.lay_out`).

    Raises:
        PlanError: nothing fits, the model or the cluster does not allow the shape, or options exclude each other.
    """
    if cost_model not in ("pipedream", "classic"):
        raise PlanError(f"cost model {cost_model!r} is not known; write pipedream or classic")
    if strategy not in ("search", "2bw"):
        raise PlanError(f"strategy {strategy!r} is not known; write search or 2bw")
    if cluster is not None and not isinstance(cluster, Cluster):
        raise PlanError(f"{cluster!r} was given as the cluster; give a Cluster, such as pipedream.Cluster.flat(4)")
    chosen = {"schedule": schedule, "cost_model": cost_model, "strategy": strategy, "chunks": chunks, "cuts": cuts}
    search: dict[str, Any] = {"microbatches": microbatches, "in_flight": in_flight, "shape": shape}
    search |= {"update_delay": update_delay, "recompute": recompute}
    check_options(chosen | search)
    if cluster is None:
        cluster = _own_cluster(profile)
    if cost_model == "classic":
        return classic(profile, cluster, straight=shape == "straight", schedule=schedule, in_flight=in_flight).plan
    known = profile.profile() if isinstance(profile, GraphText) else profile
    _check_microbatches(known, microbatches)
    if strategy == "2bw":
        return _two_bw(known.parted(), cluster, microbatches, recompute)
    if schedule == "auto":
        search |= {"all_workers": all_workers, "allow_asynchronous": allow_asynchronous}
        return choose(known, cluster, **search).plan
    if schedules.properties_of(schedule).same_updates:
        known = known.parted()
    if schedules.layout_of(schedule) is not None:
        always = recompute == "always"
        return lay_out(known, cluster, schedule, chunks=chunks, microbatches=microbatches, recompute=always)
    if schedules.is_torch_csv(schedule):
        if isinstance(shape, tuple) or shape not in planner.SHAPES:
            planner.parse_counts(shape)  # refuses what are no counts
        return plan_of_file(known, cluster, schedule, microbatches, cuts, depth=in_flight, recompute=recompute)
    return _search(known, cluster, schedule, cuts=cuts, all_workers=all_workers, **search)


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
    found = planner.two_bw(
        profile,
        cluster,
        lambda m: occupancy_of("pipedream_2bw", m),
        microbatches=microbatches,
        recompute={"never": False, "auto": None, "always": True}[recompute],
    )
    return replace(found, schedule="pipedream_2bw")


@progress("planning")
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
) -> Plan:
    counts = None if isinstance(shape, str) and shape in planner.SHAPES else planner.parse_counts(shape)
    method = schedules.properties_of(schedule)
    if method.recomputes:
        recompute = "always"

    def planned(parts: int, shape: str | tuple[int, ...] = shape) -> Plan:
        rule = occupancy_of(schedule, parts)
        how: dict[str, Any] = {
            "microbatches": parts,
            "in_flight": in_flight,
            "update_delay": update_delay,
            "recompute": recompute,
        }
        if cuts is not None:
            return planner.manual_plan(profile, cluster, cuts, counts, occupancy=rule, **how)
        return planner.plan(profile, cluster, occupancy=rule, shape=shape, all_workers=all_workers, **how)

    best = planned(microbatches or 1)
    automatic = cuts is None and shape in ("any", "pipeline")
    if automatic and microbatches is not None and method.splits_minibatch and max(best.replicas) > microbatches:
        # Each replica takes part in each update, so a stage has at most as many as a minibatch has parts.
        best = _fewer_replicas(planned, microbatches, cluster.workers, one_stage=shape == "any", every=all_workers)
    found = for_method(best, profile, schedule, microbatches)
    if microbatches is None and found.overfull is not None:  # again, with the microbatches of the method
        found = for_method(planned(found.microbatches), profile, schedule, found.microbatches)
    return found


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


def choose(
    profile: Profile | GraphText,
    cluster: Cluster,
    *,
    microbatches: int | None = None,
    in_flight: str | tuple[int, ...] = "noam",
    shape: str | tuple[int, ...] = "any",
    update_delay: int = 0,
    all_workers: bool = False,
    recompute: str = "never",
    allow_asynchronous: bool = False,
    names: Sequence[str] = (),
) -> planner.Comparison:
    """Finds the method, stages, microbatches and depth with the fewest simulated seconds per minibatch.

    `plan` does this for the schedule 'auto'; this function also returns what was compared.

    Args:
        profile, cluster, all_workers, recompute: see `plan`.
        microbatches, in_flight, shape, update_delay: kept where given, otherwise searched.
        allow_asynchronous: also methods whose gradients are late.
        names: methods to compare; () compares all that are allowed.

    Raises:
        PlanError: no method works, or a name is not known.
    """
    return planner.choose(
        profile.profile() if isinstance(profile, GraphText) else profile,
        cluster,
        methods_of(names, allow_asynchronous=allow_asynchronous),
        score,
        occupancy_of,
        shape=shape,
        microbatches=microbatches,
        in_flight=in_flight,
        update_delay=update_delay,
        all_workers=all_workers,
        recompute=recompute,
    )


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
