"""PACI: PipeDream's order with an update every m microbatches, and one set of weights, written in place.

2026 (arXiv 2606.07881). No flush and no stash: the forward reads the newest weights, the backward goes through the old
activations at the newest (the rule 'graph'). Stage s is (p-1-s)/m updates late in the mean, ceil((p-1-s)/m) at most.

    rank 0 | F0  F1  .   B0  F2  B1' F3  B2  F4  B3'
    rank 1 | .   F0  B0  F1  B1' F2  B2  F3  B3' F4

As ``paci[backward_rule=stash]`` it is PipeDream with accumulation, the macrobatch of the original's code and
``step_every`` of FTPipe (Eliad et al., ATC 2021): a backward reads what its forward has read. It is as late, its
gradients are true ones, and stage s keeps ceil((p-1-s)/m) + 1 sets of weights.
"""

from __future__ import annotations

from pipedream.core.plan.plan import Plan
from pipedream.core.schedule.properties import MethodProperties
from pipedream.core.schedule.schedule import Claims, Schedule
from pipedream.core.schedule.update import UpdateRule
from pipedream.core.schedule.weights import BACKWARD_RULES
from pipedream.schedules.idioms import (
    admitted,
    check_handing,
    latest,
    recomputing,
    refuse_update_delay,
    share_out,
    unflushed,
)
from pipedream.schedules.method import Method, Picture

__all__ = ["METHODS", "paci"]


def paci(plan: Plan, microbatches: int | None = None, *, backward_rule: str = "graph") -> Schedule:
    """Returns PACI; as many microbatches as the input stage holds in flight unless asked: one update late at most.

    Args:
        plan: of any depth.
        microbatches: m, in an update.
        backward_rule: 'graph', 'recompute', or 'stash'.

    Raises:
        ScheduleError: too few microbatches for a stage's replicas, or a depth that needs the plan's update delay.
        ValueError: an option that is none.
    """
    refuse_update_delay("paci", plan)
    plan = recomputing(plan, backward_rule, BACKWARD_RULES)
    m = share_out("paci", plan, microbatches, admitted(plan))
    check_handing("paci", plan, m)
    return Schedule(
        name="paci",
        plan=plan,
        placement=plan.placement,
        order=unflushed(plan, m),
        weights=latest(plan, m, backward_rule=backward_rule),
        updates=UpdateRule((m,) * len(plan.stages)),
        microbatches=m,
        claims=Claims(
            in_flight=lambda p, total, s: min(p - s, total),
            staleness=lambda p, total, s: -(-(p - 1 - s) // m),
            versions=lambda p, total, s: -(-(p - 1 - s) // m) + 1 if backward_rule == "stash" else 1,
        ),
    )


METHODS = (
    Method(
        paci,
        since=2026,
        properties=MethodProperties(flushes=False, reads_stored_weights=False, uses_depth=True),
        picture=Picture("PACI: each op reads the newest version (v); m = 4", 4, 12),
        choose="When the weights are large and a little delay does no harm: no bubble, one set of weights, and, with "
        "m >= p - 1 microbatches, a staleness of one update at most. `paci[backward_rule=stash]`, PipeDream with "
        "accumulation, keeps sets of weights for true gradients: two at most where m >= p - 1, one at the last stage.",
    ),
)
