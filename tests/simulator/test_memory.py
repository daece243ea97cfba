"""Bytes held over time, against the definition of a live version and against `core.schedule.stage_memory`."""

from __future__ import annotations

from dataclasses import fields, replace
from itertools import accumulate

import pytest
from drawn import runs, straight
from hypothesis import given, strategies as st
from programs import program_of

import pipedream as pd
from pipedream.core.model.weight_shapes import Matrices
from pipedream.core.plan import cost, memory
from pipedream.core.schedule.stage_memory import DEFERRED_SHARE
from pipedream.simulator import Costs, costs, simulate

ROWS = tuple(
    pd.Stage(s, s + 1, 1, 1.0, 2.0, output_bytes=80, activation_bytes=800 + s, parameter_bytes=5000, optimizer_bytes=7)
    for s in range(3)
)
PLAN = pd.Plan(ROWS, (3, 2, 1), pd.Cluster.flat(3))
SIZES = ("parameter_bytes", "frozen_bytes", "optimizer_bytes", "activation_bytes", "output_bytes", "temporary_bytes")
SIZES += ("largest_parameter_bytes", "update_temporary_bytes")


def sizes_at(plan: pd.Plan, stage: int) -> memory.StageSizes:
    row, received = plan.stages[stage], plan.stages[stage - 1].output_bytes if stage else 0
    sent = row.output_bytes if stage + 1 < len(plan.stages) else 0
    row_sizes = {
        field.name: getattr(row, field.name) for field in fields(memory.StageSizes) if hasattr(row, field.name)
    }
    return memory.StageSizes(**row_sizes, input_bytes=received, received_bytes=received, sent_bytes=sent)


def base_at(plan: pd.Plan, stage: int, versions: int, in_flight: int, most: tuple[int, ...] = (3, 2, 1)) -> int:
    """Bytes of what waits, written out once more; `most` is what each stage holds in flight."""
    row, recompute = plan.stages[stage], plan.stages[stage].recompute
    waiting = sizes_at(plan, stage).input_bytes if recompute else row.activation_bytes
    peers = memory.peers_of(plan.replicas, most)[stage]
    messages = memory.message_bytes(sizes_at(plan, stage), most[stage], recompute, peers)
    return row.frozen_bytes + row.trained_bytes * versions + row.optimizer_bytes + messages + in_flight * waiting


def alive_after(
    rule: pd.schedules.WeightRule, stage: int, newest: int, read: dict[int, int], waiting: set[int], coming: set[int]
) -> int:
    """Counts the weight versions that waiting backwards and coming forwards read; `read`: microbatch -> version."""
    until = rule.kept_until(stage)
    if rule.name == "stamped":  # for forwards to come, not for backwards
        return len({newest} | {read[k] for k in coming if read[k] <= newest})
    if (rule.backward_rule == "stash" and until is None) or rule.name == "interpolated":
        return len({newest} | {read[k] for k in waiting if read[k] <= newest})
    begun = read.keys() - coming
    ahead = {pd.schedules.Kind.FORWARD: coming, pd.schedules.Kind.BACKWARD: begun & waiting, None: set()}[until]
    return 1 + len({read[k] for k in begun} & {read[k] for k in ahead})


