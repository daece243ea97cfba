"""The plan of one search."""

from typing import Any

import pipedream as pd
from pipedream.planner import PlanSearch


def search_plan(
    profile: pd.Profile,
    cluster: pd.Cluster,
    *,
    shape: str | tuple[int, ...] = "any",
    in_flight: str | tuple[int, ...] = "noam",
    **of_search: Any,
) -> pd.Plan:
    """Returns the fastest plan; `of_search` are arguments of `PlanSearch.of`."""
    return PlanSearch.of(profile, cluster, **of_search).best(shape, in_flight)
