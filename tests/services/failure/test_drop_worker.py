"""A plan that continues without one of its workers, and the cluster that is left."""

from dataclasses import replace

import drawn
import pytest
from hypothesis import given, strategies as st
from programs import program_of

import pipedream as pd
from pipedream.services.failure.restarts import drop_worker, remove_worker


@given(st.data())
def test_the_others_keep_their_places_links_and_kinds(data: st.DataObject) -> None:
    cluster = data.draw(drawn.clusters(data.draw(st.integers(2, 9))).filter(lambda cluster: cluster.workers > 1))
    worker = data.draw(st.integers(0, cluster.workers - 1))
    smaller = remove_worker(cluster, worker)
    others = [other for other in range(cluster.workers) if other != worker]
    assert smaller.workers == len(others)
    for row in ("speeds", "devices", "memories"):
        assert getattr(smaller, row) == tuple(getattr(cluster, row)[other] for other in others)
    for a, first in enumerate(others):
        for b, second in enumerate(others[:a]):
            assert smaller.link(smaller.reach(a, b)) == cluster.link(cluster.reach(first, second))


@given(st.lists(st.integers(1, 4), min_size=1, max_size=4), st.data())
def test_only_its_stage_has_one_replica_fewer_and_the_program_is_proved(counts: list[int], data: st.DataObject) -> None:
    order = data.draw(st.permutations(range(sum(counts) + 1)))[: sum(counts)] if data.draw(st.booleans()) else ()
    cluster = pd.Cluster.flat(sum(counts) + 1)
    plan = replace(pd.Plan.uniform(len(counts), replicas=tuple(counts)), cluster=cluster, worker_order=tuple(order))
    mode = data.draw(st.sampled_from(["noam", "full", "hand"]))
    by_hand = pd.schedules.raise_to_legal([data.draw(st.integers(1, 4)) for _ in counts], counts)
    plan = plan.with_depth(by_hand if mode == "hand" else mode)
    rank = data.draw(st.integers(0, sum(counts) - 1))
    stage = next(s for s, ranks in enumerate(plan.placement.ranks) if rank in ranks)
    reduced = drop_worker(plan, rank)
    if counts[stage] == 1:
        assert reduced is None
        return
    assert reduced.replicas == tuple(count - (s == stage) for s, count in enumerate(counts))
    assert [replace(row, replicas=1) for row in reduced.stages] == [replace(row, replicas=1) for row in plan.stages]
    assert reduced.depth_mode == mode
    assert reduced.cluster.workers == sum(counts)
    before = [[r - (r > rank) for r in ranks if r != rank] for ranks in plan.placement.ranks]
    assert [list(ranks) for ranks in reduced.placement.ranks] == before, "the others keep their order"
    pd.verify(program_of("pipedream", reduced))


@pytest.mark.parametrize("sums", ["bfloat16", "every:4"])
def test_a_last_replica_has_nobody_to_agree_with(sums: str) -> None:
    reduced = drop_worker(pd.Plan.uniform(2, replicas=(3, 1)).choosing(sums=sums), 0)
    assert str(reduced.choices.sums) == sums
    assert str(drop_worker(reduced, 0).choices.sums) == "full"
    assert drop_worker(pd.Plan.uniform(2, replicas=(2, 2)).with_mesh("model:2"), 0) is None


def test_a_worker_of_several_stages_needs_another_in_each() -> None:
    plan = replace(pd.Plan.uniform(2, replicas=(2, 2)), cluster=pd.Cluster.flat(3), worker_order=(0, 1, 1, 2))
    reduced = drop_worker(plan, 1)
    assert sorted(reduced.worker_order) == [0, 1]
    assert drop_worker(reduced, 0) is None
