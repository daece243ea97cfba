"""A plan at a depth, with the bytes that it then needs."""

from __future__ import annotations

from dataclasses import replace

from pipedream.core.errors import PlanError
from pipedream.core.plan import depth as depths
from pipedream.core.plan.memory import peers_of
from pipedream.core.plan.plan import Plan
from pipedream.core.units import format_bytes
from pipedream.planner.tables.search_space import SearchSpace


def apply_depth(space: SearchSpace, plan: Plan, in_flight: str | tuple[int, ...]) -> Plan:
    """Returns the plan at a depth ('auto': as deep as memory allows), with its peak bytes.

    Raises:
        PlanError: an unknown or ill-formed depth (`Plan.with_depth`), or a stage that does not fit.
    """
    if in_flight == "auto":
        low, high = apply_depth(space, plan, "noam"), plan.with_depth("full")
        most = [_find_most_in_flight(space, high, s) for s in range(len(high.stages))]
        while True:
            depth = depths.fitting(low.in_flight, high.in_flight, tuple(most), plan.replicas)
            deep = space.with_bytes(plan.with_depth(depth))
            if depth == low.in_flight or deep.first_stage_over_memory is None:
                return replace(deep, depth_mode="auto")
            most[0] = depth[0] - 1  # a deeper neighbour may send too many messages
    deep = space.with_bytes(plan.with_depth(in_flight))
    if (s := deep.first_stage_over_memory) is not None:
        stage, admitted, limit = deep.stages[s], deep.in_flight[s], deep.sites[s].memory_bytes or 0
        less = "--in-flight auto for the deepest that fits" if deep.depth_mode == "full" else "a smaller depth"
        raise PlanError(
            f"at depth {deep.depth_mode} stage {s} (layers {stage.first} to {stage.last - 1}) holds {admitted} "
            f"in flight and needs {format_bytes(stage.peak_bytes)}, a worker has {format_bytes(limit)}; ask for "
            f"{less}, cut it further, split minibatches into more microbatches or choose a schedule that holds "
            "fewer versions"
        )
    return deep


def _find_most_in_flight(space: SearchSpace, plan: Plan, s: int) -> int:
    recompute, limit = plan.stages[s].recompute, plan.sites[s].memory_bytes
    ends, admitted, count = space.ends(plan)[s], plan.in_flight[s], plan.replicas[s]
    peers = peers_of(plan.replicas, [occupancy.in_flight for occupancy in space.occupancy_rule.of_plan(plan)])[s]
    while limit is not None and admitted > 1:
        occupancy = space.stage_occupancy(admitted, plan.update_delay[s], count)
        memory = space.of_stages(plan)[s].memory(*ends, occupancy, peers, plan.update_delay[s], recompute, count)
        if memory.total_bytes <= limit:
            break
        admitted -= 1
    return admitted
