"""Pipelined backpropagation: forward and backward of each stage in every cycle, one set of weights, written in place.

Petrowski et al., IEEE Transactions on Neural Networks 1993; Kosson et al., MLSys 2021, section 3. A worker makes a
forward and a backward in each cycle, so 2(p-1-s) cycles lie between the two of a minibatch, and as many updates. One
after the other, as here, it is 1F1B at that depth: twice the warm-up. The backward goes through the old activations at
the newest weights (the rule 'graph'); with 'recompute' the gradient is a true one.

    rank 0 | F0  F1  F2  B0' F3  B1' F4  B2' F5  B3'
    rank 1 | .   F0  B0' F1  B1' F2  B2' F3  B3' F4
"""

from __future__ import annotations

from dataclasses import replace

from pipedream.core.plan.depth import legal, noam
from pipedream.core.plan.plan import Plan
from pipedream.core.schedule.properties import MethodProperties
from pipedream.core.schedule.schedule import Claims, Schedule
from pipedream.core.schedule.update import UpdateRule
from pipedream.schedules.idioms import latest, recomputing, refuse_split, unflushed
from pipedream.schedules.method import Method, Picture

__all__ = ["METHODS", "concurrent", "one_set", "pipelined_backprop"]


def pipelined_backprop(plan: Plan, microbatches: int | None = None, *, backward_rule: str = "graph") -> Schedule:
    """Returns pipelined backpropagation: stage s is 2(p-1-s) updates late, with one set of weights.

    Args:
        plan: of any depth; a stage holds at least what this order asks for.
        microbatches: None or 1.
        backward_rule: 'graph', or 'recompute'.

    Raises:
        ScheduleError: a minibatch is to be split.
        ValueError: an option that is none.
    """
    return one_set("pipelined_backprop", plan, microbatches, backward_rule)


def one_set(name: str, plan: Plan, microbatches: int | None, backward_rule: str) -> Schedule:
    """Returns pipelined backpropagation, or a method of that order, by its name.

    Raises:
        ScheduleError, ValueError: see `pipelined_backprop`.
    """
    refuse_split(name, microbatches)
    plan = concurrent(recomputing(plan, backward_rule))
    return Schedule(
        name=name,
        plan=plan,
        placement=plan.placement,
        order=unflushed(plan),
        weights=latest(plan, backward_rule=backward_rule),
        updates=UpdateRule(plan.replicas, mean_of_rounds=True),
        claims=Claims(
            in_flight=lambda p, m, s: min(2 * (p - 1 - s) + 1, m),
            staleness=lambda p, m, s: 2 * (p - 1 - s),
            versions=lambda p, m, s: 1,
        ),
    )


def concurrent(plan: Plan) -> Plan:
    """Returns the plan at twice the warm-up of the paper's depth at least: that of the concurrent clock."""
    twice = tuple(2 * count - 1 for count in noam(plan.replicas, plan.update_delay))
    deep = tuple(max(pair) for pair in zip(twice, plan.in_flight, strict=True))
    deep = legal(deep, plan.replicas, plan.update_delay)
    return plan if deep == plan.in_flight else replace(plan, in_flight=deep, depth_mode="hand")


METHODS = (
    Method(
        pipelined_backprop,
        since=2021,
        aliases=("pb",),
        properties=MethodProperties(flushes=False, splits_minibatch=False, reads_stored_weights=False),
        picture=Picture(
            "Pipelined backpropagation: 1F1B at twice the depth; each op reads the newest version (v)", None, 12
        ),
        choose="To study training with delay at its barest: one set of weights, no flush, and twice pipedream's "
        "staleness. For a small rate, or many small stages whose forward and backward run at once.",
    ),
)
