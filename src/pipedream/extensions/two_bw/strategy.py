"""PipeDream-2BW's planner: equal replicas of all stages, and the microbatches, by the paper's own cost model.

Narayanan et al., ICML 2021, section 3.3. There are d stages with w replicas each, and b samples in a microbatch. With
T_comp a stage's seconds for a microbatch (with recomputation the forward again, which is the paper's c_extra = 4/3 if a
backward takes twice a forward), T_comm those of the messages that it receives for one, and m(b) = B / (w b) the
microbatches of a replica in a minibatch of B samples:

    t = max over stages i of max(T_comp_i + sum over j of T_comm_ji,  T_allreduce_i / m(b))
    throughput = w b / t,  m(b) >= d

Unlike in this library's own model, messages do not overlap with compute, all-reduces do, and an update takes no time.
The memory is the paper's, 2 |W| / d + d A / d + d A_in, with recomputation 2 |W| / d + A / d + d A_in, computed stage
by stage and with gradients and optimizer state (`core.schedule.stage_memory`). The paper cuts a model of equal blocks
evenly; here the cut into d stages is the one whose slowest stage is fastest (`search`).
"""

from collections.abc import Sequence
from dataclasses import replace

from pipedream.core.errors import PlanError
from pipedream.core.model.profile import Profile
from pipedream.core.plan.cost import transfer_s
from pipedream.core.plan.plan import Plan
from pipedream.core.units import format_bytes, format_seconds
from pipedream.plan_request import PlanRequest
from pipedream.planner import Comparison
from pipedream.planner.search import PlanSearch
from pipedream.planner.tables.search_space import SearchSpace
from pipedream.workflows.methods import space_of
from pipedream.workflows.stage_search import compare_alone

NAMES = ("2bw",)
_METHOD = "pipedream_2bw"


def two_bw_s(plan: Plan, microbatches: int) -> float:
    """Returns the paper's seconds of a minibatch, t m(b), for a plan of equal replicas.

    Args:
        microbatches: number per minibatch, over all replicas: w m(b).
    """
    per_replica = microbatches / plan.replicas[0]
    slots_s = []
    links = [
        plan.cluster.link(plan.cluster.reach(*plan.workers_of(s), *plan.workers_of(s + 1)))
        for s in range(len(plan.stages) - 1)
    ]
    sends_s = [
        transfer_s(stage.output_bytes * plan.costs.message_share / microbatches, *link)
        for stage, link in zip(plan.stages, links, strict=False)
    ]
    for stage, site, sum_s, before_s, after_s in zip(
        plan.stages, plan.costs.sites, plan.costs.sync_s, [0.0, *sends_s], [*sends_s, 0.0], strict=True
    ):
        forward_s, backward_s = stage.split_s(microbatches)
        compute_s = (forward_s * (2 if stage.recompute else 1) + backward_s) / site.speed
        slots_s.append(max(compute_s + before_s + after_s, sum_s / per_replica))
    return float(max(slots_s)) * per_replica


def takes(request: PlanRequest) -> bool:
    """Returns whether a request names this planner."""
    return request.strategy in NAMES


def compare(profile: Profile, request: PlanRequest, names: Sequence[str] = ()) -> Comparison:
    """Returns the plan of `plan_by_paper`; its method is one."""
    return compare_alone(plan_by_paper(profile, request), request)


def plan_by_paper(profile: Profile, request: PlanRequest) -> Plan:
    """Finds the replicas w, the stages d and the microbatches with the greatest throughput by the paper's model.

    Ties go to plans without recomputation, then to fewer stages, then to fewer, larger microbatches. Microbatches are
    counted over all replicas; if none are given, w d, 2 w d, ... up to the samples of a minibatch are tried.

    Raises:
        PlanError: no plan fits the memory, or none can have this number of microbatches.
    """
    profile, cluster = profile.without_tied_groups(), request.workers_and_links
    choices, microbatches = request.choices, request.microbatches
    workers, max_microbatches = cluster.workers, max(profile.batch, cluster.workers)
    candidates: list[tuple[tuple[float, bool, int, int], Plan]] = []
    least_bytes: list[int] = []
    for stages in (count for count in range(1, workers + 1) if workers % count == 0):
        w = workers // stages
        if stages > len(SearchSpace.of(profile, cluster).positions) - 1:
            continue
        try:
            search = PlanSearch.of(profile, cluster.without_memory_limits(), choices=choices)
            base = replace(search.best((w,) * stages), cluster=cluster)
        except PlanError:  # no chain of the graph's cuts has this many stages
            continue
        splits = [workers << power for power in range((max_microbatches // workers).bit_length())]
        for m in splits if microbatches is None else [microbatches]:
            if m % w or m // w < stages:
                continue
            space = space_of(profile, cluster, choices, _METHOD, m)
            for recomputes in choices.recomputing:
                rows = tuple(replace(stage, recompute=recomputes) for stage in base.stages)
                candidate = space.with_bytes(replace(base, stages=rows, microbatches=m))
                if candidate.first_stage_over_memory is None:
                    candidates.append(((two_bw_s(candidate, m), recomputes, stages, m), candidate))
                else:
                    least_bytes.append(max(stage.peak_bytes for stage in candidate.stages))
    if not candidates and least_bytes:
        raise PlanError(
            f"no plan of PipeDream-2BW's planner fits: the least that any needs on its fullest worker is "
            f"{format_bytes(min(least_bytes))}; give more memory or workers, more microbatches, or let it recompute"
        )
    if not candidates:
        raise PlanError(
            f"PipeDream-2BW's planner was asked for {microbatches} microbatches on {workers} workers; replicas need "
            "equal shares, of at least as many as there are stages; ask for a multiple of the workers"
        )
    (seconds, *_), best = min(candidates, key=lambda row: row[0])
    note = (
        f"PipeDream-2BW's planner: {format_seconds(seconds)} per minibatch in {best.microbatches} microbatches by its "
        f"own cost model, the least of {len(candidates)} ways with equal replicas"
    )
    return replace(best, note=note, bound_s=0.0, schedule=_METHOD)  # nothing is proved by that model
