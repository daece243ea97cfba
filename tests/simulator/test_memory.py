"""Bytes held over time, against the definition of a version that is alive and against `core.memory.stage_bytes`."""

from __future__ import annotations

from dataclasses import replace

import pytest
from drawn import runs
from hypothesis import given, settings
from hypothesis import strategies as st

from pipedream.core.cluster import Cluster
from pipedream.core.memory import stage_bytes
from pipedream.core.plan import Plan, Stage
from pipedream.core.schedule import Schedule
from pipedream.core.timeline import MemoryStep, Timeline
from pipedream.lowering import lower
from pipedream.metrics import measure
from pipedream.schedules import build, evaluation
from pipedream.simulator import Costs, costs, simulate

ROWS = tuple(
    Stage(s, s + 1, 1, 1.0, 2.0, output_bytes=80, activation_bytes=800 + s, parameter_bytes=5000, optimizer_bytes=7)
    for s in range(3)
)
PLAN = Plan(ROWS, (3, 2, 1), Cluster.flat(3))


def stage_bytes_at(plan: Plan, stage: int, versions: int, in_flight: int) -> int:
    row = plan.stages[stage]
    return stage_bytes(
        parameter_bytes=row.parameter_bytes,
        optimizer_bytes=row.optimizer_bytes,
        activation_bytes=row.activation_bytes,
        input_bytes=plan.stages[stage - 1].output_bytes if stage else 0,
        versions=versions,
        in_flight=in_flight,
    )


@settings(max_examples=100)
@given(runs(), st.lists(st.integers(0, 10**6), min_size=16, max_size=16))
def test_bytes_after_each_op_are_those_of_what_is_alive(run: tuple[Schedule, Costs, int], numbers: list[int]) -> None:
    drawn, seconds, total = run
    size = iter(numbers)
    rows = tuple(
        replace(
            stage,
            parameter_bytes=next(size),
            optimizer_bytes=next(size),
            activation_bytes=next(size),
            output_bytes=next(size),
        )
        for stage in drawn.plan.stages
    )
    schedule = replace(drawn, plan=replace(drawn.plan, stages=rows))
    timeline = simulate(lower(schedule), seconds, total)
    for rank in range(timeline.workers):
        ((stage, replica),) = schedule.placement.seats(rank)
        mine = range(replica, total, schedule.placement.replicas[stage])
        read = {k: schedule.weights.forward_version(stage, k) for k in mine}
        waiting, newest, in_flight, most = set(mine), 0, 0, 1
        expected = [MemoryStep(0.0, stage_bytes_at(schedule.plan, stage, 1, 0))]
        for span in timeline.of_rank(rank):
            if span.kind == "F":
                in_flight += 1
            elif span.kind == "B":
                in_flight -= 1
                waiting.remove(span.index)
            elif span.kind == "U":
                newest = span.index
            else:
                continue
            alive = {newest} | {read[k] for k in waiting if read[k] <= newest}
            most = max(most, len(alive))
            held = stage_bytes_at(schedule.plan, stage, len(alive), in_flight)
            expected.append(MemoryStep(span.end_s, held))
        assert timeline.memory_steps(rank) == tuple(expected)
        assert timeline.peak_versions[rank] == most
        assert timeline.peak_bytes[rank] == max(step.held_bytes for step in expected)


@pytest.mark.parametrize(
    ("name", "versions"), [("pipedream", (3, 2, 1)), ("1f1b", (1, 1, 1)), ("pipedream_2bw", (2,) * 3)]
)
def test_peak_is_that_of_the_memory_model(name: str, versions: tuple[int, ...]) -> None:
    plan = replace(PLAN, unit="microbatch")
    timeline = simulate(lower(build(name, plan, None if name == "pipedream" else 6)), costs(plan), 24)
    peaks = tuple(stage_bytes_at(plan, s, versions[s], plan.in_flight[s]) for s in range(3))
    assert timeline.peak_bytes == peaks
    assert tuple(row.peak_bytes for row in measure(timeline).per_rank) == peaks


def test_a_picture_of_memory() -> None:
    pair = Plan(ROWS[:2], (2, 1), Cluster.flat(2, 1e30))
    timeline = simulate(lower(build("pipedream", pair)), costs(pair), 3)
    start = stage_bytes_at(pair, 0, 1, 0)
    assert timeline.memory_steps(0) == (
        (0.0, start),
        (1.0, start + 800),  # F0
        (2.0, start + 2 * 800),  # F1
        (6.0, start + 800),  # B0
        (6.0, start + 800 + 5000),  # U1: F1 has read version 0
        (7.0, start + 2 * 800 + 5000),  # F2
        (9.0, start + 800 + 5000 - 5000),  # B1: nobody reads version 0 any more, version 1 is the newest
        (9.0, start + 800 + 5000),  # U2
        (12.0, start),  # B2
        (12.0, start),  # U3
    )


def test_forwards_alone_hold_one_version() -> None:
    timeline = simulate(lower(evaluation(PLAN)), costs(PLAN), 4)
    assert {step.held_bytes for step in timeline.memory_steps(1)} == {stage_bytes_at(PLAN, 1, 1, 0)}


def test_memory_is_saved_and_not_known_of_parts_and_of_measured_runs() -> None:
    timeline = simulate(lower(build("pipedream", PLAN)), costs(PLAN), 4)
    assert Timeline.from_json(timeline.to_json()) == timeline
    assert timeline.between(2.0, 9.0).memory_steps(0) == ()
    assert Timeline("x", "measured", 1, timeline.of_rank(0), 4).memory_steps(0) == ()
