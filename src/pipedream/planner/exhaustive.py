"""Every plan, one after the other: the oracle of the dynamic program, and for small models."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import combinations, product

from ..core.depth import noam
from ..core.errors import PlanError
from ..core.plan import Plan
from .space import Space

__all__ = ["every_plan", "exhaustive", "peak_bytes"]


def every_plan(space: Space) -> Iterator[Plan]:
    """Yields every plan on at most all workers, at the paper's depth, whether it fits the memory or not."""
    places, workers = space.profile.graph.cuts(), space.cluster.workers
    for stages in range(1, min(len(places) + 1, workers) + 1):
        for replicas in product(range(1, workers + 1), repeat=stages):
            if sum(replicas) <= workers:
                for cuts in combinations(places, stages - 1):
                    yield space.plan(cuts, replicas)


def exhaustive(space: Space, among: Callable[[Plan], bool] = lambda plan: True) -> Plan:
    """Finds what `Pipelines` finds, with the same ties, by trying every plan of those that `among` keeps.

    Raises:
        PlanError: none fits.
    """
    limit = space.cluster.memory_bytes
    fitting = [
        plan for plan in every_plan(space) if among(plan) and (limit is None or peak_bytes(space, plan) <= limit)
    ]
    if not fitting:
        raise PlanError("none of the plans fits the memory; give more of it, or more workers")
    return min(fitting, key=_rank)


def peak_bytes(space: Space, plan: Plan) -> int:
    """Returns the need of a plan's fullest worker at the paper's depth, where a lag does not yet ask for more."""
    rows = zip(plan.stages, noam(plan.replicas), plan.lag, strict=True)
    return max(
        int(space.need_bytes(stage.first, stage.last, held, lag, replicas=stage.replicas)) for stage, held, lag in rows
    )


def _rank(plan: Plan) -> tuple[float, int, int, int, tuple[tuple[int, int], ...]]:
    sent = sum(stage.output_bytes for stage in plan.stages[:-1])
    order = tuple((stage.last, stage.replicas) for stage in plan.stages)
    return plan.slowest_stage_s, sent, len(plan.stages), plan.workers, order
