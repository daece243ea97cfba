"""What a method declares about itself, against the schedules that it builds, and asks of replicated plans."""

from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest

import pipedream as pd
from pipedream.workflows.methods import select_methods


def plans(name: str) -> list[pd.Plan]:
    """Returns plans of equal stages on 2 and 4 workers, and some with replicas."""
    equal = [pd.schedules.uniform(name, workers) for workers in (2, 4)]
    if name not in pd.schedules.STAGE_ORDERS:
        equal += [pd.Plan.uniform(len(counts), replicas=counts) for counts in ((2, 1), (1, 2), (2, 2, 1))]
    return equal


def reads_stored_weights(schedule: pd.Schedule) -> bool:
    weights = schedule.weights
    stages = range(len(schedule.plan.stages))
    same = all(weights.forward_version(s, k) == weights.backward_version(s, k) for s, k in product(stages, range(40)))
    return same and not any(weights.predictions(s) for s in stages)


@pytest.mark.parametrize("name", pd.schedules.METHODS)
def test_a_method_is_what_it_declares(name: str) -> None:
    """On plans of 2 to 4 workers, with and without replicas, deeper, and with an update delay."""
    declared = pd.schedules.METHODS[name].properties
    assert declared is not None, "a method of this library declares its properties"
    built = [pd.schedules.build(name, plan) for plan in plans(name)]
    assert {schedule.flushes for schedule in built} == {declared.flushes}
    assert {schedule.splits_backward for schedule in built} == {declared.splits_backward}
    assert {any(stage.recompute for stage in schedule.plan.stages) for schedule in built} == {declared.recomputes}
    assert all(map(reads_stored_weights, built)) == declared.reads_stored_weights
    for plan in plans(name):
        m = 4 * plan.workers
        if declared.splits_minibatch:
            assert pd.schedules.build(name, plan, m).microbatches == m
        else:
            with pytest.raises(pd.errors.ScheduleError, match="does not split it"):
                pd.schedules.build(name, plan, m)


@pytest.mark.parametrize("name", pd.schedules.METHODS)
def test_a_declaration_is_what_would_be_derived(name: str) -> None:
    assert pd.schedules.derive_properties(name) == pd.schedules.METHODS[name].properties


def test_a_method_with_other_options_is_looked_at() -> None:
    assert not pd.schedules.properties_of("paci").reads_stored_weights
    assert pd.schedules.properties_of("paci[backward_rule=stash]").reads_stored_weights
    assert pd.schedules.properties_of("paci[backward_rule=recompute]").recomputes


def test_a_user_file_need_not_declare_anything(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "from pipedream.schedules import Method, MethodProperties, build\n\n"
        "def late(plan, microbatches=None):\n    return build('pipedream_vertical_sync', plan, microbatches)\n\n"
        "def declared(plan, microbatches=None):\n    return late(plan, microbatches)\n\n"
        "METHODS = (Method(late), Method(declared, properties=MethodProperties(splits_backward=True)))\n"
    )
    assert pd.schedules.properties_of(f"{file}:late") == pd.schedules.properties_of("pipedream_vertical_sync")
    assert pd.schedules.properties_of(f"{file}:declared") == pd.schedules.MethodProperties(splits_backward=True)
    assert list(select_methods([f"{file}:late", "2bw"])) == [f"{file}:late", "pipedream_2bw"]


def test_what_cannot_be_compared_is_refused() -> None:
    with pytest.raises(pd.errors.ScheduleError, match="puts several stages on a worker"):
        select_methods(["zbv"])


@pytest.mark.parametrize("name", ["naive", "gpipe", "1f1b", "zb_h1", "zb_h2"])
def test_fewer_microbatches_than_replicas_are_refused(name: str) -> None:
    plan = pd.Plan.uniform(2, replicas=(3, 1))
    with pytest.raises(pd.errors.ScheduleError, match="a stage has 3 replicas"):
        pd.schedules.build(name, plan, 2)
    assert pd.schedules.build(name, plan, 3).microbatches == 3
    assert pd.schedules.build(name, plan).microbatches >= 3


@pytest.mark.parametrize(
    ("replicas", "in_flight", "stage", "least"),
    [((2, 1), (4, 1), 0, 6), ((1, 3), (1, 1), 1, 3), ((1, 1, 1), (4, 3, 1), 0, 3), ((1, 2), (5, 3), 0, 4)],
)
def test_two_buffers_reach_over_the_warm_up(replicas: tuple[int, ...], in_flight: Any, stage: int, least: int) -> None:
    """PipeDream-2BW: floor(m / r_s) >= W_s, or a forward would read a version that is not made yet."""
    plan = replace(pd.Plan.uniform(len(replicas), replicas=replicas), in_flight=in_flight, depth_mode="hand")
    says = rf"stage {stage} has {in_flight[stage] - 1} warm-up forwards and {replicas[stage]} replicas, .* at least"
    with pytest.raises(pd.errors.ScheduleError, match=says):
        pd.schedules.build("pipedream_2bw", plan, least - 1)
    pd.verify(pd.lower(pd.schedules.build("pipedream_2bw", plan, least)))
    pd.verify(pd.lower(pd.schedules.build("pipedream_2bw", plan)))


def test_two_buffers_do_not_lag() -> None:
    """With update delay 1 upstream, stage 1 may wait for a minibatch more than stage 0 has in flight; 2BW has none."""
    plan = replace(pd.Plan.uniform(2, replicas=(3, 2)), in_flight=(2, 3), update_delay=(1, 1), depth_mode="hand")
    pd.schedules.build("pipedream", plan)
    with pytest.raises(pd.errors.ScheduleError, match=r"\(2, 3\): they need the plan's update delay \(1, 1\)"):
        pd.schedules.build("pipedream_2bw", plan)
