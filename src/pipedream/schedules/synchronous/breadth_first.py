"""Breadth-first: each worker has v stages, p stages apart, and takes all microbatches through one before the next.

Lamy-Poirier, Breadth-First Pipeline Parallelism, MLSys 2023, section 4.1: the bubble of interleaved 1F1B for any
m >= p, with the activations of GPipe.

    rank 0 | 0F0  0F1  2F0  2F1  .    .    2B0  2B1' 0B0  0B1'
    rank 1 | .    1F0  1F1  3F0  3F1  3B0  3B1' 1B0  1B1'
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
    backward,
    flushing,
    forward,
    looped,
    minibatch_by_minibatch,
)


def breadth_first(plan: Plan, microbatches: int | None = None) -> Schedule:
    """Returns the breadth-first order, on a `looped` plan; by default m = 4 p, and with m < p workers wait."""
    p, chunks = plan.workers, looped.check("breadth_first", plan)
    m = microbatches or 4 * p

    def ops(rank: int, mine: range) -> Iterator[Op]:
        for lap in range(chunks):
            yield from (forward((rank + p * lap, 0), k) for k in mine)
        for lap in reversed(range(chunks)):
            yield from (backward((rank + p * lap, 0), k) for k in mine)

    claims = Claims(
        assumption="p workers with v equal stages each, messages cost nothing",
        bubble=lambda p, m: 1 - chunks * m / ((chunks - 1) * max(m, p) + m + p - 1),
        in_flight=lambda p, m, s: chunks * m,
    )
    return flushing("breadth_first", plan, m, minibatch_by_minibatch(m, ops), claims)


METHODS = (
    Method(
        breadth_first,
        since=2022,
        aliases=("looped_bfs",),
        layout=looped,
        properties=MethodProperties(replicates_stages=False),
        picture=Picture("Breadth-first: two stages (s) a worker, m = 4", 4, 8),
        choose="Where messages are slow compared with a microbatch's compute and memory is plentiful: the bubble of "
        "interleaved_1f1b, but a stage's microbatches follow each other, so that a message has the longest time.",
    ),
)
