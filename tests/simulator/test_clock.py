"""The clock by hand: deadlocks, ranks in turns, and sums of tied weights; test_clock_oracle has its oracle."""

import json
from dataclasses import replace
from itertools import pairwise

import pytest
from drawn import runs
from hypothesis import given

import pipedream as pd
from pipedream.core.errors import DeadlockError, ScheduleError
from pipedream.core.plan.cost import SumLink
from pipedream.core.plan.stage import Stage, TiedWeights
from pipedream.core.schedule.lowering import lower
from pipedream.core.schedule.op import Kind
from pipedream.core.schedule.program import Move, Program, RankProgram, advance_instruction
from pipedream.core.schedule.timeline import Span, Timeline
from pipedream.schedules import build
from pipedream.simulator import Costs, costs, simulate
from pipedream.verifier import verify


def straight(stages: int, forward_s: float = 1.0, backward_s: float = 2.0, transfer_s: float = 0.0) -> pd.Plan:
    return pd.Plan.uniform(stages, forward_s, backward_s, transfer_s)


def starts(timeline: Timeline, rank: int, kind: str) -> list[float]:
    return [span.start_s for span in timeline.of_rank(rank) if span.kind == kind]


def test_picture_of_a_run() -> None:
    plan = straight(2, 1.0, 2.0, 0.5)
    timeline = simulate(lower(build("gpipe", plan, 2)), costs(plan), 2)
    assert timeline.spans == (
        Span(0, "F", 0, 0, 0.0, 1.0),
        Span(0, "F", 0, 1, 1.0, 2.0),
        Span(0, "send", 0, 0, 1.0, 1.5),
        Span(0, "wait", 0, 0, 2.0, 6.0),
        Span(0, "send", 0, 1, 2.0, 2.5),
        Span(0, "B", 0, 0, 6.0, 8.0),
        Span(0, "B", 0, 1, 8.0, 10.0),
        Span(0, "U", 0, 1, 10.0, 10.0),
        Span(1, "wait", 1, 0, 0.0, 1.0),  # the targets
        Span(1, "wait", 1, 0, 1.0, 1.5),
        Span(1, "F", 1, 0, 1.5, 2.5),
        Span(1, "F", 1, 1, 2.5, 3.5),
        Span(1, "B", 1, 0, 3.5, 5.5),
        Span(1, "B", 1, 1, 5.5, 7.5),
        Span(1, "send", 1, 0, 5.5, 6.0),
        Span(1, "U", 1, 1, 7.5, 7.5),
        Span(1, "send", 1, 1, 7.5, 8.0),
    )


def test_one_stage_is_data_parallel_and_pays_its_sums() -> None:
    rows = (Stage(0, 1, 4, 1.0, 2.0, 0.25, parameter_bytes=1000),)
    plan = pd.Plan(rows, (1,), pd.Cluster.flat(4, 1000.0), unit="microbatch")
    timeline = simulate(lower(build("pipedream", plan)), costs(plan), 12)
    assert plan.costs.sync_s == (1.5,)
    assert timeline.makespan_s == pytest.approx(3 * (1.0 + 2.0 + 1.5 + 0.25))
    assert starts(timeline, 3, "wait") == pytest.approx([3.0, 7.75, 12.5])


def test_coupled_updates_wait_for_all_ranks() -> None:
    plan = straight(3)
    program = lower(build("gpipe", plan, 2))
    apart = simulate(program, costs(plan), 4)
    coupled = simulate(replace(program, couples_updates=True), costs(plan), 4)
    assert len({starts(apart, rank, "U")[0] for rank in range(3)}) == 3
    assert [starts(coupled, rank, "U") for rank in range(3)] == [starts(apart, 0, "U")] * 3


def broken(program: Program, rank: int, change: dict[str, str]) -> Program:
    """Returns a program with pieces of one rank's warm-up replaced."""
    data = json.loads(program.to_json())
    row = data["ranks"][rank]
    for old, new in change.items():
        assert old in row["warmup"]
        row["warmup"] = row["warmup"].replace(old, new, 1)
    return Program.from_json(json.dumps(data))


