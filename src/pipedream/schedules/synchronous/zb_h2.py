"""ZB-H2: 1F1B at twice the depth with split backwards: no worker waits between its first op and its last.

Qi et al., Zero Bubble Pipeline Parallelism, ICLR 2024, section 2.2, figure 3. Stage s runs 2(p - s) - 1 forwards
before its first input gradient I, and weight gradients W 2s microbatches later: 2p - 1 are in flight until their W. A
stage continues with the next minibatch at once, so n of them take n m (f + i + w) + (p - 1) f.

    rank 0 | F0  F1  F2  I0  W0  F3  I1  W1  I2  W2  I3  W3'
    rank 1 | .   F0  I0  F1  I1  F2  I2  W0  F3  I3  W1  W2  W3'

The paper's remedy for clipping by the global norm, to update first and roll back if that was wrong, is not
implemented.
"""

from collections.abc import Iterator

from pipedream.schedules import kit


def zb_h2(plan: kit.Plan, microbatches: int | None = None) -> kit.Schedule:
    """Returns ZB-H2, with twice the warm-up of the plan's depth; by default 4 microbatches per stage."""
    m = kit.choose_microbatches("zb_h2", plan, microbatches, 4 * len(plan.stages))
    # A flush has no update delay, and in-flight counts that need one may not be legal once they are doubled.
    warmups = [
        count - 1 for count in kit.raise_to_legal(tuple(2 * count - 1 for count in plan.in_flight), plan.replicas)
    ]

    def ops(stage_replica: kit.StageReplica) -> Iterator[kit.Op]:
        warmup = warmups[stage_replica.stage]
        deferred = max(warmups) - warmup  # so that all stages hold as many as the fullest

        def in_turn(mine: range) -> Iterator[kit.Op]:
            first = min(warmup, len(mine) - 1)
            return kit.one_forward_one_input_gradient(stage_replica, mine=mine, warmup=first, deferred=deferred)

        return kit.each_minibatch(plan, stage_replica, m, in_turn)

    claims = kit.Claims(
        assumption="straight pipeline, paper's depth, equal stages, messages cost nothing; "
        "m at least 2p - 1, f = i = w (the makespan: i <= f <= w)",
        least=lambda p: 2 * p - 1,
        bubble=lambda p, m: (p - 1) / (3 * m + p - 1),
        in_flight=lambda p, m, s: min(2 * p - 1, m),
        makespan_s=lambda p, m, n, f, i, w: n * m * (f + i + w) + (p - 1) * f,
    )
    return kit.flushing("zb_h2", plan, m, kit.one_stage_per_rank(plan.placement, ops), claims, kinds=kit.SPLIT)


METHODS = (
    kit.Method(
        zb_h2,
        since=2024,
        aliases=("zb2p",),
        properties=kit.MethodProperties(splits_backward=True, uses_depth=True),
        picture=kit.Picture("ZB-H2: twice the depth, two minibatches; m = 7", 7, 14),
        choose="When there is memory for twice as many microbatches. Over one minibatch its bubble is zb_h1's, but "
        "workers start and end one after the other and continue with the next minibatch without waiting: over many "
        "minibatches the bubble vanishes. Not with clipping by the global norm, for which all stages wait at each "
        "update.",
    ),
)
