"""Naive model parallelism: one microbatch at a time; one worker computes while the others wait.

The baseline of PipeDream (SOSP 2019, figure 2).

    rank 0 | F0  .   .   B0'
    rank 1 | .   F0  B0'
"""

from collections.abc import Iterator

from pipedream.schedules import kit


def naive(plan: kit.Plan, microbatches: int | None = None) -> kit.Schedule:
    """Returns naive model parallelism; by default a minibatch is not split."""
    m = kit.choose_microbatches("naive", plan, microbatches, 1)

    def ops(stage_replica: kit.StageReplica) -> Iterator[kit.Op]:
        def one_at_a_time(mine: range) -> Iterator[kit.Op]:
            return kit.one_forward_one_backward(stage_replica, mine=mine, warmup=0)

        return kit.each_minibatch(plan, stage_replica, m, one_at_a_time)

    # One of p workers works at any time, whatever the times of forwards and backwards.
    claims = kit.Claims(bubble=lambda p, m: (p - 1) / p, in_flight=lambda p, m, s: 1)
    return kit.flushing("naive", plan, m, kit.one_stage_per_rank(plan.placement, ops), claims)


METHODS = (
    kit.Method(
        naive,
        since=0,
        properties=kit.MethodProperties(),
        picture=kit.Picture("Naive model parallelism, m = 1", 1, 4),
        choose="Never for speed: it is the baseline. Use it for a model that does not fit one worker and rarely runs, "
        "or to find out whether an error comes from the pipeline or the model.",
    ),
)
