"""Seconds of a plan's ops and messages; ops that jitter and ranks that are slow."""

from collections.abc import Callable
from dataclasses import replace
from math import sqrt
from statistics import fmean, stdev
from typing import Any

import pytest
from hypothesis import given, strategies as st
from programs import program_of

import pipedream as pd
from pipedream.core.hardware.cluster import Workers
from pipedream.core.schedule.program import Channel
from pipedream.simulator import Costs, Stragglers, costs, simulate

ROWS = (
    pd.Stage(0, 1, 2, 4.0, 8.0, 1.0, output_bytes=400, parameter_bytes=1000),
    pd.Stage(1, 2, 1, 2.0, 6.0, 0.5, output_bytes=40),
)
PLAN = pd.Plan(ROWS, (2, 1), pd.Cluster.flat(3, 100.0, 0.25))


def transfer_s(seconds: Costs, channel: Channel) -> float:
    """From the start of a message to its arrival on idle ports."""
    return seconds.channel_bytes(channel) / seconds.link(channel)[0] + seconds.latency_s(channel)


def test_minibatches_are_divided_but_updates_and_sums_are_not() -> None:
    whole, quarter = costs(PLAN), costs(PLAN, split=4)
    assert (whole.forward_s, quarter.forward_s) == ((4.0, 2.0), (1.0, 0.5))
    assert (whole.backward_s, quarter.backward_s) == ((8.0, 6.0), (2.0, 1.5))
    assert whole.update_s == quarter.update_s == (1.0, 0.5)
    assert whole.sync_s == quarter.sync_s == PLAN.costs.sync_s == (11.0, 0.0)
    assert whole.sum_bytes == (1000.0, 0.0)
    assert costs(replace(PLAN, cluster=replace(PLAN.cluster, all_reduce="tree"))).sum_bytes == (2000.0, 0.0)
    assert (whole.output_bytes, quarter.output_bytes) == ((400.0, 40.0), (100.0, 10.0))
    plan = replace(PLAN, unit="microbatch")
    assert costs(plan, split=4) == costs(plan), "microbatches are taken as they are"


def test_both_directions_of_a_boundary_carry_its_value_and_inputs_their_bytes() -> None:
    seconds, inputs = costs(PLAN), Channel(0, 2, "input", 0, 1)
    assert transfer_s(seconds, Channel(0, 2, "activation", 0, 1)) == 4.25
    assert transfer_s(seconds, Channel(2, 0, "gradient", 1, 0)) == 4.25
    assert PLAN.costs.transfers_s == (4.25,)
    assert (transfer_s(seconds, inputs), transfer_s(changed(input_bytes=50.0), inputs)) == (0.0, 0.75)


def test_a_backward_is_split_and_does_the_forward_again_if_it_recomputes() -> None:
    halves, chosen = costs(PLAN), costs(PLAN, split=2, weight_s=2.0)
    assert [halves.op_s(kind, 0) for kind in pd.schedules.Kind] == [4.0, 8.0, 4.0, 4.0, 1.0]
    assert [chosen.op_s(kind, 0) for kind in pd.schedules.Kind] == [2.0, 4.0, 3.0, 1.0, 1.0]
    again = costs(replace(PLAN, stages=(ROWS[0], replace(ROWS[1], recompute=True))))
    assert (again.forward_s, again.backward_s, again.weight_s) == ((4.0, 2.0), (8.0, 8.0), (4.0, 3.0))
    assert again.recompute_s == (0.0, 2.0)


