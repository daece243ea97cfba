"""The plan of one search."""

from __future__ import annotations

from typing import Any

from pipedream.core.hardware.cluster import Cluster
from pipedream.core.model.profile import Profile
from pipedream.core.plan.plan import Plan
from pipedream.planner import PlanSearch


def search_plan(
    profile: Profile,
    cluster: Cluster,
    *,
    shape: str | tuple[int, ...] = "any",
    in_flight: str | tuple[int, ...] = "noam",
    **of_search: Any,
) -> Plan:
    """Returns the fastest plan; `of_search` are arguments of `PlanSearch.of`."""
    return PlanSearch.of(profile, cluster, **of_search).best(shape, in_flight)
