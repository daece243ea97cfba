"""What a method asks of the split and the depth of replicated plans."""

from dataclasses import replace

import pytest

from pipedream.core.errors import ScheduleError
from pipedream.core.plan.plan import Plan
from pipedream.core.schedule.lowering import lower
from pipedream.schedules import build
from pipedream.verifier import verify


@pytest.mark.parametrize("name", ["naive", "gpipe", "1f1b", "zb_h1", "zb_h2"])
def test_fewer_microbatches_than_replicas_are_refused(name: str) -> None:
    plan = Plan.uniform(2, replicas=(3, 1))
    with pytest.raises(ScheduleError, match="a stage has 3 replicas"):
        build(name, plan, 2)
    assert build(name, plan, 3).microbatches == 3
    assert build(name, plan).microbatches >= 3


@pytest.mark.parametrize(
    ("replicas", "in_flight", "stage", "least"),
    [((2, 1), (4, 1), 0, 6), ((1, 3), (1, 1), 1, 3), ((1, 1, 1), (4, 3, 1), 0, 3), ((1, 2), (5, 3), 0, 4)],
)
def test_two_buffers_must_reach_over_the_warm_up(
    replicas: tuple[int, ...], in_flight: tuple[int, ...], stage: int, least: int
) -> None:
    """PipeDream-2BW: floor(m / r_s) >= W_s, or a forward would read a version that is not made yet."""
    plan = replace(Plan.uniform(len(replicas), replicas=replicas), in_flight=in_flight, depth_mode="hand")
    says = rf"stage {stage} has {in_flight[stage] - 1} warm-up forwards and {replicas[stage]} replicas, .* at least"
    with pytest.raises(ScheduleError, match=says):
        build("pipedream_2bw", plan, least - 1)
    verify(lower(build("pipedream_2bw", plan, least)))
    verify(lower(build("pipedream_2bw", plan)))


def test_two_buffers_do_not_lag() -> None:
    """With update delay 1 upstream, stage 1 may wait for a minibatch more than stage 0 has in flight; 2BW has none."""
    plan = replace(Plan.uniform(2, replicas=(3, 2)), in_flight=(2, 3), update_delay=(1, 1), depth_mode="hand")
    build("pipedream", plan)
    with pytest.raises(ScheduleError, match=r"\(2, 3\): they need the plan's update delay \(1, 1\)"):
        build("pipedream_2bw", plan)
