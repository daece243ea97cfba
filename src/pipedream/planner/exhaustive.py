"""Every straight pipeline, one after the other: the oracle of the dynamic program, and for small models."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations

from ..core.cluster import Cluster
from ..core.errors import PlanError
from ..core.plan import Plan
from ..core.profile import Profile
from .space import Space, Versions, stash

__all__ = ["exhaustive", "partitions"]


def partitions(space: Space, stages: int) -> Iterator[Plan]:
    """Yields every straight pipeline of so many stages, whether it fits the memory or not."""
    for cuts in combinations(space.profile.graph.cuts(), stages - 1):
        yield space.plan(cuts)


def exhaustive(
    profile: Profile, cluster: Cluster, *, stages: int, versions: Versions = stash, microbatches: int = 1
) -> Plan:
    """Finds what `straight` finds, with the same ties, by trying every partition.

    Raises:
        PlanError: none fits.
    """
    space = Space.of(profile, cluster, versions=versions, microbatches=microbatches)
    limit = cluster.memory_bytes
    fitting = [
        plan
        for plan in partitions(space, stages)
        if limit is None or all(stage.peak_bytes <= limit for stage in plan.stages)
    ]
    if not fitting:
        raise PlanError(f"none of the partitions into {stages} stages fits the memory; give more of it, or stages")
    return min(fitting, key=_rank)


def _rank(plan: Plan) -> tuple[float, int, tuple[int, ...]]:
    sent = sum(stage.output_bytes for stage in plan.stages[:-1])
    return plan.slowest_stage_s, sent, tuple(stage.first for stage in plan.stages[1:])
