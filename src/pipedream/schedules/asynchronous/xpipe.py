"""XPipe: microbatches without a flush; a minibatch's first one predicts weights, the others share them.

Guan et al., 2019 (arXiv 1911.04610), section 3: the bellwether, the first microbatch of its minibatch, computes w - T
lr u for the forwards, u the direction of Adam's step, T = ceil(W_s / m) its staleness in updates. The backward reads
the newest weights.

    rank 0 | F0  F1  .   B0  F2  B1' F3  B2  F4  B3'
    rank 1 | .   F0  B0  F1  B1' F2  B2  F3  B3' F4
"""

from pipedream.schedules import kit


def xpipe(
    plan: kit.Plan, microbatches: int | None = None, *, by: str = kit.VELOCITY, backward_rule: str = "graph"
) -> kit.Schedule:
    """Returns XPipe, at the plan's depth; by default as many microbatches as the input stage holds in flight.

    For the options see `kit.idioms`.
    """
    kit.refuse_update_delay("xpipe", plan)
    plan = kit.with_backward_rule(plan, backward_rule)
    m = kit.choose_microbatches("xpipe", plan, microbatches, kit.max_in_flight(plan))
    kit.check_input_replicas("xpipe", plan, m)
    stages, unpredicted = range(len(plan.stages)), kit.latest_weights(plan, m)
    shared = kit.WeightPrediction(by, tuple(unpredicted.staleness(s) for s in stages))
    claims = kit.Claims(
        in_flight=lambda p, total, s: min(p - s, total),
        staleness=lambda p, total, s: -(-(p - 1 - s) // m),
        # The prediction that the microbatches of a minibatch share is a set of its own.
        versions=lambda p, total, s: 2 if m > 1 and s < p - 1 else 1,
    )
    weights = kit.latest_weights(plan, m, backward_rule=backward_rule, forward_prediction=shared, shares_prediction=m)
    return kit.unflushed("xpipe", plan, weights, claims, m=m)


METHODS = (
    kit.Method(
        xpipe,
        since=2019,
        properties=kit.MethodProperties(flushes=False, same_updates=False, reads_stored_weights=False, uses_depth=True),
        picture=kit.Picture("XPipe: a minibatch's forwards share one prediction from version v; m = 4", 4, 12),
        choose="Like pipeoptim, with split minibatches: one update per minibatch, one prediction for all its "
        "microbatches.",
    ),
)
