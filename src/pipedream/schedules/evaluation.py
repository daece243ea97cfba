"""Forwards only, on the ranks of training's forwards: evaluation and prediction through the pipeline."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count

from pipedream.core.plan.placement import Placement
from pipedream.core.plan.plan import Plan
from pipedream.core.schedule.op import Kind, Op
from pipedream.core.schedule.rules import UpdateRule
from pipedream.core.schedule.schedule import Schedule
from pipedream.core.schedule.weights import Flush
from pipedream.schedules.kit.idioms import forward


def evaluation(plan: Plan, placement: Placement | None = None) -> Schedule:
    """Returns a schedule of forwards only, all with the newest weights; remote weights are fetched once."""
    placed = placement or plan.placement

    def order(rank: int) -> Iterator[Op]:
        stage_replicas = placed.passes(rank, forward=True)
        yield from (Op(Kind.FETCH, stage, 0, replica) for stage, replica in placed.remote_forwards(rank))
        if not stage_replicas:
            return
        # A wave: each stage is as many microbatches later as there are stages before it.
        for slot in count():
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
