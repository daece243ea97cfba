"""The clock by hand: deadlocks, ranks in turns, and sums of tied weights, buckets; and against the slow clock."""

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from drawn import runs, schedules
from hypothesis import assume, given, settings, strategies as st
from marks import few
from programs import edited, program_of
from slow_clock import FIRST_BYTES, NEXT_BYTES, slow_clock

import pipedream as pd
from pipedream.core.plan import cost, stage as stages
from pipedream.core.plan.cost import BUCKET_BYTES, FIRST_BUCKET_BYTES, Site, SumLink
from pipedream.core.schedule.program import RankProgram
from pipedream.simulator import Costs, costs, simulate
from pipedream.simulator.costs import bucket_costs


def starts(timeline: pd.Timeline, rank: int, kind: str) -> list[float]:
    return [span.start_s for span in timeline.of_rank(rank) if span.kind == kind]


TWO = pd.Plan.uniform(2)


def test_picture_of_a_run() -> None:
    timeline = pd.simulate(pd.Plan.uniform(2, transfer_s=0.5), schedule="gpipe", microbatches=2, minibatches=1)
    assert {span.stage == span.rank for span in timeline.spans} == {True}
    rows = [[f"{s.kind}{s.index} {s.start_s:g}-{s.end_s:g}" for s in timeline.of_rank(rank)] for rank in (0, 1)]
    assert [", ".join(row) for row in rows] == [
        "F0 0-1, F1 1-2, send0 1-1.5, wait0 2-6, send1 2-2.5, B0 6-8, B1 8-10, U1 10-10",
        # First for the targets.
        "wait0 0-1, wait0 1-1.5, F0 1.5-2.5, F1 2.5-3.5, B0 3.5-5.5, B1 5.5-7.5, send0 5.5-6, U1 7.5-7.5, send1 7.5-8",
    ]


def test_coupled_updates_wait_for_all_ranks() -> None:
    plan = pd.Plan.uniform(3)
    apart = simulate(program_of("gpipe", plan, 2), costs(plan), 4)
    coupled = simulate(pd.lower(pd.schedules.build("gpipe", plan, 2).couple_updates()), costs(plan), 4)
    assert len({starts(apart, rank, "U")[0] for rank in range(3)}) == 3
    assert [starts(coupled, rank, "U") for rank in range(3)] == [starts(apart, 0, "U")] * 3


def in_full(name: str, plan: pd.Plan, microbatches: int | None = None) -> pd.Program:
    """Returns a program of four microbatches that is all warm-up, so that a test can break one instruction of it."""
    program = program_of(name, plan, microbatches)
    ranks = range(len(program.ranks))
    return replace(program, ranks=tuple(RankProgram(tuple(program.instructions(rank, 4)), ()) for rank in ranks))


GPIPE = in_full("gpipe", TWO, 4)
OF_REPLICAS = in_full("pipedream", pd.Plan.uniform(1, replicas=(2,)))
BEFORE_ITS_CAUSE = edited(in_full("naive", TWO), 0, (">0:2 >2:2 <1:2", "<1:2 >2:2 >0:2"))
OUT_OF_TURN = ("<0:0", "<0:3"), ("<0:1", "<0:0"), ("<0:3", "<0:1")
MORE_THAN_POSTED = ("<0:0", "<0:0 <0:1 <0:2"), ("<2:1 <0:1", "<2:1"), ("<2:2 <0:2", "<2:2")


@pytest.mark.parametrize(
    ("program", "words"),
    [
        (BEFORE_ITS_CAUSE, "rank 0 waits at <1:2: the gradient of microbatch 2 from rank 1 to rank 0"),
        (BEFORE_ITS_CAUSE, "rank 1 waits at <2:2: the input of microbatch 2 from rank 0 to rank 1"),
        (edited(GPIPE, 1, *MORE_THAN_POSTED), "rank 1 waits at <0:2"),
        (edited(GPIPE, 1, *OUT_OF_TURN), "wants the activation of microbatch 1 .* microbatch 0"),
        (edited(GPIPE, 1, ("<0:3", "")), "the activation of microbatch 3 .* is sent and never received"),
        (edited(OF_REPLICAS, 0, ("+0:0 0B0 =0:1", "0B0")), "rank 1 waits at =0:1: sum over the replicas"),
    ],
)
def test_a_run_that_cannot_end_is_refused(program: pd.Program, words: str) -> None:
    with pytest.raises(pd.errors.ScheduleError, match=words):
        simulate(program, costs(program.plan), 4)


@given(runs())
def test_one_works_at_a_time(run: tuple[pd.Schedule, Costs, int]) -> None:
    schedule, seconds, total = run
    program = pd.lower(schedule)
    shared, apart = simulate(program, seconds, total, in_turns=True), simulate(program, seconds, total)
    work = sorted(shared.work(), key=lambda span: (span.start_s, span.end_s))
    assert all(after.start_s >= before.end_s * (1 - 1e-12) for before, after in pairwise(work))
    assert sorted(span[:4] for span in work) == sorted(span[:4] for span in apart.work())


LATENCY_S, BYTES_PER_S = 0.5, 10.0
LINK = cost.SumLink(BYTES_PER_S, 2 * LATENCY_S)  # between CPUs