def once(program: Program) -> Program:
    """Returns a program that writes its first instructions out, so that a test can break one of them."""
    return replace(
        program, ranks=tuple(RankProgram(tuple(program.instructions(r, 4)), ()) for r in range(len(program.ranks)))
    )


def test_receive_before_its_cause_is_a_deadlock() -> None:
    plan = straight(2)
    program = once(lower(build("naive", plan)))
    sound = simulate(program, costs(plan), 4)
    assert len(sound.work()) == 2 * 4 * 3
    number = {(channel.sender, channel.carries): i for i, channel in enumerate(program.channels)}
    receive, send = f"<{number[1, 'gradient']}:2", f">{number[0, 'activation']}:2"
    swapped = broken(program, 0, {receive: "x", send: receive, "x": send})
    with pytest.raises(DeadlockError) as caught:
        simulate(swapped, costs(plan), 4)
    message = str(caught.value)
    assert f"rank 0 waits at {receive}: the gradient of microbatch 2 from rank 1 to rank 0" in message
    assert "rank 1 waits at <2:2: the input of microbatch 2 from rank 0 to rank 1" in message


def test_more_receives_than_are_posted_is_a_deadlock() -> None:
    plan = straight(2)
    program = once(lower(build("gpipe", plan, 4)))
    early = broken(program, 1, {"<0:0 ": "<0:0 <0:1 <0:2 ", "<2:1 <0:1": "<2:1", "<2:2 <0:2": "<2:2"})
    with pytest.raises(DeadlockError, match="rank 1 waits at <0:2"):
        simulate(early, costs(plan), 4)


def test_sum_without_all_replicas_is_a_deadlock() -> None:
    plan = pd.Plan.uniform(1, replicas=(2,))
    program = once(lower(build("pipedream", plan)))
    with pytest.raises(DeadlockError, match="rank 1 waits at =0:1: the other replicas of stage 0"):
        simulate(broken(program, 0, {"=0:1 ": ""}), costs(plan), 4)


def test_message_out_of_turn_and_message_unread_are_errors() -> None:
    plan = straight(2)
    program = once(lower(build("gpipe", plan, 4)))
    crossed = broken(program, 1, {"<0:0": "<0:9", "<0:1": "<0:0", "<0:9": "<0:1"})
    with pytest.raises(ScheduleError, match=r"rank 1 wants the activation of microbatch 1 .* microbatch 0"):
        simulate(crossed, costs(plan), 4)
    unread = broken(program, 1, {"<0:3 ": ""})
    with pytest.raises(ScheduleError, match=r"the activation of microbatch 3 .* is sent and never received"):
        simulate(unread, costs(plan), 4)


@given(runs())
def test_one_works_at_a_time(run: tuple[pd.Schedule, Costs, int]) -> None:
    schedule, seconds, total = run
    program = lower(schedule)
    shared, apart = simulate(program, seconds, total, in_turns=True), simulate(program, seconds, total)
    work = sorted(shared.work(), key=lambda span: (span.start_s, span.end_s))
    assert all(after.start_s >= before.end_s * (1 - 1e-12) for before, after in pairwise(work))
    assert sorted(span[:4] for span in work) == sorted(span[:4] for span in apart.work())


# -- sums over the holders of tied weights ----------------------------------------------------------------------------


LATENCY_S, BYTES_PER_S = 0.5, 10.0
LINK = SumLink(BYTES_PER_S, LATENCY_S)