@given(
    runs(straight()),
    st.lists(st.integers(0, 10**6), min_size=40, max_size=40),
    st.lists(st.booleans(), min_size=8, max_size=8),
)
def test_bytes_of_each_op_are_those_of_what_is_alive(
    run: tuple[pd.Schedule, Costs, int], numbers: list[int], choices: list[bool]
) -> None:
    drawn, seconds, total = run
    size, again = iter(numbers), iter(choices)
    rows = []
    for stage in drawn.plan.stages:
        sizes = {name: next(size) for name in SIZES}
        sizes["parameter_bytes"] += sizes["frozen_bytes"]
        recompute = next(again) if drawn.weights.backward_rule == "stash" else stage.recompute
        rows.append(replace(stage, **sizes, recompute=recompute))
    schedule = replace(drawn, plan=replace(drawn.plan, stages=tuple(rows)))
    timeline = simulate(pd.lower(schedule), seconds, total)
    steps = {"F": 1, "B": -1, "W": -1}
    kinds = ([span.kind for span in timeline.of_rank(first)] for first, *_ in schedule.placement.ranks)
    held_most = tuple(max(accumulate(steps.get(kind, 0) for kind in row), default=0) for row in kinds)
    for rank in range(timeline.workers):
        ((stage, replica),) = schedule.placement.stage_replicas(rank)
        row = rows[stage]
        mine = range(replica, total, schedule.placement.replicas[stage])
        read = {k: schedule.weights.forward_version(stage, k) for k in mine}
        waiting, newest, in_flight, halved, most, summed = set(mine), 0, 0, 0, 1, 0
        coming = set(mine)  # forwards that are still to end
        rule = schedule.weights
        buffers, until = rule.buffers(stage), rule.kept_until(stage)

        expected = [(0.0, base_at(schedule.plan, stage, 1 + buffers, 0, held_most))]
        pass_bytes = row.temporary_bytes
        if row.recompute:  # of the one at work the activations are there too
            pass_bytes += row.activation_bytes - sizes_at(schedule.plan, stage).input_bytes
        # What is in a bucket of a sum over replicas is there twice.
        summed_bytes = row.trained_bytes + (min(cost.FIRST_BUCKET_BYTES, row.trained_bytes) if row.replicas > 1 else 0)
        alive = 1
        for span in timeline.of_rank(rank):
            extra = 0
            if span.kind == "I":
                in_flight, halved = in_flight - 1, halved + 1
                extra = row.temporary_bytes + (summed_bytes if summed else 0)
            elif span.kind == "W":
                extra = row.temporary_bytes + summed_bytes + (row.largest_parameter_bytes if summed else 0)
            elif span.kind == "F":
                in_flight += 1
                coming.remove(span.index)
                one_set = rule.backward_rule != "stash" and rule.name not in ("stamped", "interpolated")
                if one_set or until is not None:
                    alive = alive_after(rule, stage, newest, read, waiting, coming)
                    if until is pd.schedules.Kind.FORWARD and read[span.index] not in {read[k] for k in coming}:
                        alive += 1  # its view is dropped after it
                    most = max(most, alive)
                extra = pass_bytes + (summed_bytes if summed else 0)
            elif span.kind == "B":
                extra = pass_bytes + summed_bytes + (row.largest_parameter_bytes if summed else 0)
            elif span.kind == "U":
                newest, summed = span.index, 0
                extra = row.trained_bytes + row.update_temporary_bytes
                alive = alive_after(rule, stage, newest, read, waiting, coming)
                most = max(most, alive)
            else:
                continue
            extra += halved * DEFERRED_SHARE * row.activation_bytes
            base = base_at(schedule.plan, stage, alive + buffers, in_flight, held_most)
            expected.append((span.start_s, base + extra))
            if span.kind in ("B", "W"):
                in_flight, halved, summed = in_flight - (span.kind == "B"), halved - (span.kind == "W"), summed + 1
                waiting.remove(span.index)
            alive = alive_after(rule, stage, newest, read, waiting, coming)
        begins = [0.0, *(span.start_s for span in timeline.of_rank(rank) if span.kind not in ("send", "wait"))]
        assert [*zip(begins, timeline.memory[rank], strict=True)] == expected
        assert timeline.peak_versions[rank] == most
        assert timeline.peak_bytes[rank] == max(size for _, size in expected)


def test_what_a_basis_takes_is_counted_and_timed() -> None:
    """Two square matrices for each side of two weights of 30 x 40 float32 numbers; the last stage has none."""
    rows = tuple(replace(row, matrices=(Matrices(30, 40, 2, 9600),) if s < 2 else ()) for s, row in enumerate(ROWS))
    plan = replace(PLAN, stages=rows, unit="microbatch")
    plain, rotated, gpu = (
        simulate(program_of(name, plan), costs(replace(plan, cluster=pd.Cluster.flat(3, device=device))), 24)
        for name, device in (("pipedream", "cpu"), ("basis_rotation", "cpu"), ("basis_rotation", "V100-16GB"))
    )
    size = 2 * 2 * (30 * 30 + 40 * 40) * 4
    assert [b[0] - a[0] for a, b in zip(plain.memory, rotated.memory, strict=True)] == [size, size, 0]
    assert [b - a >= size for a, b in zip(plain.peak_bytes, rotated.peak_bytes, strict=True)] == [True, True, False]
    # Three products an update: gradient, step, covariance; every tenth the first moment twice, a power step, and a QR
    # decomposition for four.
    flops = sum(2 * (3.2 * 2 * 30 * 40 * n + (1 + 4) / 10 * 2 * n**3) for n in (30, 40))
    for timeline, rate in ((rotated, 8e-12), (gpu, 1 / (0.75 * 15.7e12))):
        took = {s.stage: s.end_s - s.start_s for s in timeline.spans if s.kind == "U"}
        before = {s.stage: s.end_s - s.start_s for s in plain.spans if s.kind == "U"}
        added = [took[s] - before[s] for s in range(3)]
        assert added == pytest.approx([flops * rate, flops * rate, 0], rel=1e-6, abs=1e-12)


def test_memory_is_saved_and_not_known_of_parts_and_of_measured_runs() -> None:
    forwards = simulate(pd.lower(pd.schedules.evaluation(PLAN)), costs(PLAN), 4)
    assert set(forwards.memory[1]) == {base_at(PLAN, 1, 1, 0)}, "forwards alone hold one version"
    timeline = simulate(program_of("pipedream", PLAN), costs(PLAN), 4)
    assert pd.Timeline.from_json(timeline.to_json()) == timeline
    assert timeline.between(2.0, 9.0).memory == ()
    assert pd.Timeline("x", "measured", 1, timeline.of_rank(0), 4).memory == ()
