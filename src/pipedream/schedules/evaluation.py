"""Forwards only: evaluation and prediction through the pipeline, where the training's forwards are."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count

from pipedream.core.plan.placement import Placement
from pipedream.core.plan.plan import Plan
from pipedream.core.schedule.op import Kind, Op
from pipedream.core.schedule.schedule import Schedule
from pipedream.core.schedule.update import UpdateRule
from pipedream.core.schedule.weights import Flush
from pipedream.schedules.idioms import forward

__all__ = ["evaluation"]


def evaluation(plan: Plan, placement: Placement | None = None) -> Schedule:
    """Returns the order of forwards alone, all of the newest weights.

    Args:
        plan: of the training.
        placement: of its stages; the plan's unless said. Weights that are fetched are so once, and stay.
    """
    placed = placement or plan.placement

    def order(rank: int) -> Iterator[Op]:
        stage_replicas = placed.passes(rank, forward=True)
        yield from (Op(Kind.FETCH, stage, 0, replica) for stage, replica in placed.remote_forwards(rank))
        if not stage_replicas:
            return
        for slot in count():  # a wave: all stages of a rank, each as far behind the data as it stands behind the input
            for stage, replica in stage_replicas:
                k = slot - stage
                if k >= 0 and k % plan.replicas[stage] == replica:
                    yield forward((stage, replica), k)

    return Schedule(
        name="evaluation",
        plan=plan,
        placement=placed,
        order=order,
        weights=Flush(2**62),
        updates=UpdateRule((1,) * len(plan.stages)),
        kinds=(Kind.FORWARD,),
    )
