"""ZB-H2: 1F1B of twice the depth with split backwards: no worker waits between its first op and its last.

Qi et al., Zero Bubble Pipeline Parallelism, ICLR 2024, section 2.2, figure 3. Stage s does 2(p - s) - 1 forwards before
its first input gradient I, and makes weight gradients W 2s microbatches later: 2p - 1 are in flight until their W. A
stage that has done its part of a minibatch goes on with the next, so n minibatches take n m (f + i + w) + (p - 1) f.
Clipping by the global norm makes the stages wait for each other at the update; the paper's way out, to update first and
take it back where that was wrong, is not done here.

    rank 0 | F0  F1  F2  I0  W0  F3  I1  W1  I2  W2  I3  W3'
    rank 1 | .   F0  I0  F1  I1  F2  I2  W0  F3  I3  W1  W2  W3'
"""

from __future__ import annotations

from collections.abc import Iterator

from pipedream.core.plan.depth import legal
from pipedream.core.plan.placement import StageReplica
from pipedream.core.plan.plan import Plan
from pipedream.core.schedule.op import Op
from pipedream.core.schedule.properties import MethodProperties
from pipedream.core.schedule.schedule import Claims, Schedule
from pipedream.schedules.idioms import (
    SPLIT,
    flushed,
    flushing,
    one_forward_one_input_gradient,
    one_stage_per_rank,
    share_out,
)
from pipedream.schedules.method import Method, Picture

__all__ = ["METHODS", "zb_h2"]


def zb_h2(plan: Plan, microbatches: int | None = None) -> Schedule:
    """Returns ZB-H2; 4 microbatches a stage unless asked, twice the warm-up forwards of the plan's depth."""
    m = share_out("zb_h2", plan, microbatches, 4 * len(plan.stages))
    # Legal where no stage delays its updates: a depth that rests on an update delay, which a flush does not have, is not when doubled.
    warmups = [count - 1 for count in legal(tuple(2 * count - 1 for count in plan.in_flight), plan.replicas)]

    def ops(stage_replica: StageReplica) -> Iterator[Op]:
        warmup = warmups[stage_replica.stage]

        def in_turn(mine: range) -> Iterator[Op]:
            # All stages hold as many as the fullest.
            behind = max(warmups) - warmup
            return one_forward_one_input_gradient(
                stage_replica, mine=mine, warmup=min(warmup, len(mine) - 1), behind=behind
            )

        return flushed(stage_replica, replicas=plan.replicas[stage_replica.stage], microbatches=m, ops=in_turn)

    return flushing(
        "zb_h2",
        plan,
        m,
        one_stage_per_rank(plan.placement, ops),
        Claims(
            assumption="straight pipeline, paper's depth, equal stages, messages cost nothing; "
            "m at least 2p - 1, f = i = w (the makespan: i <= f <= w)",
            least=lambda p: 2 * p - 1,
            bubble=lambda p, m: (p - 1) / (3 * m + p - 1),
            in_flight=lambda p, m, s: min(2 * p - 1, m),
            staleness=lambda p, m, s: 0,
            versions=lambda p, m, s: 1,
            makespan_s=lambda p, m, n, f, i, w: n * m * (f + i + w) + (p - 1) * f,
        ),
        kinds=SPLIT,
    )


METHODS = (
    Method(
        zb_h2,
        since=2024,
        aliases=("zb2p",),
        properties=MethodProperties(splits_backward=True, uses_depth=True),
        picture=Picture("ZB-H2: twice the depth, two minibatches; m = 7", 7, 14),
        choose="When there is memory for twice as many microbatches. Over one minibatch its bubble is that of zb_h1, "
        "but its workers begin and end one behind the other, and go on with the next minibatch without "
        "waiting: in a run of many the bubble is gone. Not with clipping by the global norm, for which all "
        "stages wait at each update.",
    ),
)
