"""Pipelined backpropagation with linear weight prediction: the forward reads weights D updates ahead.

Kosson et al., MLSys 2021, section 3.2: w(t) - lr T v(t) by the velocity, or w(t) + T (w(t) - w(t-1)) by the last
difference, with T = D, the stage's staleness 2(p-1-s). The backward reads the newest weights.

    rank 0 | F0  F1  F2  B0' F3  B1' F4  B2' F5  B3'
    rank 1 | .   F0  B0' F1  B1' F2  B2' F3  B3' F4
"""

from dataclasses import replace

from pipedream.schedules import kit
from pipedream.schedules.asynchronous.pipelined_backprop import ONE_SET, one_set


def pb_lwp(
    plan: kit.Plan,
    microbatches: int | None = None,
    *,
    by: str = kit.VELOCITY,
    scale: float = 1.0,
    backward_rule: str = "graph",
) -> kit.Schedule:
    """Returns pipelined backpropagation whose forwards read predicted weights.

    Args:
        by, backward_rule: see `kit.idioms`.
        scale: T over D, at least 0; the paper also studies 2.
    """
    return predicting("pb_lwp", plan, microbatches, by, scale, backward_rule)


def predicting(
    name: str, plan: kit.Plan, microbatches: int | None, by: str, scale: float, backward_rule: str
) -> kit.Schedule:
    """Returns `pb_lwp` under another name."""
    if not scale >= 0:
        raise kit.ScheduleError(f"schedule {name!r} predicts future weights; give a scale of at least 0, not {scale}")
    unpredicted = one_set(name, plan, microbatches, backward_rule)
    horizons = tuple(scale * unpredicted.weights.staleness(stage) for stage in range(len(plan.stages)))
    weights = kit.latest_weights(
        unpredicted.plan, backward_rule=backward_rule, forward_prediction=kit.WeightPrediction(by, horizons)
    )
    return replace(unpredicted, weights=weights)


METHODS = (
    kit.Method(
        pb_lwp,
        since=2021,
        properties=ONE_SET,
        picture=kit.Picture("Pipelined backpropagation, forwards at weights predicted from version v", None, 12),
        choose="With pipelined_backprop, if its staleness hurts: SGD with momentum, Adam or AdamW. The prediction is "
        "as good as the velocity is steady, so long horizons need long momentum.",
    ),
)