def tied_plan(
    stages: int = 3, holders: tuple[int, ...] = (0, 2), replicas: tuple[int, ...] = (), order: tuple[int, ...] = ()
) -> pd.Plan:
    """Equal stages whose messages cost nothing; 100 bytes are held by several."""
    plan = pd.Plan.uniform(stages, update_s=0.25, replicas=replicas or None, order=order)
    rows = tuple(replace(stage, output_bytes=0, parameter_bytes=0) for stage in plan.stages)
    cluster = pd.Cluster.flat(plan.workers, BYTES_PER_S, LATENCY_S)
    return replace(plan, stages=rows, cluster=cluster, tied_weights=(TiedWeights(("w",), holders, 100),))


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "pipedream_2bw"])
@pytest.mark.parametrize(
    ("replicas", "holders", "ranks"),
    [((1, 1, 1), (0, 2), 2), ((1, 1, 1), (0, 1, 2), 3), ((2, 1, 1), (0, 2), 3), ((1, 2, 2), (1, 2), 4)],
)
def test_holders_update_when_their_sum_is_there(
    name: str, replicas: tuple[int, ...], holders: tuple[int, ...], ranks: int
) -> None:
    plan = tied_plan(3, holders, replicas)
    program = lower(build(name, plan, 4))
    verify(program)
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


@pytest.mark.parametrize("name", ["zbv", "interleaved_1f1b", "chimera"])
def test_a_worker_joins_the_sum_once_for_all_its_stages(name: str) -> None:
    """Of four stages on two workers; both ends of the model on one, or on two."""
    order = {"zbv": (0, 1, 1, 0), "interleaved_1f1b": (0, 1, 0, 1)}.get(name, (0, 1, 1, 0))
    stages, replicas = (2, (2, 2)) if name == "chimera" else (4, (1,) * 4)
    plan = tied_plan(stages, (0, stages - 1), replicas, order)
    program = lower(build(name, plan, 4))
    verify(program)
    ranks = {rank for stage in (0, stages - 1) for rank in program.placement.ranks[stage]}
    assert plan.costs.tied_sums_s == (LINK.all_reduce_s(100, len(ranks)),)
    free = replace(plan, tied_weights=())
    alone = simulate(lower(build(name, free, 4)), costs(free), 8)
    seconds = simulate(program, costs(plan), 8).makespan_s
    assert seconds > alone.makespan_s + plan.costs.tied_sums_s[0] if len(ranks) > 1 else seconds == alone.makespan_s
    # Without the sum, a worker may update one of its stages before it has the gradients of the other.
    apart = replace(lower(build(name, free, 4)), plan=plan)
    if name == "zbv":
        with pytest.raises(ScheduleError, match="waits for all stages"):
            verify(apart)


def test_methods_whose_stages_update_differently_are_refused() -> None:
    for name in ("pipedream", "paci", "pipemare", "spectrain", "timeprest"):
        with pytest.raises(ScheduleError, match=r"share 'w' \(stages 0, 2\).* whose stages update at different times"):
            lower(build(name, tied_plan()))
    with pytest.raises(ScheduleError, match="pipedream_vertical_sync"):
        lower(build("pipedream_vertical_sync", tied_plan(replicas=(2, 1, 1))))
    verify(lower(build("pipedream_vertical_sync", tied_plan())))


def test_an_order_in_which_holders_wait_for_each_other_is_found() -> None:
    """Stage 0 updates only after it has received a gradient that the last stage makes after the same update."""
    plan = tied_plan(2, (0, 1))
    program = lower(build("pipedream_2bw", plan, 4))

    first = program.ranks[0]
    *begin, update = first.period
    assert update.kind is Kind.UPDATE
    turn = [advance_instruction(item, program.cycle, program.updates) for item in begin]
    after = next(i for i, item in enumerate(turn) if item.kind is Move.RECEIVE) + 1
    changed = RankProgram((*first.warmup, *begin), (*turn[:after], update, *turn[after:]))
    with pytest.raises(DeadlockError, match="with its gradient of the tied weights"):
        verify(replace(program, ranks=(changed, *program.ranks[1:])))
    verify(replace(program, plan=replace(plan, tied_weights=()), ranks=(changed, *program.ranks[1:])))
