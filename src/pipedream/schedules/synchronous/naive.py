"""Naive model parallelism: one microbatch at a time; a worker waits while the others work.

The baseline of PipeDream (SOSP 2019, figure 2).

    rank 0 | F0  .   .   B0'
    rank 1 | .   F0  B0'
"""

from __future__ import annotations

from collections.abc import Iterator

from pipedream.schedules.kit import (
    Claims,
    Method,
    MethodProperties,
    Op,
    Picture,
    Plan,
    Schedule,
    StageReplica,
    choose_microbatches,
    each_minibatch,
    flushing,
    one_forward_one_backward,
    one_stage_per_rank,
)


def naive(plan: Plan, microbatches: int | None = None) -> Schedule:
    """Returns naive model parallelism; by default a minibatch is not split."""
    m = choose_microbatches("naive", plan, microbatches, 1)

    def ops(stage_replica: StageReplica) -> Iterator[Op]:
        def one_at_a_time(mine: range) -> Iterator[Op]:
            return one_forward_one_backward(stage_replica, mine=mine, warmup=0)

        return each_minibatch(plan, stage_replica, m, one_at_a_time)

    # One of p workers works at any time, also if forwards and backwards take different times.
    claims = Claims(bubble=lambda p, m: (p - 1) / p, in_flight=lambda p, m, s: 1)
    return flushing("naive", plan, m, one_stage_per_rank(plan.placement, ops), claims)


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
