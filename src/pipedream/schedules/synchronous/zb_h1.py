"""ZB-H1: 1F1B with split backwards, whose weight gradients fill the bubble; as many in flight as 1F1B's input stage.

Qi et al., Zero Bubble Pipeline Parallelism, ICLR 2024, section 2.1, figure 2. The previous stage waits for the input
gradient I; only the update waits for the weight gradient W, so stage s runs W s microbatches later and keeps W's inputs
until then. With f, i, w seconds a minibatch takes m (f + i + w) + (p - 1)(f + i - w).

    rank 0 | F0  F1  .   I0  W0  F2  I1  W1  F3  I2  W2  I3  W3'
    rank 1 | .   F0  I0  F1  I1  W0  F2  I2  W1  F3  I3  W2  W3'
"""

from collections.abc import Iterator

from pipedream.schedules import kit


def zb_h1(plan: kit.Plan, microbatches: int | None = None) -> kit.Schedule:
    """Returns ZB-H1, at the plan's depth; by default 4 microbatches per stage."""
    m = kit.choose_microbatches("zb_h1", plan, microbatches, 4 * len(plan.stages))

    def ops(stage_replica: kit.StageReplica) -> Iterator[kit.Op]:
        count = plan.in_flight[stage_replica.stage]
        deferred = max(plan.in_flight) - count  # so that all stages hold as many as the fullest

        def in_turn(mine: range) -> Iterator[kit.Op]:
            warmup = min(count, len(mine)) - 1
            return kit.one_forward_one_input_gradient(stage_replica, mine=mine, warmup=warmup, deferred=deferred)

        return kit.each_minibatch(plan, stage_replica, m, in_turn)

    claims = kit.Claims(
        assumption="straight pipeline, paper's depth, equal stages, messages cost nothing; "
        "m at least p, f = i = w (the makespan: w at most f and i)",
        least=lambda p: p,
        bubble=lambda p, m: (p - 1) / (3 * m + p - 1),
        in_flight=lambda p, m, s: min(p, m),
        makespan_s=lambda p, m, n, f, i, w: n * (m * (f + i + w) + (p - 1) * (f + i - w)),
    )
    return kit.flushing("zb_h1", plan, m, kit.one_stage_per_rank(plan.placement, ops), claims, kinds=kit.SPLIT)


METHODS = (
    kit.Method(
        zb_h1,
        since=2024,
        aliases=("zb1p",),
        properties=kit.MethodProperties(splits_backward=True, uses_depth=True),
        picture=kit.Picture("ZB-H1: 1F1B with split backwards, flush; m = 4", 4, 4),
        choose="When 1f1b is right, messages are fast, and matrix products dominate: layers whose backward is two "
        "products, one for the input and one for the weight. A third of 1f1b's bubble; every stage keeps as many "
        "activations as 1f1b's first. It gains nothing if the halves cannot be separated (compiled modules, fused "
        "recurrent layers).",
    ),
)
