"""Snapshots that a plan leaves memory for: of its own stages, and of those of the next machine."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from itertools import combinations
from typing import Any

import pytest
from exactly import best_plans
from hypothesis import example, given
from hypothesis import strategies as st

import pipedream as pd
from pipedream.core.errors import PlanError
from pipedream.core.hardware.cluster import Cluster, Level, Workers
from pipedream.core.model.profile import LayerProfile, Profile
from pipedream.core.model.runtime_costs import RuntimeCosts
from pipedream.core.plan.host_memory import drop_snapshots
from pipedream.core.plan.plan import Plan
from pipedream.planner import SearchSpace
from pipedream.planner.workers import list_orders
from pipedream.report.text import stage_memory_table
from pipedream.workflows.check import check_plan
from tests.planner.planned import search_plan

LAYER = LayerProfile(1.0, 2.0, 100, 10_000, activation_bytes=1000)
CHAIN = Profile.of_chain((LAYER, LAYER, LAYER, replace(LAYER, parameter_bytes=40_000)), optimizer_bytes=140_000)
SAVED = [30_000, 30_000, 30_000, 120_000]  # weights and twice as much state


def plan_of(memory_bytes: int | None, every: int | str | None = 4, profile: Profile = CHAIN, **request: Any) -> Plan:
    cluster = request.pop("cluster", Cluster.flat(4, memory_bytes=memory_bytes))
    return pd.plan(profile, cluster, **{"shape": "straight", "snapshot_every": every} | request)


def test_peaks_count_two_snapshots_and_the_copy_of_a_third() -> None:
    plan, without = plan_of(None), plan_of(None, every=None)
    sizes = [stage.memory.snapshot_bytes for stage in plan.stages]
    assert sizes == [3 * mine + 2 * before for mine, before in zip(SAVED, [SAVED[-1], *SAVED], strict=False)]
    peaks = [stage.peak_bytes for stage in without.stages]
    assert [stage.peak_bytes for stage in plan.stages] == [peak + size for peak, size in zip(peaks, sizes, strict=True)]
    assert [stage.peak_bytes for stage in drop_snapshots(plan).stages] == peaks
    assert "snapshots: 330 kB, 150 kB, 150 kB, 420 kB of the machines' memory, within the peaks" in str(plan)
    assert "snapshots" not in str(without)
    heads, *rows = stage_memory_table(plan).splitlines()
    assert heads.split()[-2:] == ["snapshot", "peak"]
    assert rows[0].split()[-4:-2] == ["330", "kB"]
    assert Plan.from_json(plan.to_json()) == plan
    for profile in (CHAIN, None):
        assert [stage.memory for stage in check_plan(plan, profile=profile).plan.stages] == [
            stage.memory for stage in plan.stages
        ]


def test_within_a_machine_only_its_own_count() -> None:
    two = Cluster((Level(2, 1e9), Level(2, 1e8)))
    for cluster, received in (
        (Cluster((Level(4, 1e9), Level(1, 1e8))), [0, 0, 0, 0]),
        (two, [SAVED[2], SAVED[3], SAVED[0], SAVED[1]]),
        (replace(two, snapshots="own"), [0, 0, 0, 0]),
    ):
        plan = plan_of(None, cluster=cluster)
        sizes = [stage.memory.snapshot_bytes for stage in plan.stages]
        assert sizes == [3 * mine + 2 * other for mine, other in zip(SAVED, received, strict=True)]


def test_the_search_counts_what_every_worker_keeps() -> None:
    """A lower bound: of a stage's own, as its neighbours are not known yet."""
    with_and_without = [Cluster.flat(4, memory_bytes=10**6), replace(Cluster.flat(4), snapshots="next")]
    less, more = (SearchSpace.of(CHAIN, cluster) for cluster in with_and_without)
    peaks = [stage.peak_bytes for stage in plan_of(None).stages]
    for s, (mine, peak) in enumerate(zip(SAVED, peaks, strict=True)):
        need = more.need_bytes(s, s + 1, 4 - s)
        assert need == less.need_bytes(s, s + 1, 4 - s) + 3 * mine
        assert need <= peak


def test_a_refusal_names_the_missing_bytes() -> None:
    limit = max(stage.peak_bytes for stage in plan_of(None).stages)
    assert plan_of(limit).worker_bytes[3] == limit
    with pytest.raises(PlanError) as refusal:
        plan_of(limit - 3)
    text = str(refusal.value)
    assert "; with snapshots 3.00 B are missing; this would fit: no snapshots (without --snapshot-every)" in text
    assert plan_of(limit - 3, every=None).cluster.snapshots == ""


