"""Pipelined backpropagation with linear weight prediction: the forward reads weights D updates ahead.

Kosson et al., MLSys 2021, section 3.2: w(t) - lr T v(t) by the velocity, or w(t) + T (w(t) - w(t-1)) by the last
difference, with T = D, the stage's delay 2(p-1-s). The backward reads the weights that there are. (The paper's best
results add spike compensation, which is a matter of the update.)

    rank 0 | F0  F1  F2  B0' F3  B1' F4  B2' F5  B3'
    rank 1 | .   F0  B0' F1  B1' F2  B2' F3  B3' F4
"""

from __future__ import annotations

from dataclasses import replace

from pipedream.core.errors import ScheduleError
from pipedream.core.plan.plan import Plan
from pipedream.core.schedule.prediction import VELOCITY, WeightPrediction
from pipedream.core.schedule.properties import MethodProperties
from pipedream.core.schedule.schedule import Schedule
from pipedream.schedules.asynchronous.pipelined_backprop import one_set
from pipedream.schedules.idioms import latest
from pipedream.schedules.method import Method, Picture

__all__ = ["METHODS", "pb_lwp", "predicting"]


def pb_lwp(
    plan: Plan,
    microbatches: int | None = None,
    *,
    by: str = VELOCITY,
    scale: float = 1.0,
    backward_rule: str = "graph",
) -> Schedule:
    """Returns pipelined backpropagation whose forwards are predicted.

    Args:
        plan: see `pipelined_backprop`.
        microbatches: None or 1.
        by: 'velocity' (SGD with momentum, Adam, AdamW) or 'difference' (any optimizer).
        scale: horizon over delay, at least 0; the paper also studies 2.
        backward_rule: 'graph', or 'recompute'.

    Raises:
        ScheduleError: a minibatch is to be split, or the prediction would go back.
        ValueError: an option that is none.
    """
    return predicting("pb_lwp", plan, microbatches, by, scale, backward_rule)


def predicting(name: str, plan: Plan, microbatches: int | None, by: str, scale: float, backward_rule: str) -> Schedule:
    """Returns pipelined backpropagation whose forwards are predicted, or a method of these weights, by its name.

    Raises:
        ScheduleError, ValueError: see `pb_lwp`.
    """
    if not scale >= 0:
        raise ScheduleError(f"schedule {name!r} predicts weights that are to come; give a scale from 0 on, not {scale}")
    bare = one_set(name, plan, microbatches, backward_rule)
    horizons = tuple(scale * bare.weights.staleness(stage) for stage in range(len(plan.stages)))
    weights = latest(bare.plan, backward_rule=backward_rule, forward_prediction=WeightPrediction(by, horizons))
    return replace(bare, weights=weights)


METHODS = (
    Method(
        pb_lwp,
        since=2021,
        properties=MethodProperties(flushes=False, splits_minibatch=False, reads_stored_weights=False),
        picture=Picture("Pipelined backpropagation, forwards at weights predicted from version v", None, 12),
        choose="With pipelined_backprop, where its delay hurts: SGD with momentum, Adam or AdamW. The prediction is "
        "as good as the velocity is steady, so long horizons need long momentum.",
    ),
)
