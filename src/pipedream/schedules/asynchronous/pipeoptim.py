"""PipeOptim: PipeDream's order, forwards at predicted weights, backwards at the newest; one set of weights.

Guan et al., 2023 (arXiv 2312.00839), section 3: w - T lr u, u the direction of the optimizer's own step (SGD's
momentum, Adam's and AdamW's corrected m / (sqrt(v) + eps)), T = p - 1 - s, the staleness of the stage.

    rank 0 | F0  F1  .   B0' F2  B1' F3  B2' F4  B3'
    rank 1 | .   F0  B0' F1  B1' F2  B2' F3  B3' F4
"""

from pipedream.schedules import kit


def pipeoptim(
    plan: kit.Plan, microbatches: int | None = None, *, by: str = kit.VELOCITY, backward_rule: str = "graph"
) -> kit.Schedule:
    """Returns PipeOptim, at the plan's depth.

    For the options see `kit.idioms`.
    """
    kit.refuse_microbatches("pipeoptim", microbatches)
    plan = kit.with_backward_rule(plan, backward_rule)
    stages, unpredicted = range(len(plan.stages)), kit.latest_weights(plan)
    prediction = kit.WeightPrediction(by, tuple(unpredicted.staleness(s) for s in stages))
    claims = kit.Claims(
        in_flight=lambda p, m, s: min(p - s, m),
        staleness=lambda p, m, s: p - 1 - s,
        versions=lambda p, m, s: 1,
    )
    weights = kit.latest_weights(plan, backward_rule=backward_rule, forward_prediction=prediction)
    return kit.unflushed("pipeoptim", plan, weights, claims)


METHODS = (
    kit.Method(
        pipeoptim,
        since=2023,
        properties=kit.MethodProperties(
            flushes=False, same_updates=False, splits_minibatch=False, reads_stored_weights=False, uses_depth=True
        ),
        picture=kit.Picture("PipeOptim: forwards at weights predicted from version v", None, 12),
        choose="With Adam or AdamW if pipedream's sets of weights do not fit: predicted forwards, one set of weights, "
        "and a copy of it during a forward.",
    ),
)
