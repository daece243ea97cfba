"""SpecTrain: forward and backward predict the same future weights, those that will be there when the minibatch ends.

Chen, Yang, Cheng, 2018 (arXiv 1809.02839), section 4: w - T lr v, v the smoothed gradient. From its backward at stage s
to its end, at stage 0, a minibatch takes the time of floor(s/2) updates; so T is floor(s/2) for the backward, and for
the forward more by what the stage is late: floor(s/2) + p - s - 1.

    rank 0 | F0  F1  .   B0' F2  B1' F3  B2' F4  B3'
    rank 1 | .   F0  B0' F1  B1' F2  B2' F3  B3' F4

The first version (`spectrain`) predicts for both passes and keeps one set of weights. The second (`spectrain_v2`)
predicts for the forward, p - s updates ahead, and keeps what it read for the backward: a stash of predictions.
"""

from __future__ import annotations

from pipedream.core.plan.plan import Plan
from pipedream.core.schedule.prediction import VELOCITY, WeightPrediction
from pipedream.core.schedule.properties import MethodProperties
from pipedream.core.schedule.schedule import Claims, Schedule
from pipedream.core.schedule.update import UpdateRule
from pipedream.schedules.idioms import latest, recomputing, refuse_split, unflushed
from pipedream.schedules.method import Method, Picture

__all__ = ["METHODS", "spectrain", "spectrain_v2"]


def spectrain(
    plan: Plan, microbatches: int | None = None, *, by: str = VELOCITY, backward_rule: str = "graph"
) -> Schedule:
    """Returns SpecTrain, which predicts weights for both passes.

    Args:
        plan: of any depth.
        microbatches: None or 1.
        by: 'velocity' (SGD with momentum, Adam, AdamW) or 'difference' (any optimizer).
        backward_rule: 'graph', or 'recompute'.

    Raises:
        ScheduleError: a minibatch is to be split.
        ValueError: an option that is none.
    """
    refuse_split("spectrain", microbatches)
    plan = recomputing(plan, backward_rule)
    stages, bare = range(len(plan.stages)), latest(plan)
    ahead = WeightPrediction(by, tuple(s // 2 + bare.staleness(s) for s in stages))
    back = WeightPrediction(by, tuple(s // 2 for s in stages))
    return Schedule(
        name="spectrain",
        plan=plan,
        placement=plan.placement,
        order=unflushed(plan),
        weights=latest(plan, backward_rule=backward_rule, forward_prediction=ahead, backward_prediction=back),
        updates=UpdateRule(plan.replicas, mean_of_rounds=True),
        claims=Claims(
            in_flight=lambda p, m, s: min(p - s, m),
            staleness=lambda p, m, s: p - 1 - s,
            versions=lambda p, m, s: 1,
        ),
    )


def spectrain_v2(plan: Plan, microbatches: int | None = None, *, by: str = VELOCITY) -> Schedule:
    """Returns SpecTrain whose backward reads what its forward predicted.

    Args:
        plan, microbatches, by: see `spectrain`.

    Raises:
        ScheduleError: a minibatch is to be split.
        ValueError: an option that is none.
    """
    refuse_split("spectrain_v2", microbatches)
    ahead = WeightPrediction(by, tuple(latest(plan).staleness(s) + 1 for s in range(len(plan.stages))))
    return Schedule(
        name="spectrain_v2",
        plan=plan,
        placement=plan.placement,
        order=unflushed(plan),
        weights=latest(plan, backward_rule="stash", forward_prediction=ahead),
        updates=UpdateRule(plan.replicas, mean_of_rounds=True),
        claims=Claims(
            in_flight=lambda p, m, s: min(p - s, m),
            staleness=lambda p, m, s: p - 1 - s,
            versions=lambda p, m, s: p - s + 1,
        ),
    )


METHODS = (
    Method(
        spectrain,
        since=2018,
        properties=MethodProperties(flushes=False, splits_minibatch=False, reads_stored_weights=False, uses_depth=True),
        picture=Picture("SpecTrain: both passes at weights predicted from version v", None, 12),
        choose="With momentum and few stages, in one set of weights. The second pass is predicted too, towards the "
        "same weights.",
    ),
    Method(
        spectrain_v2,
        since=2018,
        properties=MethodProperties(flushes=False, splits_minibatch=False, reads_stored_weights=False, uses_depth=True),
        picture=Picture("SpecTrain, second version: predicted from version v, kept for the backward", None, 12),
        choose="As pipedream, whose gradients are true ones, but at predicted weights; one set of weights more.",
    ),
)
