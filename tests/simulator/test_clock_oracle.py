"""The fast clock against the slow one, and the buckets of a sum by hand."""

from dataclasses import replace
from typing import Any

import pytest
from drawn import runs, schedules
from hypothesis import assume, given, settings, strategies as st
from slow_clock import FIRST_BYTES, NEXT_BYTES, slow_clock

import pipedream as pd
from pipedream.core.plan.cost import BUCKET_BYTES, FIRST_BUCKET_BYTES, Site, SumLink
from pipedream.simulator import Costs, costs, simulate
from pipedream.simulator.costs import bucket_costs


def by_rank(timeline: pd.Timeline) -> list[list[Any]]:
    return [sorted(timeline.of_rank(rank)) for rank in range(timeline.workers)]


def check_same(actual: list[list[Any]], expected: list[list[Any]], kinds: str) -> None:
    """Ops and messages alike; waits shorter than what is rounded may be there or not."""
    for mine, theirs in zip(actual, expected, strict=True):
        spans, oracle_spans = (
            sorted((s for s in row if s.kind in kinds.split()), key=lambda s: (s.kind, s.stage, s.index))
            for row in (mine, theirs)
        )
        assert [s[:4] for s in spans] == [s[:4] for s in oracle_spans]
        seconds, oracle_seconds = ([t for s in row for t in s[4:]] for row in (spans, oracle_spans))
        assert seconds == pytest.approx(oracle_seconds, rel=1e-9, abs=1e-9)


@settings(max_examples=8)
@given(runs())
def test_equals_the_slow_clock(run: tuple[pd.Schedule, Costs, int]) -> None:
    schedule, seconds, total = run
    program = pd.lower(schedule)
    expected = slow_clock(program, seconds, total, overlap=False)
    check_same(by_rank(simulate(program, seconds, total)), expected, "F B I W U send")


@st.composite
def summed(draw: st.DrawFn) -> pd.Schedule:
    """A schedule on a plan with gradients of zero to many buckets, and sums about as long as a backward."""
    schedule = draw(schedules())
    s = st.floats(0.1, 3.0)
    size = st.sampled_from([0, 1, FIRST_BYTES, FIRST_BYTES + 1, FIRST_BYTES + NEXT_BYTES, 17 << 20, 60_000_001])
    rows = tuple(
        replace(stage, forward_s=draw(s), backward_s=draw(s), parameter_bytes=draw(size))
        for stage in schedule.plan.stages
    )
    latency_s = draw(st.sampled_from([0.0, 0.01, 0.5]))
    cluster = pd.Cluster.flat(schedule.plan.workers, draw(st.floats(3e6, 3e8)), latency_s)
    plan = replace(schedule.plan, stages=rows, cluster=cluster)
    splits = schedule.name not in ("pipedream", "pipedream_vertical_sync")
    return pd.schedules.build(schedule.name, plan, schedule.microbatches if splits else None)


@pytest.mark.slow
@settings(max_examples=8)
@given(summed(), st.integers(1, 15))
def test_buckets_one_by_one_are_the_closed_form(schedule: pd.Schedule, total: int) -> None:
    """Where no message is in their way, nor a sum of another stage of the worker."""
    assume(not schedule.plan.is_shared)
    program, seconds = pd.lower(schedule), costs(schedule.plan)
    alone = replace(seconds, output_bytes=(0.0,) * len(seconds.output_bytes))
    expected = slow_clock(program, alone, total, overlap=True, alone=True)
    check_same(by_rank(simulate(program, alone, total)), expected, "F B I W U send")


@settings(max_examples=8)
@given(summed(), st.integers(1, 15))
def test_sums_and_messages_share_the_ports(schedule: pd.Schedule, total: int) -> None:
    rows = tuple(replace(stage, output_bytes=5_000_000 * s) for s, stage in enumerate(schedule.plan.stages))
    seconds = costs(replace(schedule.plan, stages=rows))
    program = pd.lower(schedule)
    expected = slow_clock(program, seconds, total, overlap=True)
    check_same(by_rank(simulate(program, seconds, total)), expected, "F B I W U send")


def test_buckets_by_hand() -> None:
    assert (FIRST_BUCKET_BYTES, BUCKET_BYTES) == (FIRST_BYTES, NEXT_BYTES)
    two = Site(2, sum_link=SumLink(1 << 20))
    assert bucket_costs(8 << 20, Site(1, sum_link=SumLink(1.0))) == ()
    assert bucket_costs(1 << 20, two) == ((1.0, 1.0),)
    # 1, 4, 4, 4 and 3 MiB at 1 MiB/s between two: of the 4 MiB buckets the first and the last may decide.
    assert bucket_costs(16 << 20, two) == ((1 / 16, 16.0), (5 / 16, 15.0), (13 / 16, 7.0), (1.0, 3.0))