@given(
    sizes=st.lists(st.integers(1, 9), min_size=3, max_size=6),
    share=st.floats(0.3, 1.1),
    stages=st.integers(2, 3),
)
@example(sizes=[5, 1, 2, 1, 4], share=0.875, stages=3)  # as much memory kept free on all workers is too much on one
def test_a_plan_is_found_where_there_is_one(sizes: list[int], share: float, stages: int) -> None:
    """The fastest of all cuts that fit."""
    layers = tuple(replace(LAYER, parameter_bytes=1000 * size) for size in sizes)
    profile = Profile.of_chain(layers, optimizer_bytes=2000 * sum(sizes))
    limit = int(share * 9000 * sum(sizes))
    cluster = Cluster.flat(stages, memory_bytes=limit)
    periods = []
    for cuts in combinations(range(1, len(sizes)), stages - 1):
        with suppress(PlanError):
            periods.append(plan_of(None, 4, profile, cluster=cluster, shape="any", cuts=cuts).slowest_stage_s)
    if not periods:
        with pytest.raises(PlanError):
            plan_of(None, 4, profile, cluster=cluster)
        return
    plan = plan_of(None, 4, profile, cluster=cluster)
    assert max(plan.worker_bytes.values()) <= limit
    assert plan.slowest_stage_s == min(periods)


@given(
    rows=st.lists(st.tuples(st.sampled_from([0.25, 0.5, 1.0]), st.integers(1, 20)), min_size=2, max_size=4),
    machines=st.sampled_from([(1, 1), (1, 1, 1), (1, 2), (2, 1), (2, 2), (1, 3)]),
    most=st.lists(st.floats(0.2, 1.8), min_size=4, max_size=4),
    alike=st.booleans(),
    recompute=st.sampled_from(["never", "auto"]),
)
@example(
    rows=[(1.0, 4), (1.0, 1)], machines=(1, 1), most=[1.7] * 4, alike=True, recompute="never"
)  # only one stage fits
@example(  # of replicas, the second keeps more than the first
    rows=[(1.0, 3), (1.0, 13), (0.25, 5), (0.25, 16)],
    machines=(2, 2),
    most=[0.44831777525892563, 0.44831777525892563, 0.9613408290507848, 0.906232810486663],
    alike=False,
    recompute="never",
)
def test_the_best_of_all_plans_with_room_is_found(
    rows: list[tuple[float, int]], machines: tuple[int, ...], most: list[float], alike: bool, recompute: str
) -> None:
    """Straight or replicated, on any number of workers, which may differ; there are no messages to have room for."""
    layers = tuple(LayerProfile(cost, cost, 0, 1000 * size, 2000 * size) for cost, size in rows)
    total = sum(size for _, size in rows)
    profile = Profile.of_chain(layers, optimizer_bytes=2000 * total)
    kinds = [Workers(1, str(w), 1.0, int(9000 * total * most[0 if alike else w])) for w in range(sum(machines))]
    levels = Level(max(machines), 1e5, sizes=machines), Level(len(machines), 1e5)
    cluster = Cluster(levels, kinds=tuple(kinds), snapshots="next")
    space, orders = SearchSpace.of(profile, cluster), list_orders(cluster, 50)[0]
    least, best = best_plans(space, orders=orders, recompute=recompute)
    if best is None:
        with pytest.raises(PlanError, match="at depth noam stage" if least else "the least that any of them needs"):
            search_plan(profile, cluster, recompute=recompute)
        return
    plan = search_plan(profile, cluster, recompute=recompute)
    assert replace(plan, note="", bound_s=0.0) == best
    assert plan.bound_s == plan.slowest_stage_s
    assert "kept free" not in plan.note


def test_beside_gpus_they_need_the_memory_of_the_machine() -> None:
    gpu = replace(CHAIN, runtime=RuntimeCosts(overlap_device=True))
    cluster = Cluster((Level(2, 1e9), Level(2, 1e8)), host_bytes=5 * sum(SAVED))
    plan = plan_of(None, 4, gpu, cluster=cluster)
    assert plan.worker_bytes == plan_of(None, None, gpu, cluster=cluster).worker_bytes
    assert "of the machines' memory, beside the GPUs" in str(plan)
    assert stage_memory_table(plan).splitlines()[0].split()[-2:] == ["peak", "snapshot"]
    need = 3 * sum(SAVED[2:]) + 2 * sum(SAVED[:2])
    assert plan_of(None, 4, gpu, cluster=replace(cluster, host_bytes=need))
    with pytest.raises(PlanError, match=r"snapshots were to be kept .* need 570 kB, 570 kB are free: 5.00 B are miss"):
        plan_of(None, 4, gpu, cluster=replace(cluster, host_bytes=need - 5))
    room = need + 4 * sum(SAVED[2:]) // 3  # weights, gradients and state are there too
    hosted, short = (replace(cluster, host_bytes=size) for size in (room, room - 1))
    assert plan_of(None, 4, gpu, cluster=hosted, optimizer_state="host", schedule="1f1b")
    with pytest.raises(PlanError, match=r"1\.00 B more than the"):
        plan_of(None, 4, gpu, cluster=short, optimizer_state="host", schedule="1f1b")


def test_other_values_are_refused() -> None:
    with pytest.raises(PlanError, match="snapshot_every=0 was asked for; give 'auto' or a whole number from 1 on"):
        plan_of(None, 0)
