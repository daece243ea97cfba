"""What the runtime adds: the record, and what a plan and a simulation make of it."""

from dataclasses import replace

import pytest

import pipedream as pd
from pipedream.core.model.runtime_costs import RuntimeCosts
from pipedream.core.schedule.program import Channel
from pipedream.simulator import costs

Kind = pd.schedules.Kind
COSTS = RuntimeCosts(op_s=0.5, message_s=0.25, message_s_per_byte=0.01, update_s=2.0, load_s=3.0)
ROWS = tuple(pd.Stage(s, s + 1, 1, 4.0, 8.0, 1.0, output_bytes=100) for s in range(3))
PLAN = pd.Plan(ROWS, (3, 2, 1), pd.Cluster.flat(3, 1e9))
PROFILE = pd.Profile.of_chain((pd.LayerProfile(1.0, 2.0, 1, 1),))


def test_no_costs_are_negative() -> None:
    with pytest.raises(ValueError, match="load_s cannot be negative, found -1"):
        RuntimeCosts(load_s=-1.0)


def test_a_stage_takes_longer_by_its_ops_messages_update_and_reads() -> None:
    """Activation and gradient at each boundary, and the targets from the first to the last stage."""
    plan = replace(PLAN, runtime=COSTS)
    passes, ends = 2 * 0.5 + 2.0, 2 * (0.25 + 100 * 0.01)
    assert plan.costs.runtime_s == pytest.approx((passes + ends + 0.25 + 3.0, passes + 2 * ends, passes + ends + 0.25))
    assert plan.costs.periods_s == pytest.approx([13.0 + seconds for seconds in plan.costs.runtime_s])
    assert PLAN.costs.runtime_s == (0.0, 0.0, 0.0)


def test_a_gpu_computes_meanwhile() -> None:
    """A stage takes the longer of what its device and what its host does."""
    busy = replace(COSTS, overlap_device=True)
    assert replace(PLAN, runtime=busy).costs.runtime_s == (0.0, 0.0, 0.0)
    slow_host = replace(busy, op_s=10.0)
    assert replace(PLAN, runtime=slow_host).costs.runtime_s[1] == pytest.approx(20.0 + 2.0 + 4 * (0.25 + 1.0) - 13.0)
    slow = costs(replace(PLAN, runtime=slow_host))
    assert slow.op_s(Kind.FORWARD, 1) == 10.0 + 2 * 0.25
    assert slow.op_s(Kind.BACKWARD, 2) == 10.0 + 0.25
    assert slow.op_s(Kind.UPDATE, 0) == 2.0
    assert (slow.load_s, slow.end_s(Channel(0, 1, "activation", 0, 1))) == (0.0, 0.0)


def test_the_bytes_of_a_sum_keep_its_workers_from_computing() -> None:
    """Each of two replicas sends as many bytes as the stage has, and receives as many."""
    plan = pd.Plan((pd.Stage(0, 1, 2, 4.0, 8.0, 1.0, parameter_bytes=100),), (1,), pd.Cluster.flat(2, 1e9))
    without, longer = costs(plan), costs(replace(plan, runtime=COSTS))
    assert (without.summing_s(0), longer.summing_s(0)) == (0.0, 2 * 100 * 0.01)
    assert costs(replace(plan, runtime=replace(COSTS, overlap_device=True))).summing_s(0) == 0.0
    measured = costs(replace(plan, runtime=replace(COSTS, sum_s_per_byte=0.05)))
    assert measured.summing_s(0) == 100 * 0.05, "a sum's own cost, if it is known"
    busy = replace(plan, runtime=RuntimeCosts(message_s_per_byte=0.01))
    for bytes_per_s, sum_s in ((1e9, 2.0), (10.0, 10.0)):  # the core's 2 s, or the network's 10 s
        timeline = pd.simulate(replace(busy, cluster=pd.Cluster.flat(2, bytes_per_s)), minibatches=8)
        assert timeline.makespan_s == pytest.approx(4 * (4.0 + 8.0 + 1.0 + sum_s))


def test_a_stage_takes_the_longer_of_its_kernels_and_their_launches() -> None:
    """The sums of its layers, not the longer of each."""
    small = pd.LayerProfile(1.0, 2.0, 1, 1, forward_launch_s=3.0, backward_launch_s=4.0)
    large = pd.LayerProfile(10.0, 20.0, 1, 1, forward_launch_s=3.0, backward_launch_s=4.0)
    cluster = pd.Cluster.flat(1, 1e9)
    assert [
        pd.plan(pd.Profile.of_chain(layers), cluster, shape="1").slowest_stage_s
        for layers in ((small,) * 2, (large,) * 2, (small, large))
    ] == [14.0, 60.0, 33.0]
    plan = pd.plan(pd.Profile.of_chain((small,) * 2), cluster, shape="1")
    launched = costs(plan, split=2)  # each microbatch is launched alone
    assert [launched.op_s(kind, 0) for kind in (Kind.FORWARD, Kind.BACKWARD, Kind.WEIGHT_GRADIENT)] == [6.0, 8.0, 4.0]
    again = replace(plan, stages=tuple(replace(stage, recompute=True) for stage in plan.stages))
    assert costs(again).op_s(Kind.BACKWARD, 0) == 14.0
    busy = replace(plan, runtime=RuntimeCosts(op_s=1.0, overlap_device=True))
    assert busy.slowest_stage_s == 16.0
    assert costs(busy).op_s(Kind.FORWARD, 0) == 7.0