def tied_plan(holders: tuple[int, ...] = (0, 2), replicas: tuple[int, ...] = (1, 1, 1)) -> pd.Plan:
    """Three equal stages whose messages cost nothing; 100 bytes are held by several."""
    plan = pd.Plan.uniform(3, update_s=0.25, replicas=replicas)
    rows = tuple(replace(stage, output_bytes=0, parameter_bytes=0) for stage in plan.stages)
    cluster = pd.Cluster.flat(plan.workers, BYTES_PER_S, LATENCY_S)
    return replace(plan, stages=rows, cluster=cluster, tied_weights=(stages.TiedWeights(("w",), holders, 100),))


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "pipedream_2bw"])
@pytest.mark.parametrize(
    ("replicas", "holders", "ranks"),
    [((1, 1, 1), (0, 2), 2), ((1, 1, 1), (0, 1, 2), 3), ((2, 1, 1), (0, 2), 3), ((1, 2, 2), (1, 2), 4)],
)
def test_holders_wait_for_their_sum(name: str, replicas: tuple[int, ...], holders: tuple[int, ...], ranks: int) -> None:
    plan = tied_plan(holders, replicas)
    program = program_of(name, plan, 4)
    pd.verify(program)
    work = simulate(program, costs(plan), 5 * program.cycle).work()
    sum_s = LINK.all_reduce_s(100, ranks)
    assert plan.costs.tied_sums_s == (sum_s,)
    for update in range(1, 5 * program.cycle // 4 + 1):
        last = {k for k in program.updates.members(0, update)}
        ends = {s: max(span.end_s for span in work if span.kind == "B" and span.stage == s and span.index in last)
                for s in range(3)}  # fmt: skip
        starts = {s: {span.start_s for span in work if span.kind == "U" and span.stage == s and span.index == update}
                  for s in range(3)}  # fmt: skip
        # Replicas have summed up before.
        begin_s = max(ends[s] + LINK.all_reduce_s(0, replicas[s]) for s in holders) + sum_s
        for s in range(3):
            if s in holders:
                assert list(starts[s]) == [pytest.approx(begin_s)]
            elif replicas[s] == 1:
                assert list(starts[s]) == [pytest.approx(ends[s])], "the others do not wait"


def test_methods_whose_stages_update_differently_are_refused() -> None:
    words = r"share 'w' \(stages 0, 2\).* whose stages update at different times"
    for name in ("pipedream", "paci", "pipemare", "spectrain", "timeprest"):
        with pytest.raises(pd.errors.ScheduleError, match=words):
            program_of(name, tied_plan())
    with pytest.raises(pd.errors.ScheduleError, match="pipedream_vertical_sync"):
        program_of("pipedream_vertical_sync", tied_plan(replicas=(2, 1, 1)))
    pd.verify(program_of("pipedream_vertical_sync", tied_plan()))


def check_same(schedule: pd.Schedule, seconds: Costs, total: int, **how: Any) -> None:
    """Ops and messages are those of the slow clock; waits shorter than what is rounded may be there or not."""
    program, kinds = pd.lower(schedule), ("F", "B", "I", "W", "U", "send")
    timeline = simulate(program, seconds, total)
    actual = [timeline.of_rank(rank) for rank in range(timeline.workers)]
    for rows in zip(actual, slow_clock(program, seconds, total, **how), strict=True):
        spans, oracle_spans = (
            sorted((s for s in row if s.kind in kinds), key=lambda s: (s.kind, s.stage, s.index)) for row in rows
        )
        assert [s[:4] for s in spans] == [s[:4] for s in oracle_spans]
        seconds, oracle_seconds = ([t for s in row for t in s[4:]] for row in (spans, oracle_spans))
        assert seconds == pytest.approx(oracle_seconds, rel=1e-9, abs=1e-9)


@settings(max_examples=8)
@given(runs())
def test_equals_the_slow_clock(run: tuple[pd.Schedule, Costs, int]) -> None:
    check_same(*run, overlap=False)


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
@few
@given(summed(), st.integers(1, 15))
def test_buckets_one_by_one_are_the_closed_form(schedule: pd.Schedule, total: int) -> None:
    """Where no message is in their way, nor a sum of another stage of the worker."""
    assume(not schedule.plan.is_shared)
    seconds = costs(schedule.plan)
    alone = replace(seconds, output_bytes=(0.0,) * len(seconds.output_bytes))
    check_same(schedule, alone, total, overlap=True, alone=True)


@few
@given(summed(), st.integers(1, 15))
def test_sums_and_messages_share_the_ports(schedule: pd.Schedule, total: int) -> None:
    rows = tuple(replace(stage, output_bytes=5_000_000 * s) for s, stage in enumerate(schedule.plan.stages))
    check_same(schedule, costs(replace(schedule.plan, stages=rows)), total, overlap=True)


def test_buckets_by_hand() -> None:
    assert (FIRST_BUCKET_BYTES, BUCKET_BYTES) == (FIRST_BYTES, NEXT_BYTES)
    two = Site(2, sum_link=SumLink(1 << 20))
    assert bucket_costs(8 << 20, Site(1, sum_link=SumLink(1.0))) == ()
    assert bucket_costs(1 << 20, two) == ((1.0, 1.0),)
    # 1, 4, 4, 4 and 3 MiB at 1 MiB/s between two: of the 4 MiB buckets the first and the last may decide.
    assert bucket_costs(16 << 20, two) == ((1 / 16, 16.0), (5 / 16, 15.0), (13 / 16, 7.0), (1.0, 3.0))
