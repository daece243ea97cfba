"""GPipe: all forwards of a minibatch, then all its backwards, then the update.

Huang et al., NeurIPS 2019, section 2.3; bubble (p - 1)/(m + p - 1).

    rank 0 | F0  F1  F2  F3  .   .   B0  B1  B2  B3'
    rank 1 | .   F0  F1  F2  F3  B0  B1  B2  B3'
"""

from __future__ import annotations

from collections.abc import Iterator

from pipedream.core.plan.placement import StageReplica
from pipedream.core.plan.plan import Plan
from pipedream.core.schedule.op import Op
from pipedream.core.schedule.properties import MethodProperties
from pipedream.core.schedule.schedule import Claims, Schedule
from pipedream.schedules.idioms import backward, flushed, flushing, forward, one_stage_per_rank, share_out
from pipedream.schedules.method import Method, Picture

__all__ = ["METHODS", "gpipe"]


def gpipe(plan: Plan, microbatches: int | None = None) -> Schedule:
    """Returns GPipe; 4 microbatches a stage unless asked (the paper: m >= 4 p makes the bubble negligible)."""
    m = share_out("gpipe", plan, microbatches, 4 * len(plan.stages))

    def ops(stage_replica: StageReplica) -> Iterator[Op]:
        def all_forward_all_backward(mine: range) -> Iterator[Op]:
            yield from (forward(stage_replica, k) for k in mine)
            yield from (backward(stage_replica, k) for k in mine)

        return flushed(
            stage_replica, replicas=plan.replicas[stage_replica.stage], microbatches=m, ops=all_forward_all_backward
        )

    return flushing(
        "gpipe",
        plan,
        m,
        one_stage_per_rank(plan.placement, ops),
        Claims(
            bubble=lambda p, m: (p - 1) / (m + p - 1),
            in_flight=lambda p, m, s: m,
            staleness=lambda p, m, s: 0,
            versions=lambda p, m, s: 1,
        ),
    )


METHODS = (
    Method(
        gpipe,
        since=2018,
        properties=MethodProperties(),
        picture=Picture("GPipe: all forwards, then all backwards, flush; m = 4", 4, 8),
        choose="When a minibatch splits into many microbatches (m at least 4 p) and memory is plentiful, or when an "
        "order is wanted that is easy to follow. The result is that of one process; 1f1b gives it too, in the "
        "same time, with less memory.",
    ),
)
