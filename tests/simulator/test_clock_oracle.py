"""The fast clock against the slow one, and what overlapping sums come to."""

from __future__ import annotations

from dataclasses import replace

import pytest
from drawn import runs, schedules
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from slow_clock import FIRST_BYTES, NEXT_BYTES, slow_clock

from pipedream.core.hardware.cluster import Cluster
from pipedream.core.plan.cost import BUCKET_BYTES, FIRST_BUCKET_BYTES, Site, all_reduce_s
from pipedream.core.plan.plan import Plan
from pipedream.core.plan.stage import Stage
from pipedream.core.schedule.lowering import lower
from pipedream.core.schedule.schedule import Schedule
from pipedream.core.schedule.timeline import Span, Timeline
from pipedream.schedules import build
from pipedream.simulator import Costs, costs, simulate
from pipedream.simulator.costs import bucket_costs


def by_rank(timeline: Timeline) -> list[list[Span]]:
    return [sorted(timeline.of_rank(rank)) for rank in range(timeline.workers)]


def check_same(actual: list[list[Span]], expected: list[list[Span]], kinds: str) -> None:
    """Ops and messages alike; waits shorter than what is rounded may be there or not."""
    for mine, theirs in zip(actual, expected, strict=True):
        here, there = (
            sorted((s for s in row if s.kind in kinds.split()), key=lambda s: (s.kind, s.stage, s.index))
            for row in (mine, theirs)
        )
        assert [s[:4] for s in here] == [s[:4] for s in there]
        assert [t for s in here for t in s[4:]] == pytest.approx([t for s in there for t in s[4:]], rel=1e-9, abs=1e-9)


@settings(max_examples=8)
@given(runs())
def test_equals_the_slow_clock(run: tuple[Schedule, Costs, int]) -> None:
    schedule, seconds, total = run
    program = lower(schedule)
    expected = slow_clock(program, seconds, total, overlap=False)
    check_same(by_rank(simulate(program, seconds, total)), expected, "F B I W U send")


@st.composite
def summed(draw: st.DrawFn) -> Schedule:
    """A schedule on a plan with gradients of zero to many buckets, and sums about as long as a backward."""
    schedule = draw(schedules())
    rows = tuple(
        replace(
            stage,
            forward_s=draw(st.floats(0.1, 3.0)),
            backward_s=draw(st.floats(0.1, 3.0)),
            parameter_bytes=draw(
                st.sampled_from([0, 1, FIRST_BYTES, FIRST_BYTES + 1, FIRST_BYTES + NEXT_BYTES, 17 << 20, 60_000_001])
            ),
        )
        for stage in schedule.plan.stages
    )
    latency_s = draw(st.sampled_from([0.0, 0.01, 0.5]))
    cluster = Cluster.flat(schedule.plan.workers, draw(st.floats(3e6, 3e8)), latency_s)
    plan = replace(schedule.plan, stages=rows, cluster=cluster)
    splits = schedule.name not in ("pipedream", "pipedream_vertical_sync")
    return build(schedule.name, plan, schedule.microbatches if splits else None)


@pytest.mark.slow
@settings(max_examples=8)
@given(summed(), st.integers(1, 15))
def test_buckets_one_by_one_are_the_closed_form(schedule: Schedule, total: int) -> None:
    """Where no message is in their way, nor a sum of another stage of the worker."""
    assume(not schedule.plan.is_shared)
    program, seconds = lower(schedule), costs(schedule.plan)
    alone = replace(seconds, output_bytes=(0.0,) * len(seconds.output_bytes))
    expected = slow_clock(program, alone, total, overlap=True, alone=True)
    check_same(by_rank(simulate(program, alone, total)), expected, "F B I W U send")


@settings(max_examples=8)
@given(summed(), st.integers(1, 15))
def test_sums_and_messages_share_the_ports(schedule: Schedule, total: int) -> None:
    rows = tuple(replace(stage, output_bytes=5_000_000 * s) for s, stage in enumerate(schedule.plan.stages))
    seconds = costs(replace(schedule.plan, stages=rows))
    program = lower(schedule)
    expected = slow_clock(program, seconds, total, overlap=True)
    check_same(by_rank(simulate(program, seconds, total)), expected, "F B I W U send")


