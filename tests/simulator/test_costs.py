"""Seconds of a plan's ops and messages."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pipedream.core.hardware.cluster import Cluster, Level, Workers
from pipedream.core.plan.plan import Plan
from pipedream.core.plan.stage import Stage
from pipedream.core.schedule.op import Kind
from pipedream.core.schedule.program import Channel
from pipedream.simulator import costs

ROWS = (
    Stage(0, 1, 2, 4.0, 8.0, 1.0, output_bytes=400, parameter_bytes=1000),
    Stage(1, 2, 1, 2.0, 6.0, 0.5, output_bytes=40),
)
PLAN = Plan(ROWS, (2, 1), Cluster.flat(3, 100.0, 0.25))


def test_minibatches_are_divided_but_updates_and_sums_are_not() -> None:
    whole, quarter = costs(PLAN), costs(PLAN, split=4)
    assert (whole.forward_s, quarter.forward_s) == ((4.0, 2.0), (1.0, 0.5))
    assert (whole.backward_s, quarter.backward_s) == ((8.0, 6.0), (2.0, 1.5))
    assert whole.update_s == quarter.update_s == (1.0, 0.5)
    assert whole.sync_s == quarter.sync_s == PLAN.costs.sync_s == (10.5, 0.0)
    assert (whole.output_bytes, quarter.output_bytes) == ((400.0, 40.0), (100.0, 10.0))


def test_microbatches_are_taken_as_they_are() -> None:
    plan = replace(PLAN, unit="microbatch")
    assert costs(plan, split=4) == costs(plan)


def test_both_directions_of_a_boundary_carry_its_value() -> None:
    seconds = costs(PLAN)
    assert seconds.transfer_s(Channel(0, 2, "activation", 0, 1)) == 4.25
    assert seconds.transfer_s(Channel(2, 0, "gradient", 1, 0)) == 4.25
    assert PLAN.costs.transfers_s == (4.25,)


def test_inputs_cost_nothing_unless_they_have_bytes() -> None:
    channel = Channel(0, 2, "input", 0, 1)
    assert costs(PLAN).transfer_s(channel) == 0.0
    assert replace(costs(PLAN), input_bytes=50.0).transfer_s(channel) == 0.75


def test_split_backward() -> None:
    halves, chosen = costs(PLAN), costs(PLAN, split=2, weight_s=2.0)
    assert [halves.op_s(kind, 0) for kind in Kind] == [4.0, 8.0, 4.0, 4.0, 1.0, 0.0]
    assert [chosen.op_s(kind, 0) for kind in Kind] == [2.0, 4.0, 3.0, 1.0, 1.0, 0.0]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"forward_s": (1.0,)}, "one number per stage, found 1 forward_s, 2 backward_s"),
        ({"sync_s": (0.0, -1.0)}, "sync_s cannot be negative"),
        ({"weight_s": (9.0, 1.0)}, "weight gradient is part of the backward"),
        ({"input_bytes": -1.0}, "bytes cannot be negative"),
        ({"sum_bytes": (0.0,)}, "sum_bytes are for 1 stages, the seconds for 2"),
        ({"weight_bytes": (0.0,)}, "weight_bytes are for 1 stages, not for 2"),
    ],
)
def test_nonsense_is_refused(change: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(costs(PLAN), **change)  # type: ignore[arg-type]


def test_split_below_one_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 1 microbatch, found 0"):
        costs(PLAN, split=0)


def test_ranks_are_the_workers_of_the_order() -> None:
    slow = Cluster((Level(2, 100.0), Level(2, 10.0, 0.5)), kinds=(Workers(1, speed=0.5), Workers(3)))
    plan = replace(PLAN, cluster=slow, worker_order=(2, 3, 0))
    of_order = costs(plan)
    assert plan.placement.ranks == ((1, 2), (0,))  # in the order of the workers 0, 2 and 3
    assert [of_order.worker(rank) for rank in range(3)] == [0, 2, 3]
    assert [of_order.speed(rank) for rank in range(3)] == [0.5, 1.0, 1.0]
    assert of_order.transfer_s(Channel(1, 0, "activation", 0, 1)) == 40.5
    assert of_order.transfer_s(Channel(1, 2, "activation", 0, 1)) == 4.0
    assert of_order.sync_s == (10.0, 0.0)  # of the machine's own level


def test_a_backward_that_recomputes_does_the_forward_again() -> None:
    plan = replace(PLAN, stages=(ROWS[0], replace(ROWS[1], recompute=True)))
    recomputing = costs(plan)
    assert (recomputing.forward_s, recomputing.backward_s, recomputing.weight_s) == ((4.0, 2.0), (8.0, 8.0), (4.0, 3.0))


def test_a_tree_moves_all_bytes_twice() -> None:
    assert costs(PLAN).sum_bytes == (1000.0, 0.0)
    assert costs(replace(PLAN, cluster=replace(PLAN.cluster, sums="tree"))).sum_bytes == (2000.0, 0.0)
