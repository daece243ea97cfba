"""Plans whose workers have several stages: cut evenly, laid out as the method asks, and checked worker by worker."""

from dataclasses import replace

import pytest
from hypothesis import given, settings, strategies as st

import pipedream as pd
from pipedream import schedules
from pipedream.core.errors import PlanError, ScheduleError
from pipedream.core.hardware.cluster import Cluster, Workers
from pipedream.core.model.profile import LayerProfile, Profile
from pipedream.core.schedule.lowering import lower
from pipedream.plan_request import PlanRequest
from pipedream.schedules.kit.method import looped
from pipedream.verifier import verify
from pipedream.workflows import plan as planning
from pipedream.workflows.check import check_plan
from pipedream.workflows.methods import score

EVEN = Profile.of_chain((LayerProfile(1.0, 1.0, 8, 100, activation_bytes=1000),) * 8, batch=16)


@settings(max_examples=8)
@given(
    st.sampled_from(sorted(schedules.STAGE_ORDERS)), st.sampled_from([2, 4]), st.sampled_from([None, 1, 2]), st.just(9)
)
def test_every_layout_is_planned_proved_and_simulated(name: str, workers: int, chunks: int | None, layers: int) -> None:
    profile = Profile.of_chain((LayerProfile(1.0, 1.0, 8, 100),) * layers, batch=16)
    layout = schedules.STAGE_ORDERS[name]
    chunks = chunks if layout is looped else None
    plan = pd.plan(profile, Cluster.flat(workers), schedule=name, chunks=chunks)
    assert plan.workers == workers
    assert len(plan.stages) == layout.stages(workers, chunks)
    assert plan.worker_order == layout.order(workers, chunks or layout.chunks or 1)
    verify(lower(schedules.build(plan.schedule, plan, plan.microbatches)))
    assert score(plan).period_s > 0
    assert pd.Plan.from_json(plan.to_json()) == plan
    assert check_plan(plan, profile=profile).differences == ()


@pytest.mark.parametrize("layout", ["zbv", "chimera", "roundpipe"])
def test_methods_with_one_stage_a_worker_refuse_a_plan_that_lays_out_several(layout: str) -> None:
    plan = pd.plan(EVEN, Cluster.flat(2), schedule=layout)
    reason = r"this method has one stage per worker|replica|depth|update delay|minibatch"
    if layout == "zbv":
        reason = "in the plan worker 0 has the stages 0, 3; plan for this method"
    for name in schedules.METHODS.keys() - schedules.STAGE_ORDERS.keys():
        with pytest.raises(ScheduleError, match=reason):
            schedules.build(name, plan)


def test_equal_layers_give_the_papers_bubbles() -> None:
    looped = pd.plan(EVEN, Cluster.flat(4, 1e30), schedule="interleaved_1f1b", microbatches=8)
    assert [stage.last - stage.first for stage in looped.stages] == [1] * 8
    assert score(looped).bubble == pytest.approx(3 / (2 * 8 + 3))
    assert looped.period_s == pytest.approx(4.0)  # two stages of two seconds on each worker
    mirrored = pd.plan(EVEN, Cluster.flat(4, 1e30), schedule="chimera", microbatches=8)
    assert score(mirrored).bubble == pytest.approx(2 / (2 * 8 + 2))
    assert mirrored.period_s == pytest.approx(4.0)


def test_a_worker_needs_what_all_its_stages_hold() -> None:
    free = pd.plan(EVEN, Cluster.flat(4), schedule="interleaved_1f1b", microbatches=4)
    assert free.worker_bytes == {w: free.stages[w].peak_bytes + free.stages[w + 4].peak_bytes for w in range(4)}
    most = max(free.worker_bytes.values())
    fits = pd.plan(EVEN, Cluster.flat(4, memory_bytes=most), schedule="interleaved_1f1b", microbatches=4)
    assert replace(fits, cluster=free.cluster) == free
    with pytest.raises(PlanError, match=r"stages \d, \d of worker \d need up to .* together"):
        pd.plan(EVEN, Cluster.flat(4, memory_bytes=most - 1), schedule="interleaved_1f1b", microbatches=4)
    tight = replace(free, cluster=Cluster.flat(4, memory_bytes=most - 1))  # as a person would edit it
    assert max(stage.peak_bytes for stage in tight.stages) < most - 1
    assert tight.first_stage_over_memory is not None
    with pytest.raises(PlanError, match="in addition to the other stages of its worker"):
        check_plan(tight)
    assert check_plan(free).plan == free
    again = pd.plan(EVEN, Cluster.flat(4), schedule="interleaved_1f1b", microbatches=4, recompute="always")
    assert max(again.worker_bytes.values()) < most


def test_what_cannot_be_laid_out_is_refused() -> None:
    cluster = Cluster.flat(4)
    with pytest.raises(PlanError, match="lays its stages out on all workers"):
        pd.plan(EVEN, cluster, schedule="chimera", shape="straight")
    with pytest.raises(PlanError, match="chunks=2, but each worker of this method has one stage"):
        pd.plan(EVEN, cluster, schedule="1f1b", chunks=2)
    with pytest.raises(ScheduleError, match="even number of workers, found 3"):
        pd.plan(EVEN, Cluster.flat(3), schedule="chimera")
    with pytest.raises(PlanError, match="12 stages"):
        pd.plan(EVEN, cluster, schedule="breadth_first", chunks=3)
    with pytest.raises(PlanError, match="not equally fast"):
        pd.plan(EVEN, replace(cluster, kinds=(Workers(3), Workers(1, speed=2.0))), schedule="chimera")
    with pytest.raises(PlanError, match="splits a minibatch into 32 microbatches, but one has 16 samples"):
        pd.plan(EVEN, Cluster.flat(8), schedule="interleaved_1f1b", chunks=1)
    with pytest.raises(ScheduleError, match="needs stage s on worker s mod p, without replicas; found plan 1-1-1"):
        schedules.build("interleaved_1f1b", replace(pd.Plan.uniform(3), worker_order=(0, 2, 1)))
    with pytest.raises(ScheduleError, match="plan for it alone"):
        planning.plan_and_compare(EVEN, PlanRequest(cluster, schedule="auto"), names=["chimera"])


def test_the_plan_says_who_has_several_stages() -> None:
    plan = pd.Plan.uniform(4, order=(0, 1, 0, 1))
    assert plan.workers == 2
    assert plan.is_shared
    assert plan.placement.ranks == ((0,), (1,), (0,), (1,))
    assert not pd.Plan.uniform(2, order=(1, 0)).is_shared
    with pytest.raises(ValueError, match="replicas of a stage are on workers of their own"):
        pd.Plan.uniform(2, replicas=(2, 1), order=(0, 0, 1))
    with pytest.raises(ValueError, match="a worker for each of 2 replicas"):
        pd.Plan.uniform(2, order=(0, 1, 0))
