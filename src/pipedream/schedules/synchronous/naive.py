"""Naive model parallelism: one microbatch at a time; a worker waits while the others work.

The baseline of PipeDream (SOSP 2019, figure 2).

    rank 0 | F0  .   .   B0'
    rank 1 | .   F0  B0'
"""

from __future__ import annotations

from collections.abc import Iterator

from pipedream.core.plan.placement import StageReplica
from pipedream.core.plan.plan import Plan
from pipedream.core.schedule.op import Op
from pipedream.core.schedule.properties import MethodProperties
from pipedream.core.schedule.schedule import Claims, Schedule
from pipedream.schedules.idioms import (
    flushed,
    flushing,
    one_forward_one_backward,
    one_stage_per_rank,
    share_out,
)
from pipedream.schedules.method import Method, Picture

__all__ = ["METHODS", "naive"]


def naive(plan: Plan, microbatches: int | None = None) -> Schedule:
    """Returns naive model parallelism; a minibatch is not split unless asked."""
    m = share_out("naive", plan, microbatches, 1)

    def ops(stage_replica: StageReplica) -> Iterator[Op]:
        def one_at_a_time(mine: range) -> Iterator[Op]:
            return one_forward_one_backward(stage_replica, mine=mine, warmup=0)

        return flushed(stage_replica, replicas=plan.replicas[stage_replica.stage], microbatches=m, ops=one_at_a_time)

    return flushing(
        "naive",
        plan,
        m,
        one_stage_per_rank(plan.placement, ops),
        Claims(
            # Nothing overlaps at all: one of p workers works. Also true for unequal times of F and B.
            bubble=lambda p, m: (p - 1) / p,
            in_flight=lambda p, m, s: 1,
            staleness=lambda p, m, s: 0,
            versions=lambda p, m, s: 1,
        ),
    )


METHODS = (
    Method(
        naive,
        since=0,
        properties=MethodProperties(),
        picture=Picture("Naive model parallelism, m = 1", 1, 4),
        choose="Never for speed: it is the baseline. It is right for a model that does not fit one worker and is run "
        "seldom, and for finding out whether an error comes from the pipeline or from the model.",
    ),
)
