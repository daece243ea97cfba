"""GPipe: all forwards of a minibatch, then all its backwards, then the update.

Huang et al., NeurIPS 2019, section 2.3; bubble (p - 1)/(m + p - 1).

    rank 0 | F0  F1  F2  F3  .   .   B0  B1  B2  B3'
    rank 1 | .   F0  F1  F2  F3  B0  B1  B2  B3'
"""

from collections.abc import Iterator

from pipedream.schedules import kit


def gpipe(plan: kit.Plan, microbatches: int | None = None) -> kit.Schedule:
    """Returns GPipe; by default 4 microbatches per stage (m >= 4 p makes the bubble negligible)."""
    m = kit.choose_microbatches("gpipe", plan, microbatches, 4 * len(plan.stages))

    def ops(stage_replica: kit.StageReplica) -> Iterator[kit.Op]:
        def all_forward_all_backward(mine: range) -> Iterator[kit.Op]:
            yield from (kit.forward(stage_replica, k) for k in mine)
            yield from (kit.backward(stage_replica, k) for k in mine)

        return kit.each_minibatch(plan, stage_replica, m, all_forward_all_backward)

    claims = kit.Claims(bubble=lambda p, m: (p - 1) / (m + p - 1), in_flight=lambda p, m, s: m)
    return kit.flushing("gpipe", plan, m, kit.one_stage_per_rank(plan.placement, ops), claims)


METHODS = (
    kit.Method(
        gpipe,
        since=2018,
        properties=kit.MethodProperties(),
        picture=kit.Picture("GPipe: all forwards, then all backwards, flush; m = 4", 4, 8),
        choose="When a minibatch splits into many microbatches (m at least 4 p) and memory is plentiful, or for an "
        "order that is easy to follow. The result is that of one process; 1f1b gives the same in the same time, with "
        "less memory.",
    ),
)
