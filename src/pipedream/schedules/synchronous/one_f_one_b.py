"""1F1B with a flush: PipeDream-Flush, DAPPLE. GPipe's time and result with fewer activations.

Narayanan et al., PipeDream-2BW, ICML 2021, section 3.2; bubble (p - 1)/(m + p - 1), min(p - s, m) in flight.

    rank 0 | F0  F1  .   B0  F2  B1  F3  B2  .   B3'
    rank 1 | .   F0  B0  F1  B1  F2  B2  F3  B3'
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


def one_f_one_b(plan: Plan, microbatches: int | None = None) -> Schedule:
    """Returns 1F1B with a flush, at the plan's depth; by default 4 microbatches per stage."""
    m = choose_microbatches("1f1b", plan, microbatches, 4 * len(plan.stages))

    def ops(stage_replica: StageReplica) -> Iterator[Op]:
        def in_turn(mine: range) -> Iterator[Op]:
            # A replica has no more warm-up forwards than it has microbatches of this minibatch, less the one in turn.
            warmup = min(plan.in_flight[stage_replica.stage] - 1, max(len(mine) - 1, 0))
            return one_forward_one_backward(stage_replica, mine=mine, warmup=warmup)

        return each_minibatch(plan, stage_replica, m, in_turn)

    claims = Claims(bubble=lambda p, m: (p - 1) / (m + p - 1), in_flight=lambda p, m, s: min(p - s, m))
    return flushing("1f1b", plan, m, one_stage_per_rank(plan.placement, ops), claims)


METHODS = (
    Method(
        one_f_one_b,
        name="1f1b",
        since=2021,
        aliases=("pipedream_flush", "dapple"),
        properties=MethodProperties(uses_depth=True),
        picture=Picture("1F1B with a flush, m = 4", 4, 8),
        choose="The first choice where the result must be that of one process: GPipe's bubble, and a stage holds at "
        "most p microbatches instead of m. Split the minibatch as finely as the workers stay efficient.",
    ),
)
