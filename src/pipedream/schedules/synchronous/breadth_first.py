"""Breadth-first: each worker has v stages, p stages apart, and takes all microbatches through one before the next.

Lamy-Poirier, Breadth-First Pipeline Parallelism, MLSys 2023, section 4.1: the bubble of interleaved 1F1B,
(p - 1)/(vm + p - 1), for any m >= p, with the activations of GPipe. A stage's microbatches follow each other, so its
messages (and, with replicas, its all-reduces) have the longest time. The digits are stage and microbatch; rank 0 has
stages 0 and 2.

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

__all__ = ["METHODS", "breadth_first"]


def breadth_first(plan: Plan, microbatches: int | None = None) -> Schedule:
    """Returns the breadth-first order with a flush; by default 4 microbatches per worker.

    Args:
        plan: v p stages on p workers, laid out `looped`.
        microbatches: with fewer than p, a worker waits for the last one before each further lap.

    Raises:
        ScheduleError: the plan is laid out differently.
    """
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
