"""The plan of one search, and random layers to plan for."""

import random
from typing import Any

import pipedream as pd
from pipedream.planner import PlanSearch
from pipedream.planner.dynamic_program.recurrence import State


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


def random_chain(draw: random.Random, layers: int, most_bytes: int = 10**7) -> pd.Profile:
    """Returns layers of up to 10 ms forward, and outputs of up to so many bytes."""

    def layer() -> pd.LayerProfile:
        seconds = draw.random() * 1e-2, draw.random() * 2e-2
        return pd.LayerProfile(*seconds, draw.randrange(most_bytes), draw.randrange(10**7), 10**6)

    return pd.Profile.of_chain(tuple(layer() for _ in range(layers)))


def replicated_states(workers: int) -> tuple[State, ...]:
    """Returns the states of all plans on at most this many workers."""
    return tuple((w, r) for w in range(1, workers + 1) for r in range(1, w + 1))
