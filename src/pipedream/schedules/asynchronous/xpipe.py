"""XPipe: microbatches without a flush; the first of a minibatch predicts weights, the others of it share them.

Guan et al., 2019 (arXiv 1911.04610), section 3: the bellwether, the first microbatch of its minibatch, computes
w - T lr u for the forward, u the direction of Adam's step, T the updates that it is late, ceil(W_s / m); all
microbatches of the minibatch read that. The backward reads the weights that there are.

    rank 0 | F0  F1  .   B0  F2  B1' F3  B2  F4  B3'
    rank 1 | .   F0  B0  F1  B1' F2  B2  F3  B3' F4
"""

from __future__ import annotations

from pipedream.core.plan.plan import Plan
from pipedream.core.schedule.prediction import VELOCITY, WeightPrediction
from pipedream.core.schedule.properties import MethodProperties
from pipedream.core.schedule.schedule import Claims, Schedule
from pipedream.core.schedule.update import UpdateRule
from pipedream.schedules.idioms import (
    admitted,
    check_handing,
    latest,
    recomputing,
    refuse_update_delay,
    share_out,
    unflushed,
)
from pipedream.schedules.method import Method, Picture

__all__ = ["METHODS", "xpipe"]


def xpipe(plan: Plan, microbatches: int | None = None, *, by: str = VELOCITY, backward_rule: str = "graph") -> Schedule:
    """Returns XPipe; as many microbatches as the input stage holds in flight unless asked.

    Args:
        plan: of any depth.
        microbatches: m, of a minibatch.
        by: 'velocity' (SGD with momentum, Adam, AdamW) or 'difference' (any optimizer).
        backward_rule: 'graph', or 'recompute'.

    Raises:
        ScheduleError: too few microbatches for a stage's replicas, or a depth that needs the plan's update delay.
        ValueError: an option that is none.
    """
    refuse_update_delay("xpipe", plan)
    plan = recomputing(plan, backward_rule)
    m = share_out("xpipe", plan, microbatches, admitted(plan))
    check_handing("xpipe", plan, m)
    ahead = WeightPrediction(by, tuple(float(latest(plan, m).staleness(s)) for s in range(len(plan.stages))))
    weights = latest(plan, m, backward_rule=backward_rule, forward_prediction=ahead, shares_prediction=m)
    return Schedule(
        name="xpipe",
        plan=plan,
        placement=plan.placement,
        order=unflushed(plan, m),
        weights=weights,
        updates=UpdateRule((m,) * len(plan.stages)),
        microbatches=m,
        claims=Claims(
            in_flight=lambda p, total, s: min(p - s, total),
            staleness=lambda p, total, s: -(-(p - 1 - s) // m),
            # The prediction that the microbatches of a minibatch share is a set of its own.
            versions=lambda p, total, s: 2 if m > 1 and s < p - 1 else 1,
        ),
    )


METHODS = (
    Method(
        xpipe,
        since=2019,
        properties=MethodProperties(flushes=False, reads_stored_weights=False, uses_depth=True),
        picture=Picture("XPipe: a minibatch's forwards share one prediction from version v; m = 4", 4, 12),
        choose="As pipeoptim, with minibatches that are split: one update a minibatch, one prediction for all of its "
        "microbatches.",
    ),
)
