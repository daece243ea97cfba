"""Every method is free of deadlock for one to three replicas at each of three stages: no draw can miss one."""

from __future__ import annotations

from contextlib import suppress
from itertools import product

import pytest

from pipedream.core.errors import ScheduleError
from pipedream.core.plan.plan import Plan
from pipedream.core.schedule.lowering import lower
from pipedream.schedules import LAYOUTS, SCHEDULES, build, properties_of
from pipedream.verifier import verify

REPLICAS = tuple(product((1, 2, 3), repeat=3))


@pytest.mark.parametrize(
    ("depth", "workers"),
    [("noam", 4), pytest.param("noam", 9, marks=pytest.mark.long), pytest.param("full", 9, marks=pytest.mark.slow)],
)
@pytest.mark.parametrize("name", sorted(set(SCHEDULES) - set(LAYOUTS)))
def test_all_replica_counts(name: str, depth: str, workers: int) -> None:
    """With m = 7, which no number of replicas but one divides, where the method takes it."""
    properties, proved = properties_of(name), set()
    expected = {replicas for replicas in REPLICAS if sum(replicas) <= workers}
    for replicas in expected:
        plan = Plan.uniform(3, replicas=replicas).with_depth(depth)
        for m in (7, None) if properties.splits_minibatch else (None,):
            with suppress(ScheduleError):
                verify(lower(build(name, plan, m)))
                proved.add(replicas)
                break
    assert proved == expected if properties.replicates_stages else proved
