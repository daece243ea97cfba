"""After I-TiMePReSt: nF1B with a stash, and backwards at weights between the stash and the newest.

I-TiMePReSt, 2025 (arXiv 2509.23241), keeps the weights that a forward has read and goes back at intermediate ones,
towards the newest, in which the significance of the stale ones decays exponentially with the degree of staleness. Its
formula was not found published in full, so this is a reading of those words and not the authors' method to the letter:
a backward d updates behind its forward is at w_new + share^d (w_old - w_new), share = 1/e. share = 0 is V-TiMePReSt;
share = 1 is weight stashing in this order.

    rank 0 | F0  F1  F2  F3  B0  B1' F4  F5  B2  B3'
    rank 1 | .   F0  F1  B0  B1' F2  F3  B2  B3' F4
"""

from __future__ import annotations

from math import exp

from pipedream.core.plan.plan import Plan
from pipedream.core.schedule.prediction import Between
from pipedream.core.schedule.properties import MethodProperties
from pipedream.core.schedule.schedule import Schedule
from pipedream.core.schedule.tagged import Interpolated
from pipedream.schedules.asynchronous.timeprest import nf1b
from pipedream.schedules.method import Method, Picture

__all__ = ["METHODS", "timeprest_interpolated"]


def timeprest_interpolated(
    plan: Plan, microbatches: int | None = None, *, share: float = exp(-1), backward_rule: str = "graph"
) -> Schedule:
    """Returns nF1B with interpolated backwards; 3 microbatches a minibatch unless asked.

    Args:
        plan: of stages; this order has a depth of its own.
        microbatches: m, of a minibatch.
        share: of weights that are one update old, in those of a backward; from 0 to 1.
        backward_rule: 'graph', or 'recompute'.

    Raises:
        ScheduleError: fewer microbatches than a stage has replicas.
        ValueError: a share that is none.
    """
    return nf1b(
        "timeprest_interpolated",
        plan,
        microbatches,
        backward_rule,
        lambda waits, replicas, m: Interpolated(
            waits, replicas, m, backward_rule=backward_rule, between=Between(share)
        ),
        versions=lambda p, s, m: -(-min(2, m) * (p - 1 - s) // m) + 1,
    )


METHODS = (
    Method(
        timeprest_interpolated,
        since=2025,
        aliases=("i_timeprest",),
        properties=MethodProperties(flushes=False, reads_stored_weights=False),
        picture=Picture("nF1B, backwards between the version of the forward and the newest (v); m = 3", 3, 15),
        choose="To study backwards between the weights of the forward and the newest: one number, share, leads from "
        "v_timeprest (0) to stashing (1).",
    ),
)
