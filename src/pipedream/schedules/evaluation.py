"""Forwards only: evaluation and prediction through the pipeline, in the plan's placement."""

from __future__ import annotations

from collections.abc import Iterator

from ..core.op import Kind, Op
from ..core.placement import Seat
from ..core.plan import Plan
from ..core.schedule import Schedule
from ..core.update import UpdateRule
from ..core.weights import Flush
from .idioms import at_one_seat, endless, forward

__all__ = ["evaluation"]


def evaluation(plan: Plan) -> Schedule:
    """Returns the order of forwards alone, all of the newest weights."""

    def ops(seat: Seat) -> Iterator[Op]:
        return (forward(seat, k) for k in endless(seat, plan.replicas[seat[0]]))

    return Schedule(
        name="evaluation",
        plan=plan,
        placement=plan.placement,
        order=at_one_seat(plan.placement, ops),
        weights=Flush(2**62),
        updates=UpdateRule((1,) * len(plan.stages)),
        kinds=(Kind.FORWARD,),
    )
