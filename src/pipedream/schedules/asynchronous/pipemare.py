"""PipeMare: no flush and no stash; the backward reads weights corrected towards its forward's.

Yang et al., MLSys 2021, section 3.2, T2: u = w(t) - D d(t), d(t+1) = gamma d(t) + (1 - gamma)(w(t+1) - w(t)), D the
stage's staleness, gamma = decay^(1/D). The order is that of pipelined backpropagation with m microbatches per update,
so the mean D is 2(p-1-s)/m; the paper's has one more microbatch between the two passes: (2(p-1-s) + 1)/m.

    rank 0 | F0  F1  F2  B0  F3  B1' F4  B2  F5  B3'
    rank 1 | .   F0  B0  F1  B1' F2  B2  F3  B3' F4

T1 (rates by stage) and T3 (a synchronous warm-up) belong to the run: ``1f1b/4:200,pipemare+t1=500``.
"""

from math import exp

from pipedream.schedules import kit
from pipedream.schedules.asynchronous.pipelined_backprop import concurrent


def pipemare(
    plan: kit.Plan,
    microbatches: int | None = None,
    *,
    decay: float = exp(-2),
    horizons: tuple[float, ...] | None = None,
    backward_rule: str = "graph",
) -> kit.Schedule:
    """Returns PipeMare with its discrepancy correction.

    Args:
        plan: a plan of any depth; stages hold at least as much as this order needs.
        microbatches: by default one per stage, or as many as the replicas of the input stage need.
        decay: the paper's D; exp(-2) is what its theory asks for.
        horizons: updates that each stage's backward goes back; None for its mean staleness.
        backward_rule: see `kit.idioms`.
    """
    kit.refuse_update_delay("pipemare", plan)
    plan = concurrent(kit.with_backward_rule(plan, backward_rule))
    input_replicas = plan.replicas[0]
    default = max(len(plan.stages), (plan.in_flight[0] - 1) * input_replicas if input_replicas > 1 else 0)
    m = kit.choose_microbatches("pipemare", plan, microbatches, default)
    kit.check_input_replicas("pipemare", plan, m)
    stages, unpredicted = range(len(plan.stages)), kit.latest_weights(plan, m)
    delays = horizons or tuple(unpredicted.mean_staleness(stage) for stage in stages)
    prediction = kit.WeightPrediction(kit.AVERAGE, tuple(-horizon for horizon in delays), decay)
    claims = kit.Claims(
        in_flight=lambda p, total, s: min(2 * (p - 1 - s) + 1, total),
        staleness=lambda p, total, s: -(-2 * (p - 1 - s) // m),
        versions=lambda p, total, s: 1,
    )
    weights = kit.latest_weights(plan, m, backward_rule=backward_rule, backward_prediction=prediction)
    return kit.unflushed("pipemare", plan, weights, claims, m=m)


METHODS = (
    kit.Method(
        pipemare,
        since=2021,
        properties=kit.MethodProperties(flushes=False, same_updates=False, reads_stored_weights=False),
        picture=kit.Picture("PipeMare: backwards at weights corrected back from version v; m = 4", 4, 12),
        choose="To study one set of weights with a corrected backward, at its paper's concurrent clock; the paper adds "
        "per-stage rates and a synchronous start.",
    ),
)
