"""Interleaved 1F1B: each worker has v stages (chunks), p stages apart, so that the pipeline fills v times as fast.

Narayanan et al., Megatron-LM, SC 2021, section 2.2.2: bubble (p - 1)/(vm + p - 1), for v times the messages.

    rank 0 | 0F0  0F1  2F0  2F1  .    2B0  .    2B1' 0B0  0B1'
    rank 1 | .    1F0  1F1  3F0  3B0  3F1  3B1' 1B0  1B1'
"""

from collections.abc import Iterator

from pipedream.schedules import kit


def interleaved_1f1b(plan: kit.Plan, microbatches: int | None = None) -> kit.Schedule:
    """Returns interleaved 1F1B, on a `looped` plan; m is a multiple of p, by default 4 p."""
    p, chunks = plan.workers, kit.looped.check("interleaved_1f1b", plan)
    m = microbatches or 4 * p
    if m % p:
        raise kit.ScheduleError(
            f"schedule 'interleaved_1f1b' on {p} workers with {m} microbatches a minibatch: it takes them in groups of "
            f"{p}; split the minibatch into a multiple of that"
        )

    def ops(rank: int, mine: range) -> Iterator[kit.Op]:
        def find_op(i: int, *, is_backward: bool) -> kit.Op:
            """Returns the i-th forward or backward: p microbatches at one stage, then at the next."""
            group, i = divmod(i, p * chunks)
            chunk, k = divmod(i, p)
            stage = rank + p * (chunks - 1 - chunk if is_backward else chunk)
            return (kit.backward if is_backward else kit.forward)((stage, 0), mine[group * p + k])

        total = m * chunks
        warmup = min(2 * (p - 1 - rank) + (chunks - 1) * p, total)
        for i in range(total + warmup):
            if i < total:
                yield find_op(i, is_backward=False)
            if i >= warmup:
                yield find_op(i - warmup, is_backward=True)

    claims = kit.Claims(
        assumption="p workers with v equal stages each, messages cost nothing, m a multiple of p",
        bubble=lambda p, m: (p - 1) / (chunks * m + p - 1),
        in_flight=lambda p, m, s: min(2 * (p - 1 - s) + (chunks - 1) * p + 1, chunks * m),
    )
    return kit.flushing("interleaved_1f1b", plan, m, kit.minibatch_by_minibatch(m, ops), claims)


METHODS = (
    kit.Method(
        interleaved_1f1b,
        since=2021,
        aliases=("interleaved",),
        stage_order=kit.looped,
        properties=kit.MethodProperties(replicates_stages=False),
        picture=kit.Picture("Interleaved 1F1B: two stages (s) a worker, m = 4", 4, 8),
        choose="When 1f1b's bubble is too large and the minibatch cannot be split further: v stages per worker make it "
        "nearly v times smaller, for v times the messages. On slow links these cost more than the bubble saves: "
        "simulate both.",
    ),
)
