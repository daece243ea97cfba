"""Every plan, one after the other: the oracle of the dynamic program, and for small models."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import combinations, product

from ..core.errors import PlanError
from ..core.plan import Plan
from .space import Space

__all__ = ["every_plan", "exhaustive"]


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
        plan
        for plan in every_plan(space)
        if among(plan) and (limit is None or all(stage.peak_bytes <= limit for stage in plan.stages))
    ]
    if not fitting:
        raise PlanError("none of the plans fits the memory; give more of it, or more workers")
    return min(fitting, key=_rank)


def _rank(plan: Plan) -> tuple[float, int, int, int, tuple[tuple[int, int], ...]]:
    sent = sum(stage.output_bytes for stage in plan.stages[:-1])
    order = tuple((stage.last, stage.replicas) for stage in plan.stages)
    return plan.slowest_stage_s, sent, len(plan.stages), plan.workers, order