def test_buckets_by_hand() -> None:
    assert (FIRST_BUCKET_BYTES, BUCKET_BYTES) == (FIRST_BYTES, NEXT_BYTES)
    two = Site(2, sum_bytes_per_s=1 << 20)
    assert bucket_costs(8 << 20, Site(1, sum_bytes_per_s=1.0)) == ()
    assert bucket_costs(1 << 20, two) == ((1.0, 1.0),)
    # 1, 4, 4, 4 and 3 MiB at 1 MiB/s between two: of the 4 MiB buckets the first and the last may decide.
    assert bucket_costs(16 << 20, two) == ((1 / 16, 16.0), (5 / 16, 15.0), (13 / 16, 7.0), (1.0, 3.0))


def data_parallel(parameter_bytes: int, backward_s: float, update_delay: int = 0) -> Plan:
    """One replicated stage of a forward of 1 s; with an update delay in front of a stage that takes no time."""
    rows = (Stage(0, 1, 2, 1.0, backward_s, 0.25, parameter_bytes=parameter_bytes),)
    if not update_delay:
        return Plan(rows, (1,), Cluster.flat(2, 1 << 20), unit="microbatch")
    rows += (Stage(1, 2),)
    return Plan(rows, (3, 1), Cluster.flat(3, 1 << 20), (1, 0), unit="microbatch")


def round_s(plan: Plan, overlap: bool) -> float:
    timeline = simulate(lower(build("pipedream", plan)), costs(plan, overlap=overlap), 80)
    ends = [span.end_s for span in timeline.of_rank(0) if span.kind == "U"]
    return (ends[30] - ends[10]) / 20


@pytest.mark.parametrize(
    ("size", "backward_s", "shows_s"),
    [
        (1 << 20, 8.0, 1.0),  # one bucket: nothing is hidden
        (9 << 20, 27.0, 4.0),  # a long backward hides all but the last bucket
        (9 << 20, 4.5, 8.0 - 4.5 * 4 / 9),  # a shorter one only what runs while the second bucket is not yet there
        (9 << 20, 1.8, 9.0 - 1.8 * 8 / 9),  # a short one all of itself but the first bucket's share
    ],
)
def test_what_shows_of_a_sum(size: int, backward_s: float, shows_s: float) -> None:
    plan = data_parallel(size, backward_s)
    assert all_reduce_s(size, 2, 1 << 20) == size / (1 << 20)
    assert round_s(plan, overlap=True) == pytest.approx(1.0 + backward_s + shows_s + 0.25)
    assert round_s(plan, overlap=False) == pytest.approx(1.0 + backward_s + size / (1 << 20) + 0.25)


@pytest.mark.parametrize(("size", "shows_s"), [(1 << 20, 0.0), (9 << 20, 3.0)])
def test_the_forward_behind_a_lagging_update_hides_its_sum(size: int, shows_s: float) -> None:
    plan = data_parallel(size, 27.0, update_delay=1)
    assert round_s(plan, overlap=True) == pytest.approx(1.0 + 27.0 + shows_s + 0.25)
    assert round_s(plan, overlap=False) == pytest.approx(1.0 + 27.0 + size / (1 << 20) + 0.25)


def test_an_absent_replica_brings_its_part_at_the_update() -> None:
    plan = data_parallel(9 << 20, 27.0)
    timeline = simulate(lower(build("pipedream", plan)), costs(plan), 3)
    last = [next(s for s in timeline.of_rank(rank) if s.kind == "U" and s.index == 2) for rank in (0, 1)]
    first = next(s for s in timeline.of_rank(0) if s.kind == "U")
    assert [s.start_s for s in last] == pytest.approx([first.end_s + 1.0 + 27.0 + 4.0] * 2)
