"""SpecTrain: forward and backward predict the same future weights, those at the end of the minibatch.

Chen, Yang, Cheng, 2018 (arXiv 1809.02839), section 4: w - T lr v, v the smoothed gradient.

    rank 0 | F0  F1  .   B0' F2  B1' F3  B2' F4  B3'
    rank 1 | .   F0  B0' F1  B1' F2  B2' F3  B3' F4

From its backward at stage s to its end at stage 0, a minibatch takes as long as floor(s/2) updates.
"""

from pipedream.schedules import kit

_PROPERTIES = kit.MethodProperties(
    flushes=False, same_updates=False, splits_minibatch=False, reads_stored_weights=False, uses_depth=True
)


def spectrain(
    plan: kit.Plan, microbatches: int | None = None, *, by: str = kit.VELOCITY, backward_rule: str = "graph"
) -> kit.Schedule:
    """Returns SpecTrain with one set of weights and predictions for both passes: T = floor(s/2) for the backward, and
    p - s - 1 more for the forward.

    For the options see `kit.idioms`.
    """
    kit.refuse_microbatches("spectrain", microbatches)
    plan = kit.with_backward_rule(plan, backward_rule)
    stages, unpredicted = range(len(plan.stages)), kit.latest_weights(plan)
    ahead = kit.WeightPrediction(by, tuple(s // 2 + unpredicted.staleness(s) for s in stages))
    back = kit.WeightPrediction(by, tuple(s // 2 for s in stages))
    claims = kit.Claims(
        in_flight=lambda p, m, s: min(p - s, m),
        staleness=lambda p, m, s: p - 1 - s,
        versions=lambda p, m, s: 1,
    )
    weights = kit.latest_weights(plan, backward_rule=backward_rule, forward_prediction=ahead, backward_prediction=back)
    return kit.unflushed("spectrain", plan, weights, claims)


def spectrain_v2(plan: kit.Plan, microbatches: int | None = None, *, by: str = kit.VELOCITY) -> kit.Schedule:
    """Returns SpecTrain with a stash of predictions: a backward reads what its forward predicted, T = p - s."""
    kit.refuse_microbatches("spectrain_v2", microbatches)
    unpredicted = kit.latest_weights(plan)
    prediction = kit.WeightPrediction(by, tuple(unpredicted.staleness(s) + 1 for s in range(len(plan.stages))))
    claims = kit.Claims(
        in_flight=lambda p, m, s: min(p - s, m),
        staleness=lambda p, m, s: p - 1 - s,
        versions=lambda p, m, s: p - s + 1,
    )
    weights = kit.latest_weights(plan, backward_rule="stash", forward_prediction=prediction)
    return kit.unflushed("spectrain_v2", plan, weights, claims)


METHODS = (
    kit.Method(
        spectrain,
        since=2018,
        properties=_PROPERTIES,
        picture=kit.Picture("SpecTrain: both passes at weights predicted from version v", None, 12),
        choose="With momentum and few stages, in one set of weights. The backward is predicted too, towards the same "
        "weights as the forward.",
    ),
    kit.Method(
        spectrain_v2,
        since=2018,
        properties=_PROPERTIES,
        picture=kit.Picture("SpecTrain, second version: predicted from version v, kept for the backward", None, 12),
        choose="Like pipedream, with true gradients, but at predicted weights; one more set of weights.",
    ),
)
