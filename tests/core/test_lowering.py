"""From orders to programs: nothing lost, nothing moved, one channel a direction."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import count, islice, takewhile

import drawn
import pytest
from hypothesis import given, strategies as st
from programs import program_of, with_rank

import pipedream as pd
from pipedream.core.schedule.program import format_instructions

Kind, Op = pd.schedules.Kind, pd.schedules.Op

plans = st.lists(st.integers(1, 3), min_size=1, max_size=3).map(lambda r: pd.Plan.uniform(len(r), replicas=r))
schedules = st.one_of(drawn.schedules(), drawn.schedules(), plans.map(pd.schedules.evaluation))


@given(schedules, st.integers(1, 40))
def test_ops_are_those_of_the_schedule(schedule: pd.Schedule, minibatches: int) -> None:
    """The order, folded into warm-up and period and unrolled again, is the order: for any run, drain included."""
    program = pd.lower(schedule)
    total = minibatches * schedule.microbatches
    for rank in range(schedule.placement.workers):
        ops = [item for item in program.instructions(rank, total) if isinstance(item, Op)]
        assert ops == list(schedule.ops(rank, total))


@given(schedules, st.integers(1, 12), st.data())
def test_a_rank_may_learn_the_total_on_the_way(schedule: pd.Schedule, minibatches: int, data: st.DataObject) -> None:
    """It may have executed any instructions that exist, and one more op, by which it found the end."""
    program = pd.lower(schedule)
    total = minibatches * schedule.microbatches
    exists = program.exists(total)
    for rank in range(schedule.placement.workers):
        existing = sum(1 for _ in takewhile(exists, islice(program.stream(rank), 2000)))
        for executed in (data.draw(st.integers(0, existing)), existing, existing + 1):
            first = [i for i in islice(program.stream(rank), executed) if exists(i)]
            assert [*first, *program.instructions(rank, total, executed)] == list(program.instructions(rank, total))


@given(schedules)
def test_each_direction_has_a_channel_of_its_own(schedule: pd.Schedule) -> None:
    program = pd.lower(schedule)
    ends = [(channel.sender, channel.receiver, channel.carries, channel.source) for channel in program.channels]
    assert len(set(ends)) == len(ends)
    for index, (sender, receiver, carries, _) in enumerate(ends):
        assert sender != receiver
        source, target = program.channels[index].source, program.channels[index].target
        assert (target > source) - (target < source) == {"gradient": -1, "stage_input": 0}.get(carries, 1)


def test_rings_hold_what_may_lie_between_two_stages() -> None:
    """In flight upstream minus in flight downstream, and the one that is being read; between 2 and 8."""
    plan = replace(pd.Plan.uniform(3), in_flight=(20, 4, 1), depth_mode="hand")
    depths = {f"{c.carries} {c.source}-{c.target}": c.depth for c in program_of("pipedream", plan).channels}
    inner = {"activation 0-1": 8, "gradient 1-0": 8, "activation 1-2": 4, "gradient 2-1": 4}
    assert depths == inner | {"input 0-2": 8}


def test_pictures() -> None:
    program = program_of("pipedream", pd.Plan.uniform(3))
    assert [(format_instructions(rank.warmup), format_instructions(rank.period)) for rank in program.ranks] == [
        ("0F0 >0:0 >4:0 0F1 >0:1 >4:1", "0F2 >0:2 >4:2 <1:0 0B0 0U1"),
        ("<0:0 1F0 >2:0", "<0:1 1F1 >2:1 <3:0 1B0 >1:0 1U1"),
        ("", "<4:0 <2:0 2F0 2B0 >3:0 2U1"),
    ]
    alone = program_of("pipedream", pd.Plan.uniform(1, replicas=(2,)))
    assert format_instructions(alone.ranks[1].period) == "0F1 +0:1 0B1 =0:1 0U1"
    assert alone.channels == ()
    late = program_of("pipedream", replace(pd.Plan.uniform(2, replicas=(2, 1)), update_delay=(1, 0)))
    assert format_instructions(late.ranks[0].period) == "+0:0 <2:0 0B0 0F4 >0:4 >4:4 =0:1 0U1"
    evaluating = pd.lower(pd.schedules.evaluation(pd.Plan.uniform(2)))
    assert format_instructions(evaluating.ranks[1].period) == "<2:0 <0:0 1F0"
    assert [str(item) for item in evaluating.instructions(0, 2)] == ["0F0", ">0:0", ">2:0", "0F1", ">0:1", ">2:1"]


def restless(rank: int) -> Iterator[Op]:
    """Each update one forward later than the one before: no two turns are alike."""
    for number in count(1):
        done = number * (number - 1) // 2
        yield from (Op(Kind.FORWARD, 0, k) for k in range(done, done + number))
        yield from (Op(Kind.BACKWARD, 0, k) for k in range(done, done + number))


def test_an_order_without_a_period_or_an_end_is_refused() -> None:
    schedule = pd.schedules.build("pipedream", pd.Plan.uniform(1))
    ending = replace(schedule, order=lambda rank: iter([Op(Kind.FORWARD, 0, 0)]))
    lacking = replace(schedule, order=lambda rank: (op for op in schedule.order(rank) if op.kind is not Kind.UPDATE))
    program = program_of("1f1b", pd.Plan.uniform(1), 2)
    short = with_rank(program, 0, period=program.ranks[0].period[:-1])
    for call, words in (
        (lambda: pd.lower(replace(schedule, order=restless)), "order of rank 0 does not (settle into a|repeat itself)"),
        (lambda: pd.lower(ending), "does not settle"),
        (lambda: pd.lower(lacking), "microbatches: it has 2 ops there, not 3; run each pass and update once"),
        (lambda: list(ending.ops(0, 1)), "lacks 2 ops of a run of 1"),
        (lambda: list(short.instructions(0, 2)), "rank 0 lacks 1 ops of 2 microbatches"),
    ):
        with pytest.raises(pd.errors.ScheduleError, match=words):
            call()
