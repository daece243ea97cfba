"""A stage never has more replicas than a minibatch has microbatches."""

from __future__ import annotations

import pytest

import pipedream as pd
from pipedream.core.model.profile import LayerProfile, Profile


@pytest.mark.parametrize("workers", [2, 3, 4, 9])
@pytest.mark.parametrize("microbatches", [1, 2, 3])
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_each_automatic_plan_can_be_run(workers: int, microbatches: int, schedule: str) -> None:
    layers = tuple(LayerProfile(1.0 + i % 2, 2.0, 4, 4) for i in range(6))
    profile = Profile.of_chain(layers, batch=12)
    plan = pd.plan(profile, pd.Cluster.flat(workers, 1e12), schedule=schedule, microbatches=microbatches)
    assert max(plan.replicas) <= microbatches
    assert pd.simulate(plan).spans
