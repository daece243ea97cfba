"""Two by two: two forwards, then two backwards, in turn, with a flush. Invented to show a method's file.

pipedream show examples/schedules/two_by_two.py --verify
pipedream train examples/digits.py --workers 2 --schedule examples/schedules/two_by_two.py

rank 0 | F0  F1  F2  F3  B0  B1  .   .   B2  B3'
rank 1 | .   F0  F1  B0  B1  F2  F3  B2  B3'
"""

from __future__ import annotations

from collections.abc import Iterator

from pipedream.schedules import (
    Claims,
    Method,
    Op,
    Plan,
    Schedule,
    StageReplica,
    backward,
    choose_microbatches,
    each_minibatch,
    flushing,
    forward,
    one_stage_per_rank,
)


def two_by_two(plan: Plan, microbatches: int | None = None) -> Schedule:
    """Returns 1F1B in pairs; by default 4 microbatches per stage."""
    m = choose_microbatches("two_by_two", plan, microbatches, 4 * len(plan.stages))

    def ops(stage_replica: StageReplica) -> Iterator[Op]:
        def in_pairs(mine: range) -> Iterator[Op]:
            pairs = [mine[i : i + 2] for i in range(0, len(mine), 2)]
            ahead = min(plan.in_flight[stage_replica.stage], len(pairs)) - 1
            for i in range(len(pairs) + ahead):
                yield from (forward(stage_replica, k) for k in (pairs[i] if i < len(pairs) else ()))
                yield from (backward(stage_replica, k) for k in (pairs[i - ahead] if i >= ahead else ()))

        return each_minibatch(plan, stage_replica, m, in_pairs)

    claims = Claims(in_flight=lambda p, m, s: min(2 * (p - s), m))
    return flushing("two_by_two", plan, m, one_stage_per_rank(plan.placement, ops), claims)


METHODS = (Method(two_by_two),)
