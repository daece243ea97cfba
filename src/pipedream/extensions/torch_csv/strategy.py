"""Planning for a file: the stages and the workers of a plan are those of the file."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from pipedream import planner, schedules
from pipedream.core.errors import PlanError
from pipedream.core.hardware.cluster import Cluster
from pipedream.core.model.profile import Profile
from pipedream.core.plan.plan import Plan
from pipedream.plan_request import PlanRequest
from pipedream.workflows.methods import adapt_plan_to_method, check_worker_memory, occupancy_of
from pipedream.workflows.stage_search import compare_alone

NAMES = ()


def takes(request: PlanRequest) -> bool:
    """Returns whether a request names a file."""
    return schedules.is_schedule_file(request.schedule)


def compare(profile: Profile, request: PlanRequest, names: Sequence[str] = ()) -> planner.Comparison:
    """Returns the plan of `plan_stages`. Its stages may hold a weight together, for a file flushes."""
    return compare_alone(plan_stages(profile.without_tied_groups(), request), request)


def plan_stages(profile: Profile, request: PlanRequest) -> Plan:
    """Returns a plan with the stages of a file in PyTorch's notation, on the workers that the file gives them.

    The slowest stage is as fast as it can be. Where a worker runs several stages, that need not be the fastest
    worker, and the sum of what its stages need, an upper bound, must fit its memory. Receives are posted ahead by the
    request's depth; the order is the file's.

    Raises:
        ScheduleError: the file cannot be used, or has another number of microbatches.
        PlanError: the cluster has another number of workers, or nothing fits.
    """
    name, cluster = request.schedule, request.workers_and_links
    if request.shape not in planner.SHAPES:
        planner.parse_counts(request.shape)  # raises if these are no counts
    parsed = schedules.load_schedule(name)
    parsed = schedules.build(name, parsed.plan, request.microbatches)
    stages, workers = len(parsed.plan.stages), parsed.plan.workers
    if cluster.workers != workers:
        raise PlanError(
            f"schedule {name!r} has {workers} ranks, and a plan for {cluster.workers} workers was asked for; ask for "
            f"{workers}"
        )
    parts = parsed.microbatches
    line = Cluster.flat(stages, cluster.bandwidth_bytes_per_s) if parsed.plan.worker_order else cluster
    space: dict[str, Any] = {"occupancy": occupancy_of(name), "microbatches": parts}
    space |= {"choices": request.choices}
    if request.cuts is None:
        plan = planner.PlanSearch.of(profile, line, **space).best("straight", request.in_flight)
    else:
        plan = planner.manual_plan(profile, line, request.cuts, in_flight=request.in_flight, **space)
    if len(plan.stages) != stages:
        raise PlanError(
            f"schedule {name!r} has {stages} stages, the cuts make {len(plan.stages)}; give one cut between each two"
        )
    if parsed.plan.worker_order:
        plan = replace(
            plan, cluster=cluster, worker_order=parsed.plan.worker_order, bound_s=0.0, note="cut as a straight pipeline"
        )
        check_worker_memory(plan)
    return adapt_plan_to_method(profile, request.choices, name, plan, parts)
