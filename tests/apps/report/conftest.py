"""Timelines to draw: simulated, and bent as if they had been measured."""

import random
from collections.abc import Callable
from dataclasses import replace

import pytest

import pipedream as pd
from pipedream.simulator import costs, simulate

Simulated = Callable[..., pd.Timeline]
SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture(scope="session")
def simulated() -> Simulated:
    """Returns the function from a method's name to a simulated timeline; keywords are those of `Plan.uniform`."""

    def run(
        name: str,
        *,
        stages: int = 2,
        split: int | None = None,
        total: int = 4,
        plan: pd.Plan | None = None,
        **seconds: float,
    ) -> pd.Timeline:
        plan = plan or pd.Plan.uniform(stages, **seconds)
        return simulate(pd.lower(pd.schedules.build(name, plan, split)), costs(plan), total)

    return run


@pytest.fixture(scope="session")
def digits_plan() -> pd.Plan:
    """Returns a plan 2-1 with names, seconds and bytes."""
    rows = (
        pd.Stage(0, 3, 2, 4e-3, 8e-3, 5e-4, 400_000, 10**6, 2 * 10**6, 0, 80 * 10**6, ("conv1", "conv2", "pool")),
        pd.Stage(3, 5, 1, 2.2e-3, 4.1e-3, 4e-4, 40_000, 10**6, 9 * 10**6, 0, 120 * 10**6, ("fc1", "fc<2>")),
    )
    return pd.Plan(rows, (2, 1), pd.Cluster.flat(3, 1e9), model="Digits", batch=64, note="best of all cuts")


@pytest.fixture(scope="session")
def measured(simulated: Simulated, digits_plan: pd.Plan) -> pd.Timeline:
    """Returns a timeline with the irregular times of a real one: a simulated one whose clock runs unevenly."""
    smooth = simulated("pipedream", total=120, plan=digits_plan)
    rng = random.Random(0)
    uneven, now, before = {}, 0.0, 0.0
    for time in sorted({time for span in smooth.spans for time in (span.start_s, span.end_s)}):
        now += (time - before) * rng.uniform(0.8, 1.6)
        uneven[time], before = now, time
    spans = tuple(s._replace(start_s=uneven[s.start_s], end_s=uneven[s.end_s]) for s in smooth.spans)
    return replace(smooth, source="measured", spans=spans)