def changed(**fields: Any) -> Costs:
    return replace(costs(PLAN), **fields)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: costs(PLAN, weight_s=-1.0), "weight_s cannot be negative"),
        (lambda: changed(weight_s=(9.0, 1.0)), "weight gradient is part of the backward"),
        (lambda: changed(recompute_s=(4.5, 0.0)), "beside what is recomputed"),
        (lambda: costs(PLAN, split=0), "at least 1 microbatch, found 0"),
        (lambda: Stragglers(jitter=-0.1), "0 or more, found -0.1"),
        (lambda: Stragglers(jitter=float("inf")), "0 or more, found inf"),
        (lambda: Stragglers(jitter={"X": 0.1}), r"jitter was given for \['X'\]"),
        (lambda: Stragglers(slow={0: 0.0}), "found 0.0 for rank 0"),
        (lambda: Stragglers(slow={2: 2.0}).check_ranks(2), "slow rank 2 was asked for, the ranks are 0 to 1"),
    ],
)
def test_nonsense_is_refused(call: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


def test_ranks_are_the_workers_of_the_order() -> None:
    slow = pd.Cluster((pd.Level(2, 100.0), pd.Level(2, 10.0, 0.5)), kinds=(Workers(1, speed=0.5), Workers(3)))
    plan = replace(PLAN, cluster=slow, worker_order=(2, 3, 0))
    of_order = costs(plan)
    assert plan.placement.ranks == ((1, 2), (0,))  # in the order of the workers 0, 2 and 3
    assert [of_order.worker(rank) for rank in range(3)] == [0, 2, 3]
    assert [of_order.speed(rank) for rank in range(3)] == [0.5, 1.0, 1.0]
    assert transfer_s(of_order, Channel(1, 0, "activation", 0, 1)) == 40.5
    assert transfer_s(of_order, Channel(1, 2, "activation", 0, 1)) == 4.0
    assert of_order.sync_s == (10.0, 0.0)  # of the machine's own level


def seconds_of(timeline: pd.Timeline, kind: str, rank: int = 0) -> list[float]:
    return [span.end_s - span.start_s for span in timeline.of_rank(rank) if span.kind == kind]


@given(st.integers(1, 5), st.data(), st.floats(1.0, 4.0))
def test_a_slow_rank_sets_the_pace(stages: int, data: st.DataObject, factor: float) -> None:
    slow = data.draw(st.integers(0, stages - 1))
    timeline = pd.simulate(pd.Plan.uniform(stages, 1.0, 2.0), minibatches=80, slow={slow: factor})
    assert pd.metrics.steady_metrics(timeline, skip=2 * stages).throughput_per_s == pytest.approx(1 / (3.0 * factor))
    assert seconds_of(timeline, "F", slow) == pytest.approx([factor] * 80)


@pytest.mark.parametrize("variation", [0.05, 0.3, 1.0])
def test_jitter_keeps_the_mean_and_has_the_variation_asked_for(variation: float) -> None:
    count = 5_000
    seconds = seconds_of(pd.simulate(pd.Plan.uniform(1, 3.0, 6.0), minibatches=count, jitter=variation, seed=7), "B")
    # Five standard errors; the fourth moment of a lognormal is large, so its deviation is met less well.
    assert fmean(seconds) == pytest.approx(6.0, rel=5 * variation / sqrt(count))
    assert stdev(seconds) / fmean(seconds) == pytest.approx(variation, rel=0.1)
    assert min(seconds) > 0


@given(st.integers(0, 99))
def test_a_backward_that_recomputes_never_ends_before_its_gradient_arrives(seed: int) -> None:
    plan = pd.Plan.uniform(3, 4.0, 1.0)
    plan = replace(plan, stages=tuple(replace(stage, recompute=True) for stage in plan.stages))
    timeline = simulate(program_of("1f1b", plan, 8), costs(plan), 8, Stragglers(jitter=3.0, seed=seed))
    ends_s = {(span.stage, span.index): span.end_s for span in timeline.spans if span.kind == "B"}
    assert all(end_s >= ends_s.get((stage + 1, index), 0.0) for (stage, index), end_s in ends_s.items())


def test_the_same_seed_is_the_same_run_whatever_the_others_do() -> None:
    plan = pd.Plan.uniform(3, 1.0, 2.0, 0.25)
    first = pd.simulate(plan, minibatches=20, jitter=0.3, seed=1)
    assert pd.simulate(plan, minibatches=20, jitter=0.3, seed=1) == first
    assert pd.simulate(plan, minibatches=20, jitter=0.3, seed=2) != first
    # A rank draws for itself: another order of events changes when its ops begin, not how long they take.
    late = pd.simulate(plan, minibatches=20, jitter=0.3, seed=1, slow={2: 2.0})
    assert seconds_of(late, "B", 0) == pytest.approx(seconds_of(first, "B", 0))
    apart = pd.simulate(plan, minibatches=20, jitter={"B": 0.3}, seed=1)
    assert len(set(seconds_of(apart, "B", 0) + seconds_of(apart, "B", 1))) == 40
    assert seconds_of(apart, "F") == pytest.approx([1.0] * 20)
