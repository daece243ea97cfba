"""Pipelined backpropagation: forward and backward of each stage in every cycle, one set of weights, updated in place.

Petrowski et al., IEEE Transactions on Neural Networks 1993; Kosson et al., MLSys 2021, section 3. 2(p-1-s) cycles, and
as many updates, lie between the two passes of a minibatch. With passes one after the other, as here, this is 1F1B with
twice the warm-up. The backward uses the old activations with the newest weights (the rule 'graph'); with 'recompute'
the gradient is a true one.

    rank 0 | F0  F1  F2  B0' F3  B1' F4  B2' F5  B3'
    rank 1 | .   F0  B0' F1  B1' F2  B2' F3  B3' F4
"""

from dataclasses import replace

from pipedream.core.plan.depth import noam
from pipedream.schedules import kit

ONE_SET = kit.MethodProperties(flushes=False, same_updates=False, splits_minibatch=False, reads_stored_weights=False)


def pipelined_backprop(
    plan: kit.Plan, microbatches: int | None = None, *, backward_rule: str = "graph"
) -> kit.Schedule:
    """Returns pipelined backpropagation: stage s has staleness 2(p-1-s).

    Args:
        plan: a plan of any depth; stages hold at least as much as this order needs.
        backward_rule: see `kit.idioms`.
    """
    return one_set("pipelined_backprop", plan, microbatches, backward_rule)


def one_set(name: str, plan: kit.Plan, microbatches: int | None, backward_rule: str) -> kit.Schedule:
    """Returns `pipelined_backprop` under another name."""
    kit.refuse_microbatches(name, microbatches)
    plan = concurrent(kit.with_backward_rule(plan, backward_rule))
    claims = kit.Claims(
        in_flight=lambda p, m, s: min(2 * (p - 1 - s) + 1, m),
        staleness=lambda p, m, s: 2 * (p - 1 - s),
        versions=lambda p, m, s: 1,
    )
    return kit.unflushed(name, plan, kit.latest_weights(plan, backward_rule=backward_rule), claims)


def concurrent(plan: kit.Plan) -> kit.Plan:
    """Returns the plan with at least twice the warm-up of the paper's depth."""
    doubled = tuple(2 * count - 1 for count in noam(plan.replicas, plan.update_delay))
    in_flight = tuple(max(pair) for pair in zip(doubled, plan.in_flight, strict=True))
    in_flight = kit.raise_to_legal(in_flight, plan.replicas, plan.update_delay)
    return plan if in_flight == plan.in_flight else replace(plan, in_flight=in_flight, depth_mode="hand")


METHODS = (
    kit.Method(
        pipelined_backprop,
        since=2021,
        aliases=("pb",),
        properties=ONE_SET,
        picture=kit.Picture(
            "Pipelined backpropagation: 1F1B at twice the depth; each op reads the newest version (v)", None, 12
        ),
        choose="To study stale training in its plainest form: one set of weights, no flush, and twice pipedream's "
        "staleness. For a small learning rate, or many small stages whose forward and backward run at once.",
    ),
)
