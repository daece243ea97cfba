"""Two by two: two forwards, then two backwards, in turn, with a flush. Made up, to show what a method takes.

pipedream show examples/schedules/two_by_two.py --verify
pipedream train examples/digits.py --workers 2 --schedule examples/schedules/two_by_two.py

rank 0 | F0  F1  F2  F3  B0  B1  .   .   B2  B3'
rank 1 | .   F0  F1  B0  B1  F2  F3  B2  B3'
"""

from __future__ import annotations

from collections.abc import Iterator

from pipedream.core.plan.placement import StageReplica
from pipedream.core.plan.plan import Plan
from pipedream.core.schedule.op import Op
from pipedream.core.schedule.schedule import Claims, Schedule
from pipedream.schedules import Method
from pipedream.schedules.idioms import backward, flushed, flushing, forward, one_stage_per_rank, share_out


def two_by_two(plan: Plan, microbatches: int | None = None) -> Schedule:
    """Returns 1F1B in pairs; 4 microbatches a stage unless asked."""
    m = share_out("two_by_two", plan, microbatches, 4 * len(plan.stages))

    def ops(stage_replica: StageReplica) -> Iterator[Op]:
        def in_pairs(mine: range) -> Iterator[Op]:
            pairs = [mine[i : i + 2] for i in range(0, len(mine), 2)]
            ahead = min(plan.in_flight[stage_replica[0]], len(pairs)) - 1
            for i in range(len(pairs) + ahead):
                yield from (forward(stage_replica, k) for k in (pairs[i] if i < len(pairs) else ()))
                yield from (backward(stage_replica, k) for k in (pairs[i - ahead] if i >= ahead else ()))

        return flushed(stage_replica, replicas=plan.replicas[stage_replica[0]], microbatches=m, ops=in_pairs)

    claims = Claims(
        in_flight=lambda p, m, s: min(2 * (p - s), m), staleness=lambda p, m, s: 0, versions=lambda p, m, s: 1
    )
    return flushing("two_by_two", plan, m, one_stage_per_rank(plan.placement, ops), claims)


METHODS = (Method(two_by_two),)
