"""One worker, data parallelism or a pipeline: the choice, its promise, its depth and its refusals."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipedream.core.cluster import Cluster
from pipedream.core.errors import PlanError
from pipedream.core.graph import Layer, LayerGraph
from pipedream.core.plan import Plan
from pipedream.core.profile import LayerProfile, Profile
from pipedream.planner import by_hand, exhaustive, plan, straight, whole

LAYER = LayerProfile(1.0, 2.0, output_bytes=10, parameter_bytes=1000, activation_bytes=100)
EIGHT = Profile.of_chain((LAYER,) * 8)


@st.composite
def chains(draw: st.DrawFn) -> Profile:
    cost, size = st.sampled_from([0.0, 0.1, 0.5, 1.0, 3.0]), st.integers(0, 20)
    layers = draw(st.lists(st.builds(LayerProfile, cost, cost, size, size, size), min_size=1, max_size=7))
    return Profile.of_chain(tuple(layers), update_s=draw(cost), optimizer_bytes=draw(size), loss_s=draw(cost))


@given(
    chains(),
    st.integers(1, 5),
    st.sampled_from([0.1, 1.0, 10.0, 1e9]),
    st.sampled_from([0.0, 0.2]),
    st.one_of(st.none(), st.integers(20, 300)),
    st.integers(1, 3),
)
def test_takes_the_fastest_of_all(
    profile: Profile, workers: int, bandwidth: float, latency: float, memory: int | None, microbatches: int
) -> None:
    cluster = Cluster.flat(workers, bandwidth, latency, memory)
    rivals: list[Plan] = []
    for replicas in sorted({1, workers}):
        try:
            rivals.append(whole(profile, cluster, replicas=replicas, microbatches=microbatches))
        except PlanError:
            continue
    for stages in range(2, min(workers, len(profile.layers)) + 1):
        try:
            rivals.append(exhaustive(profile, cluster, stages=stages, microbatches=microbatches))
        except PlanError:
            continue
    if not rivals:
        with pytest.raises(PlanError, match="the least that any of them needs"):
            plan(profile, cluster, microbatches=microbatches)
        return
    best = min(rivals, key=lambda rival: (rival.slowest_stage_s, len(rival.stages), rival.workers))
    found = plan(profile, cluster, microbatches=microbatches)
    assert (found.stages, found.in_flight) == (best.stages, best.in_flight)
    assert Plan.from_json(found.to_json()) == found
    assert "\n" not in found.note


def test_slow_links_make_a_pipeline_and_fast_ones_data_parallelism() -> None:
    slow = plan(EIGHT, Cluster.flat(4, 100.0))
    assert slow.config == "1-1-1-1"
    assert slow.in_flight == (4, 3, 2, 1)
    assert slow.slowest_stage_s == 6.0
    assert slow.note == (
        "fastest predicted among one worker, data parallelism and straight pipelines of 2 to 4 stages; data "
        "parallelism on 4 workers is predicted at 36.0 s per minibatch; one worker is predicted at 24.0 s per minibatch"
    )
    uneven = Profile.of_chain((LAYER,) * 7)
    fast = plan(uneven, Cluster.flat(4, 1e9))
    assert fast.config == "4"
    assert fast.in_flight == (1,)
    assert "straight pipeline of 4 stages is predicted at 6.00 s" in fast.note


def test_one_worker_when_links_are_useless() -> None:
    alone = plan(EIGHT, Cluster.flat(4, 0.1))
    assert (alone.config, alone.slowest_stage_s) == ("1", 24.0)
    assert plan(EIGHT, Cluster.flat(1)).note == "one worker"


def test_a_model_that_cannot_be_cut() -> None:
    graph = LayerGraph.chain((Layer("a", "L"), Layer("b", "L")), ties=((0, 1),))
    profile = Profile("tied", graph, (LAYER,) * 2, batch=1)
    assert "the model cannot be cut" in plan(profile, Cluster.flat(2)).note
    with pytest.raises(PlanError, match="2 layers can be cut at 0 places"):
        plan(profile, Cluster.flat(2), straight=True)


def test_kinds_can_be_forced() -> None:
    cluster = Cluster.flat(4, 1e9)
    pipeline = plan(EIGHT, cluster, straight=True)
    assert pipeline.stages == straight(EIGHT, cluster, stages=4).stages
    assert pipeline.note == (
        "optimal among straight pipelines of 4 stages; data parallelism on 4 workers is predicted at 6.00 s per "
        "minibatch"
    )
    parallel = plan(EIGHT, Cluster.flat(4, 100.0), straight=False)
    assert parallel.config == "4"
    assert parallel.note == "data parallelism was asked; one worker is predicted at 24.0 s per minibatch"


def test_memory_drives_from_data_parallelism_to_a_pipeline() -> None:
    cluster = Cluster.flat(4, 1e9, memory_bytes=15_000)
    found = plan(EIGHT, cluster, versions=lambda held: 1)
    assert found.config == "1-1-1-1"
    assert "data parallelism on 4 workers does not fit the memory" in found.note
    with pytest.raises(PlanError, match=r"none of the data-parallel plans fits: .* 16\.8 kB .* a worker has 15\.0 kB"):
        plan(EIGHT, cluster, versions=lambda held: 1, straight=False)


def test_fewer_versions_and_more_microbatches_need_less() -> None:
    heavy = Profile.of_chain((LayerProfile(1.0, 1.0, 8, 1000, 4000),) * 4)
    peaks = [
        max(stage.peak_bytes for stage in straight(heavy, Cluster.flat(4), stages=4, **asked).stages)
        for asked in ({}, {"versions": lambda held: 2}, {"versions": lambda held: 2, "microbatches": 4})
    ]
    assert peaks == [5 * 1000 + 4 * 4000, 3 * 1000 + 4 * 4000, 3 * 1000 + 4 * 1000]


def test_depth_is_applied_and_memory_checked_again() -> None:
    profile = Profile.of_chain((LayerProfile(1.0, 2.0, 300, 1000, 100),) * 4)
    roomy = plan(profile, Cluster.flat(4, 100.0), straight=True, depth="full")
    assert (roomy.depth, roomy.in_flight) == ("full", (10, 7, 4, 1))
    assert roomy.stages[0].peak_bytes == 11 * 1000 + 10 * 100
    chosen = plan(profile, Cluster.flat(4, 100.0), depth="full")
    assert (chosen.config, chosen.depth, chosen.in_flight) == ("1-1-1-1", "full", (10, 7, 4, 1))
    parallel = plan(profile, Cluster.flat(4, 1e9), straight=False, depth="full")
    assert (parallel.depth, parallel.in_flight) == ("full", (1,))
    tight = Cluster.flat(4, 100.0, memory_bytes=9_000)
    assert plan(profile, tight, straight=True).in_flight == (4, 3, 2, 1)
    says = (
        r"depth full was asked: stage 0 \(layers 0 to 0\) then holds 10 in flight and needs 12\.0 kB, .* 9\.00 kB; ask"
    )
    with pytest.raises(PlanError, match=says):
        plan(profile, tight, straight=True, depth="full")
    by_count = plan(profile, tight, straight=True, depth=(2, 2, 1, 1))
    assert (by_count.depth, by_count.in_flight) == ("hand", (2, 2, 1, 1))
    assert by_count.stages == by_hand(profile, tight, (1, 2, 3), depth=(2, 2, 1, 1)).stages
    with pytest.raises(PlanError, match="name 3 stages, the plan has 4"):
        plan(profile, tight, straight=True, depth=(3, 2, 1))


def test_says_the_least_need_when_nothing_fits() -> None:
    says = (
        r"none of the plans \(data parallelism, straight pipelines of 1 to 4 stages\) fits: .*"
        r"\((\d+) bytes\), a worker has 100 B; give more memory"
    )
    with pytest.raises(PlanError, match=says) as caught:
        plan(EIGHT, Cluster.flat(4, memory_bytes=100))
    least = int(str(caught.value).split("(")[2].split(" bytes")[0])
    assert plan(EIGHT, Cluster.flat(4, memory_bytes=least)).workers >= 1
    with pytest.raises(PlanError, match="none of the plans"):
        plan(EIGHT, Cluster.flat(4, memory_bytes=least - 1))
