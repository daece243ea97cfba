"""A plan that continues without one of its workers."""

from dataclasses import replace

from pipedream.core.plan import depth
from pipedream.core.plan.plan import Plan


def drop_worker(plan: Plan, rank: int) -> Plan | None:
    """Returns the plan with one replica fewer in the stages of a rank; None if one of them has no other replica.

    The stages keep their layers and predictions. In-flight counts that a user gave, or that memory limited, are raised
    where they are not legal.
    """
    if plan.ranks > plan.workers:  # a mesh that loses a rank cannot go on
        return None
    order = plan.worker_order or tuple(range(plan.workers))
    worker = sorted(set(order))[rank]
    stages = range(len(plan.stages))
    counts = tuple(plan.replicas[s] - (worker in plan.workers_of(s)) for s in stages)
    if min(counts) < 1:
        return None
    delays = tuple(plan.update_delay[s] if counts[s] > 1 and len(stages) > 1 else 0 for s in stages)
    reduced = replace(
        plan,
        stages=tuple(replace(stage, replicas=count) for stage, count in zip(plan.stages, counts, strict=True)),
        in_flight=depth.raise_to_legal(plan.in_flight, counts, delays),
        update_delay=delays,
        cluster=plan.cluster.without(worker),
        worker_order=tuple(w - (w > worker) for w in order if w != worker) if plan.worker_order else (),
        bound_s=0.0,
        note="",
        choices=plan.choices.on_replicas(counts),
    )
    return reduced.with_depth(plan.depth_mode) if plan.depth_mode in ("noam", "full") else reduced
