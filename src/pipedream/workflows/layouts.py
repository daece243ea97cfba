"""Planning for methods that lay out the stages themselves: a row of stages is planned, then put on the workers.

Methods with several stages per worker give all workers the same number of stages, so equal stages keep them equally
busy: the row is the planner's straight pipeline on as many workers as there are stages, over the cluster's slowest
links. A file in PyTorch's notation says which worker runs which stage.
"""

from __future__ import annotations

from dataclasses import replace

from pipedream import planner, schedules
from pipedream.core.errors import PlanError
from pipedream.core.hardware.cluster import Cluster
from pipedream.core.model.profile import Profile
from pipedream.core.plan import depth
from pipedream.core.plan.plan import Plan
from pipedream.core.units import format_bytes
from pipedream.plan_request import PlanRequest
from pipedream.workflows.methods import adapt_plan_to_method, check_no_remote_stages, occupancy_of


def lay_out_stages(profile: Profile, request: PlanRequest) -> Plan:
    """Plans for a method of `schedules.LAYOUTS`, on all workers of a cluster, which must be equally fast.

    Args:
        profile: `Profile.without_tied_groups`, since these methods may hold a weight in several stages.

    Raises:
        PlanError: the model has too few cut points, workers differ in speed, or stages do not fit their memory.
        ScheduleError: the method does not work with these workers, microbatches or chunks.
    """
    schedule, chunks, cluster = request.schedule, request.chunks, request.workers_and_links
    schedules.check_chunks(schedule, chunks)
    layout = schedules.layout_of(schedule)
    assert layout is not None, f"{schedule} has one stage a worker"
    if len(set(cluster.speeds)) > 1:
        raise PlanError(
            f"schedule {schedule!r} was asked for workers that are not equally fast; its stages are laid out for equal "
            "ones. Plan for another method, or partition by hand and name the workers in the plan's order"
        )
    p = cluster.workers
    order = layout.order(p, chunks or layout.chunks or 1)
    count = layout.stages(p, chunks)
    row = Cluster.flat(count, cluster.bandwidth_bytes_per_s, cluster.latency_s)
    straight = planner.plan(profile, row, versions=lambda in_flight, update_delay: 1, shape="straight")
    recompute = request.recompute == "always"
    stages = tuple(replace(stage, replicas=layout.replicas, recompute=recompute) for stage in straight.stages)
    note = f"fastest straight cut into {count} stages, {len(order) // p} on each of {p} workers: {layout.words}"
    plan = replace(
        straight,
        stages=stages,
        in_flight=depth.noam((layout.replicas,) * count),
        update_delay=(0,) * count,
        cluster=cluster,
        worker_order=order,
        bound_s=0.0,
    )
    built = schedules.build(schedule, plan, request.microbatches)
    plan, m = built.plan, built.microbatches  # the method may let stages recompute
    if 1 < profile.batch < m:
        raise PlanError(
            f"schedule {schedule!r} on {p} workers splits a minibatch into {m} microbatches, but one has "
            f"{profile.batch} samples; profile larger minibatches, or ask for fewer microbatches"
        )
    plan = replace(plan, schedule=built.name, microbatches=m, note=note)
    space = planner.SearchSpace.of(profile, cluster, occupancy=occupancy_of(schedule, m), microbatches=m)
    plan = space.with_bytes(plan)
    _check_worker_memory(plan)
    check_no_remote_stages(replace(built, plan=plan))
    return plan


def plan_from_file(profile: Profile, request: PlanRequest) -> Plan:
    """Returns a plan with the stages of a file in PyTorch's notation, on the workers that the file gives them.

    The slowest stage is as fast as it can be. Where a worker runs several stages, that need not be the fastest
    worker, and the sum of what its stages need, an upper bound, must fit its memory. Receives are posted ahead by the
    request's depth; the order is the file's.

    Raises:
        ScheduleError: the file cannot be used, or has another number of microbatches.
        PlanError: the cluster has another number of workers, or nothing fits.
    """
    name, cluster, recompute = request.schedule, request.workers_and_links, request.recompute
    if request.shape not in planner.SHAPES:
        planner.parse_counts(request.shape)  # raises for what are no counts
    read = schedules.load_torch_csv(name)
    read = schedules.build(name, read.plan, request.microbatches)
    stages, workers = len(read.plan.stages), read.plan.workers
    if cluster.workers != workers:
        raise PlanError(
            f"schedule {name!r} has {workers} ranks, and a plan for {cluster.workers} workers was asked for; ask for "
            f"{workers}"
        )
    parts, in_flight = read.microbatches, request.in_flight
    line = Cluster.flat(stages, cluster.bandwidth_bytes_per_s) if read.plan.worker_order else cluster
    occupancy = occupancy_of(name)
    if request.cuts is None:
        plan = planner.plan(
            profile,
            line,
            occupancy=occupancy,
            microbatches=parts,
            in_flight=in_flight,
            shape="straight",
            recompute=recompute,
        )
    else:
        plan = planner.manual_plan(
            profile,
            line,
            request.cuts,
            occupancy=occupancy,
            microbatches=parts,
            in_flight=in_flight,
            recompute=recompute,
        )
    if len(plan.stages) != stages:
        raise PlanError(
            f"schedule {name!r} has {stages} stages, the cuts make {len(plan.stages)}; give one cut between each two"
        )
    if read.plan.worker_order:
        plan = replace(
            plan, cluster=cluster, worker_order=read.plan.worker_order, bound_s=0.0, note="cut as a straight pipeline"
        )
        _check_worker_memory(plan)
    return adapt_plan_to_method(plan, profile, name, parts)


def _check_worker_memory(plan: Plan) -> None:
    """Raises PlanError if all stages of a worker together do not fit its memory."""
    if (s := plan.first_stage_over_memory) is None:
        return
    worker = max(plan.workers_of(s), key=plan.worker_bytes.__getitem__)
    stages = [str(stage) for stage in range(len(plan.stages)) if worker in plan.workers_of(stage)]
    raise PlanError(
        f"stages {', '.join(stages)} of worker {worker} need up to {format_bytes(plan.worker_bytes[worker])} together, "
        f"it has {format_bytes(plan.cluster.memories[worker] or 0)}; use recomputation, smaller microbatches, more "
        "workers or another method"
    )
