"""V-TiMePReSt: nF1B, all forwards of a minibatch and the backward of another in turn, at the newest weights.

TiMePReSt, 2024 (arXiv 2410.14312), has the order; its V- variant, 2025 (arXiv 2509.23241), neither a stash nor a tag of
versions. A minibatch has m microbatches; a stage goes back through a whole one as soon as it can, and admits at most
p - s. With a slot for a forward and for a minibatch's backward these are 2(p-1-s) forwards of warm-up beside the
minibatch's own m (p-1-s, if m = 1), and ceil(2(p-1-s)/m) updates lie between the first forward of a minibatch and its
backward: the backward's weights are the newest, the forward's are not, whatever m. (TiMePReSt itself gives a
forward the version that its minibatch met at the input stage; that needs old versions again, and is not here.)

    rank 0 | F0  F1  F2  F3  B0  B1' F4  F5  B2  B3'
    rank 1 | .   F0  F1  B0  B1' F2  F3  B2  B3' F4
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import count

from ..core.errors import ScheduleError
from ..core.op import Op
from ..core.placement import Seat
from ..core.plan import Plan
from ..core.schedule import Claims, Schedule
from ..core.update import UpdateRule
from ..core.weights import Latest
from .idioms import at_one_seat, backward, forward, recomputing, update
from .method import Method, Picture

__all__ = ["METHODS", "v_timeprest"]


def v_timeprest(plan: Plan, microbatches: int | None = None, *, backward_rule: str = "graph") -> Schedule:
    """Returns V-TiMePReSt; 3 microbatches a minibatch, as in its paper, unless asked.

    Args:
        plan: without replicas; this order has a depth of its own.
        microbatches: m, of a minibatch.
        backward_rule: 'graph', or 'recompute'.

    Raises:
        ScheduleError: a stage has replicas.
    """
    p, m = len(plan.stages), microbatches or 3
    if plan.workers > p:
        raise ScheduleError(
            f"schedule 'v_timeprest' has a worker a stage, found plan {plan.config}; plan a straight pipeline"
        )
    warmup = tuple(min(2, m) * (p - 1 - s) for s in range(p))
    depth = tuple(wait + m for wait in warmup)
    plan = recomputing(plan if plan.in_flight == depth else replace(plan, in_flight=depth, depth="hand"), backward_rule)

    def ops(seat: Seat) -> Iterator[Op]:
        yield from (forward(seat, k) for k in range(warmup[seat[0]]))
        for number in count():
            mine = range(number * m, (number + 1) * m)
            yield from (forward(seat, warmup[seat[0]] + k) for k in mine)
            yield from (backward(seat, k) for k in mine)
            yield update(seat, number + 1)

    each = (m,) * p
    return Schedule(
        name="v_timeprest",
        plan=plan,
        placement=plan.placement,
        order=at_one_seat(plan.placement, ops),
        weights=Latest(warmup, plan.replicas, plan.lag, each, backward_rule=backward_rule),
        updates=UpdateRule(each),
        microbatches=m,
        claims=Claims(
            in_flight=lambda p, total, s: min(min(2, m) * (p - 1 - s) + m, total),
            staleness=lambda p, total, s: -(-min(2, m) * (p - 1 - s) // m),
            versions=lambda p, total, s: 1,
        ),
    )


METHODS = (
    Method(
        v_timeprest,
        since=2025,
        picture=Picture(
            "V-TiMePReSt: m forwards, then m backwards; each op reads the newest version (v); m = 3", 3, 15
        ),
        choose="To study the order nF1B: paci's weights and updates, with the backwards of a minibatch together. It "
        "holds more microbatches than paci and is no less late.",
    ),
)
