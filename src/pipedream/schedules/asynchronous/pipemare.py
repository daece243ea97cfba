"""PipeMare: no flush and no stash; the backward reads weights that are corrected towards those of its forward.

Yang et al., MLSys 2021, section 3.2, T2: u = w(t) - D d(t), d(t+1) = gamma d(t) + (1 - gamma)(w(t+1) - w(t)), D the
stage's delay in updates, gamma = decay^(1/D). The order is that of pipelined backpropagation, an update holds the m
microbatches of a minibatch, and D = 2(p-1-s)/m is the mean over them. The paper counts (2(p-1-s) + 1)/m, a
microbatch between forward and backward at the last stage, where here there is none.

    rank 0 | F0  F1  F2  B0  F3  B1' F4  B2  F5  B3'
    rank 1 | .   F0  B0  F1  B1' F2  B2  F3  B3' F4

T1 (rates by stage) and T3 (a synchronous warm-up) are not in here: they are matters of the update and of the run, whose
phases are then ``1f1b/4:200,pipemare+t1=500``.
"""

from __future__ import annotations

from math import exp

from pipedream.core.plan.plan import Plan
from pipedream.core.schedule.prediction import AVERAGE, WeightPrediction
from pipedream.core.schedule.properties import MethodProperties
from pipedream.core.schedule.schedule import Claims, Schedule
from pipedream.core.schedule.update import UpdateRule
from pipedream.schedules.asynchronous.pipelined_backprop import concurrent
from pipedream.schedules.idioms import (
    check_handing,
    latest,
    recomputing,
    refuse_update_delay,
    share_out,
    unflushed,
)
from pipedream.schedules.method import Method, Picture

__all__ = ["METHODS", "pipemare"]


def pipemare(
    plan: Plan,
    microbatches: int | None = None,
    *,
    decay: float = exp(-2),
    horizons: tuple[float, ...] | None = None,
    backward_rule: str = "graph",
) -> Schedule:
    """Returns PipeMare with its discrepancy correction; a microbatch a stage unless asked, or as replicas need.

    Args:
        plan: of any depth; a stage holds at least what this order asks for.
        microbatches: m, of a minibatch.
        decay: the paper's D; exp(-2) is what its theory asks for.
        horizons: updates that each stage's backward goes back; None: its own mean delay.
        backward_rule: 'graph', or 'recompute'.

    Raises:
        ScheduleError: too few microbatches for a stage's replicas, or a depth that needs the plan's update delay.
        ValueError: an option that is none.
    """
    refuse_update_delay("pipemare", plan)
    plan = concurrent(recomputing(plan, backward_rule))
    first = plan.replicas[0]
    usual = max(len(plan.stages), (plan.in_flight[0] - 1) * first if first > 1 else 0)
    m = share_out("pipemare", plan, microbatches, usual)
    check_handing("pipemare", plan, m)
    bare = latest(plan, m)
    back = horizons or tuple(bare.mean_staleness(stage) for stage in range(len(plan.stages)))
    prediction = WeightPrediction(AVERAGE, tuple(-horizon for horizon in back), decay)
    return Schedule(
        name="pipemare",
        plan=plan,
        placement=plan.placement,
        order=unflushed(plan, m),
        weights=latest(plan, m, backward_rule=backward_rule, backward_prediction=prediction),
        updates=UpdateRule((m,) * len(plan.stages)),
        microbatches=m,
        claims=Claims(
            in_flight=lambda p, total, s: min(2 * (p - 1 - s) + 1, total),
            staleness=lambda p, total, s: -(-2 * (p - 1 - s) // m),
            versions=lambda p, total, s: 1,
        ),
    )


METHODS = (
    Method(
        pipemare,
        since=2021,
        properties=MethodProperties(flushes=False, reads_stored_weights=False),
        picture=Picture("PipeMare: backwards at weights corrected back from version v; m = 4", 4, 12),
        choose="To study one set of weights with a correction of the backward, at the concurrent clock of its paper, "
        "which adds rates by stage and a synchronous beginning.",
    ),
)
