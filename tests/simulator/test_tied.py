"""The sums over the holders of tied weights, in proof and simulation."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pipedream.core.errors import DeadlockError, ScheduleError
from pipedream.core.hardware.cluster import Cluster
from pipedream.core.plan.cost import all_reduce_s
from pipedream.core.plan.plan import Plan
from pipedream.core.plan.stage import TiedWeights
from pipedream.core.schedule.lowering import lower
from pipedream.core.schedule.op import Kind
from pipedream.core.schedule.program import Move, RankProgram, advance_instruction
from pipedream.schedules import build
from pipedream.simulator import costs, simulate
from pipedream.verifier import verify

LATENCY_S, BYTES_PER_S = 0.5, 10.0


def tied_plan(
    stages: int = 3, holders: tuple[int, ...] = (0, 2), replicas: tuple[int, ...] = (), order: tuple[int, ...] = ()
) -> Plan:
    """Equal stages whose messages cost nothing; 100 bytes are held by several."""
    plan = Plan.uniform(stages, update_s=0.25, replicas=replicas or None, order=order)
    rows = tuple(replace(stage, output_bytes=0, parameter_bytes=0) for stage in plan.stages)
    cluster = Cluster.flat(plan.workers, BYTES_PER_S, LATENCY_S)
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
    sum_s = all_reduce_s(100, ranks, BYTES_PER_S, LATENCY_S)
    assert plan.costs.tied_sums_s == (sum_s,)
    for update in range(1, 5 * program.cycle // 4 + 1):
        last = {k for k in program.updates.members(0, update)}
        ends = {s: max(span.end_s for span in work if span.kind == "B" and span.stage == s and span.index in last)
                for s in range(3)}  # fmt: skip
        starts = {s: {span.start_s for span in work if span.kind == "U" and span.stage == s and span.index == update}
                  for s in range(3)}  # fmt: skip
        # Replicas have summed up before.
        begin_s = max(ends[s] + all_reduce_s(0, replicas[s], BYTES_PER_S, LATENCY_S) for s in holders) + sum_s
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
    assert plan.costs.tied_sums_s == (all_reduce_s(100, len(ranks), BYTES_PER_S, LATENCY_S),)
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
