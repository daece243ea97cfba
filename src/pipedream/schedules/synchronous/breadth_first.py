"""Breadth-first: each worker has v stages, p stages apart, and runs all microbatches through one before the next.

Lamy-Poirier, Breadth-First Pipeline Parallelism, MLSys 2023, section 4.1: the bubble of interleaved 1F1B for any
m >= p, with the activations of GPipe.

    rank 0 | 0F0  0F1  2F0  2F1  .    .    2B0  2B1' 0B0  0B1'
    rank 1 | .    1F0  1F1  3F0  3F1  3B0  3B1' 1B0  1B1'
"""

from collections.abc import Iterator

from pipedream.schedules import kit


def breadth_first(plan: kit.Plan, microbatches: int | None = None) -> kit.Schedule:
    """Returns the breadth-first order, on a `looped` plan; by default m = 4 p, and with m < p workers wait."""
    p, chunks = plan.workers, kit.looped.check("breadth_first", plan)
    m = microbatches or 4 * p

    def ops(rank: int, mine: range) -> Iterator[kit.Op]:
        for chunk in range(chunks):
            yield from (kit.forward((rank + p * chunk, 0), k) for k in mine)
        for chunk in reversed(range(chunks)):
            yield from (kit.backward((rank + p * chunk, 0), k) for k in mine)

    claims = kit.Claims(
        assumption="p workers with v equal stages each, messages cost nothing",
        bubble=lambda p, m: 1 - chunks * m / ((chunks - 1) * max(m, p) + m + p - 1),
        in_flight=lambda p, m, s: chunks * m,
    )
    return kit.flushing("breadth_first", plan, m, kit.minibatch_by_minibatch(m, ops), claims)


METHODS = (
    kit.Method(
        breadth_first,
        since=2022,
        aliases=("looped_bfs",),
        stage_order=kit.looped,
        properties=kit.MethodProperties(replicates_stages=False),
        picture=kit.Picture("Breadth-first: two stages (s) a worker, m = 4", 4, 8),
        choose="When messages are slow compared with a microbatch's compute and memory is plentiful: the bubble of "
        "interleaved_1f1b, but a stage's microbatches run back to back, which leaves each message the most time.",
    ),
)
