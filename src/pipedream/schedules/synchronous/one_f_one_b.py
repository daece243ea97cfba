"""1F1B with a flush: PipeDream-Flush, DAPPLE. GPipe's time and result with fewer activations.

Narayanan et al., PipeDream-2BW, ICML 2021, section 3.2; bubble (p - 1)/(m + p - 1), min(p - s, m) in flight.

    rank 0 | F0  F1  .   B0  F2  B1  F3  B2  .   B3'
    rank 1 | .   F0  B0  F1  B1  F2  B2  F3  B3'
"""

from collections.abc import Iterator

from pipedream.schedules import kit


def one_f_one_b(plan: kit.Plan, microbatches: int | None = None) -> kit.Schedule:
    """Returns 1F1B with a flush, at the plan's depth; by default 4 microbatches per stage."""
    m = kit.choose_microbatches("1f1b", plan, microbatches, 4 * len(plan.stages))

    def ops(stage_replica: kit.StageReplica) -> Iterator[kit.Op]:
        def in_turn(mine: range) -> Iterator[kit.Op]:
            # A replica has fewer warm-up forwards than microbatches of this minibatch: one runs in turn.
            warmup = min(plan.in_flight[stage_replica.stage] - 1, max(len(mine) - 1, 0))
            return kit.one_forward_one_backward(stage_replica, mine=mine, warmup=warmup)

        return kit.each_minibatch(plan, stage_replica, m, in_turn)

    claims = kit.Claims(bubble=lambda p, m: (p - 1) / (m + p - 1), in_flight=lambda p, m, s: min(p - s, m))
    return kit.flushing("1f1b", plan, m, kit.one_stage_per_rank(plan.placement, ops), claims)


METHODS = (
    kit.Method(
        one_f_one_b,
        name="1f1b",
        since=2021,
        aliases=("pipedream_flush", "dapple"),
        properties=kit.MethodProperties(uses_depth=True),
        picture=kit.Picture("1F1B with a flush, m = 4", 4, 8),
        choose="The first choice if the result must equal that of one process: GPipe's bubble, with at most p "
        "microbatches in flight per stage instead of m. Split the minibatch as finely as the workers stay efficient.",
    ),
)
