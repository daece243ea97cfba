"""Plans whose workers have several stages: cut evenly, laid out as the method asks, and checked worker by worker."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

import pipedream as pd
from pipedream.core.hardware.cluster import Workers
from pipedream.workflows import check, methods
from tests.planner.planned import compare

EVEN = pd.Profile.of_chain((pd.LayerProfile(1.0, 1.0, 8, 100, activation_bytes=1000),) * 8, batch=16)
NINE = pd.Profile.of_chain((pd.LayerProfile(1.0, 1.0, 8, 100),) * 9, batch=16)
FOUR = pd.Cluster.flat(4)


@settings(max_examples=8)
@given(st.sampled_from(sorted(pd.schedules.STAGE_ORDERS)), st.sampled_from([2, 4]), st.sampled_from([None, 1, 2]))
def test_every_layout_is_planned_proved_and_simulated(name: str, workers: int, chunks: int | None) -> None:
    layout = pd.schedules.STAGE_ORDERS[name]
    chunks = chunks if layout is pd.schedules.STAGE_ORDERS["interleaved_1f1b"] else None
    plan = pd.plan(NINE, pd.Cluster.flat(workers), schedule=name, chunks=chunks)
    assert plan.workers == workers
    assert len(plan.stages) == layout.stages(workers, chunks)
    assert plan.worker_order == layout.order(workers, chunks or layout.chunks or 1)
    pd.verify(pd.lower(pd.schedules.build(plan.schedule, plan, plan.microbatches)))
    assert methods.score(plan).period_s > 0
    assert pd.Plan.from_json(plan.to_json()) == plan
    assert check.check_plan(plan, profile=NINE).differences == ()


@pytest.mark.parametrize("layout", ["zbv", "chimera", "roundpipe"])
def test_methods_with_one_stage_a_worker_refuse_a_plan_that_lays_out_several(layout: str) -> None:
    plan = pd.plan(EVEN, pd.Cluster.flat(2), schedule=layout)
    reason = r"this method has one stage per worker|replica|depth|update delay|minibatch"
    if layout == "zbv":
        reason = "in the plan worker 0 has the stages 0, 3; plan for this method"
    for name in pd.schedules.METHODS.keys() - pd.schedules.STAGE_ORDERS.keys():
        with pytest.raises(pd.PipelineError, match=reason):
            pd.schedules.build(name, plan)


def test_a_worker_needs_what_all_its_stages_hold() -> None:
    def plan(memory_bytes: int | None = None, **options: Any) -> pd.Plan:
        cluster = pd.Cluster.flat(4, memory_bytes=memory_bytes)
        return pd.plan(EVEN, cluster, schedule="interleaved_1f1b", microbatches=4, **options)

    free = plan()
    assert free.worker_bytes == {w: free.stages[w].peak_bytes + free.stages[w + 4].peak_bytes for w in range(4)}
    most = max(free.worker_bytes.values())
    assert replace(plan(most), cluster=free.cluster) == free
    with pytest.raises(pd.PipelineError, match=r"stages \d, \d of worker \d need up to .* together"):
        plan(most - 1)
    tight = replace(free, cluster=pd.Cluster.flat(4, memory_bytes=most - 1))  # as a person would edit it
    assert max(stage.peak_bytes for stage in tight.stages) < most - 1
    assert tight.first_stage_over_memory is not None
    with pytest.raises(pd.PipelineError, match="in addition to the other stages of its worker"):
        check.check_plan(tight)
    assert check.check_plan(free).plan == free
    assert max(plan(recompute="always").worker_bytes.values()) < most


UNLIKE = replace(FOUR, kinds=(Workers(3), Workers(1, speed=2.0)))


@pytest.mark.parametrize(
    ("ask", "words"),
    [
        (lambda: pd.plan(EVEN, FOUR, schedule="chimera", shape="straight"), "lays its stages out on all workers"),
        (lambda: pd.plan(EVEN, FOUR, schedule="1f1b", chunks=2), "chunks=2, but each worker of this method has one"),
        (lambda: pd.plan(EVEN, pd.Cluster.flat(3), schedule="chimera"), "even number of workers, found 3"),
        (lambda: pd.plan(EVEN, FOUR, schedule="breadth_first", chunks=3), "12 stages"),
        (lambda: pd.plan(EVEN, UNLIKE, schedule="chimera"), "not equally fast"),
        (lambda: pd.plan(EVEN, pd.Cluster.flat(8), schedule="interleaved_1f1b", chunks=1), "but one has 16 samples"),
        (
            lambda: pd.schedules.build("interleaved_1f1b", replace(pd.Plan.uniform(3), worker_order=(0, 2, 1))),
            "needs stage s on worker s mod p, without replicas; found plan 1-1-1",
        ),
        (lambda: compare(EVEN, FOUR, "chimera", schedule="auto"), "plan for it alone"),
    ],
)
def test_what_cannot_be_laid_out_is_refused(ask: Callable[[], Any], words: str) -> None:
    with pytest.raises(pd.PipelineError, match=words):
        ask()


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
