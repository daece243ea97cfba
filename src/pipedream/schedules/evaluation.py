"""Forwards only: evaluation and prediction through the pipeline, in the plan's placement."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count

from ..core.op import Kind, Op
from ..core.plan import Plan
from ..core.schedule import Schedule
from ..core.update import UpdateRule
from ..core.weights import Flush
from .idioms import forward

__all__ = ["evaluation"]


def evaluation(plan: Plan) -> Schedule:
    """Returns the order of forwards alone, all of the newest weights."""

    def order(rank: int) -> Iterator[Op]:
        seats = plan.placement.seats(rank)
        for slot in count():  # a wave: all stages of a rank, each as far behind the data as it stands behind the input
            for stage, replica in seats:
                k = slot - stage
                if k >= 0 and k % plan.replicas[stage] == replica:
                    yield forward((stage, replica), k)

    return Schedule(
        name="evaluation",
        plan=plan,
        placement=plan.placement,
        order=order,
        weights=Flush(2**62),
        updates=UpdateRule((1,) * len(plan.stages)),
        kinds=(Kind.FORWARD,),
    )
