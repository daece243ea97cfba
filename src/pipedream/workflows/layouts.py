"""Planning for methods with several stages per worker: a row of stages is cut, then laid out over the workers.

All workers get the same number of stages, so equal stages keep them equally busy: the row is the planner's straight
pipeline on as many workers as there are stages, over the cluster's slowest links.
"""

from __future__ import annotations

from dataclasses import replace

from pipedream import planner, schedules
from pipedream.core.errors import PlanError
from pipedream.core.hardware.cluster import Cluster
from pipedream.core.model.profile import Profile
from pipedream.core.plan import depth
from pipedream.core.plan.plan import Plan
from pipedream.workflows.methods import check_memory, check_no_remote_stages, occupancy_of


def lay_out_stages(
    profile: Profile,
    cluster: Cluster,
    schedule: str,
    *,
    chunks: int | None = None,
    microbatches: int | None = None,
    recompute: bool = False,
) -> Plan:
    """Plans for a method of `schedules.LAYOUTS`, on all workers of a cluster, which must be equally fast.

    Args:
        profile: `Profile.without_tied_groups`, since these methods may hold a weight in several stages.
        chunks: stages per worker; None for the method's default.

    Raises:
        PlanError: the model has too few places to cut, workers differ in speed, or stages do not fit their memory.
        ScheduleError: the method does not work with these workers, microbatches or chunks.
    """
    schedules.check_chunks(schedule, chunks)
    layout = schedules.layout_of(schedule)
    assert layout is not None, f"{schedule} has one stage a worker"
    if len(set(cluster.speeds)) > 1:
        raise PlanError(
            f"schedule {schedule!r} was asked for workers that are not equally fast; its stages are laid out for equal "
            "ones. Plan for another method, or cut by hand and name the workers in the plan's order"
        )
    p = cluster.workers
    order = layout.order(p, chunks or layout.chunks or 1)
    count = layout.stages(p, chunks)
    row = Cluster.flat(count, cluster.bandwidth_bytes_per_s, cluster.latency_s)
    cut = planner.plan(profile, row, versions=lambda in_flight, update_delay: 1, shape="straight")
    replicas = (layout.replicas,) * count
    stages = tuple(replace(stage, replicas=layout.replicas, recompute=recompute) for stage in cut.stages)
    note = f"fastest straight cut into {count} stages, {len(order) // p} on each of {p} workers: {layout.words}"
    plan = replace(
        cut,
        stages=stages,
        in_flight=depth.noam(replicas),
        update_delay=(0,) * count,
        cluster=cluster,
        order=order,
        bound_s=0.0,
    )
    built = schedules.build(schedule, plan, microbatches)
    plan, m = built.plan, built.microbatches  # the method may let stages recompute
    if 1 < profile.batch < m:
        raise PlanError(
            f"schedule {schedule!r} on {p} workers splits a minibatch into {m} microbatches, but one has "
            f"{profile.batch} samples; profile larger minibatches, or ask for fewer microbatches"
        )
    plan = replace(plan, schedule=built.name, microbatches=m, note=note)
    space = planner.SearchSpace.of(profile, cluster, occupancy=occupancy_of(schedule, m), microbatches=m)
    plan = space.with_bytes(plan)
    check_memory(plan)
    check_no_remote_stages(replace(built, plan=plan))
    return plan
