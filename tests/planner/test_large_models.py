"""Models too large for the dynamic program: neighbouring layers are joined, and the replicas found are cut anew."""

import random
from itertools import pairwise

import pytest
from hypothesis import given, strategies as st

import pipedream as pd
from tests.planner.planned import random_chain, search_plan


@given(st.randoms(use_true_random=False), st.integers(3, 12), st.integers(2, 8))
def test_a_coarse_plan_is_near_the_best_of_its_replicas(draw: random.Random, layers: int, workers: int) -> None:
    profile, cluster = random_chain(draw, layers), pd.Cluster.flat(workers, draw.choice([1e8, 1e9, 1e10]))
    all_workers = draw.random() < 0.5
    small = search_plan(profile, cluster, shape="pipeline", all_workers=all_workers)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("pipedream.planner.pipeline_search._MAX_STATES", 16.0 * workers**2)  # four parts at most
        large = search_plan(profile, cluster, shape="pipeline", all_workers=all_workers)
    assert large.bound_s <= small.slowest_stage_s <= large.slowest_stage_s
    assert not all_workers or large.workers == workers
    assert large.slowest_stage_s == search_plan(profile, cluster, shape=large.replicas).slowest_stage_s
    if layers > 6:
        assert f"of {layers - 1} cuts were tried, with layers joined between them" in large.note
        assert "best found" in large.note


def test_a_thousand_layers_on_a_thousand_workers() -> None:
    """The replicas are powers of two or three times one, and the plan is near its bound."""
    draw = random.Random(0)
    layers = tuple(
        pd.LayerProfile(draw.random() * 1e-2, draw.random() * 2e-2, draw.randrange(10**7), draw.randrange(10**8))
        for _ in range(1000)
    )
    cluster = pd.Cluster(tuple(pd.Level(width, rate) for width, rate in ((8, 1e11), (16, 1e10), (8, 2.5e9))))
    planned = search_plan(pd.Profile.of_chain(layers), cluster)
    assert planned.workers <= 1024
    assert {count & -count for count in planned.replicas} <= {1 << k for k in range(11)}
    assert all(count & -count in (count, count // 3) for count in planned.replicas)
    assert planned.gap < 0.05
    assert all(before.first < after.first for before, after in pairwise(planned.stages))
