"""Drawn by hypothesis: registered methods on plans of any replicas, depth and lag, with any costs."""

from __future__ import annotations

from hypothesis import strategies as st

from pipedream.core.cluster import Cluster
from pipedream.core.depth import legal
from pipedream.core.plan import Plan, Stage
from pipedream.core.schedule import Schedule
from pipedream.schedules import SCHEDULES, build
from pipedream.simulator import Costs

SECONDS = st.one_of(st.just(0.0), st.just(1.0), st.floats(0.1, 5.0))


@st.composite
def schedules(draw: st.DrawFn) -> Schedule:
    """Draws a registered method on any replicated plan, of any depth and lag that the rules allow."""
    replicas = tuple(draw(st.lists(st.integers(1, 3), min_size=1, max_size=4)))
    lag = tuple(draw(st.integers(0, 1)) if count > 1 and len(replicas) > 1 else 0 for count in replicas)
    in_flight = legal(tuple(draw(st.integers(1, 5)) for _ in replicas), replicas, lag)
    name = draw(st.sampled_from(sorted(SCHEDULES)))
    if name == "pipedream_2bw":
        in_flight = legal(in_flight, replicas)  # it does not lag
    rows = tuple(Stage(s, s + 1, count) for s, count in enumerate(replicas))
    plan = Plan(rows, in_flight, Cluster.flat(sum(replicas)), lag, unit="microbatch")
    if name == "pipedream_2bw":
        least = max(max(held - 1, 1) * count for held, count in zip(in_flight, replicas, strict=True))
        return build(name, plan, least + draw(st.integers(0, 3)))
    return build(name, plan, None if name.startswith("pipedream") else draw(st.integers(max(replicas), 7)))


@st.composite
def some_costs(draw: st.DrawFn, stages: int) -> Costs:
    def vector() -> tuple[float, ...]:
        return tuple(draw(SECONDS) for _ in range(stages))

    backward = vector()
    return Costs(
        forward_s=vector(),
        backward_s=backward,
        weight_s=tuple(seconds / 2 for seconds in backward),
        update_s=vector(),
        sync_s=vector(),
        output_bytes=vector(),
        bandwidth_bytes_per_s=1.0,
        latency_s=draw(SECONDS),
        input_bytes=draw(SECONDS),
    )


@st.composite
def runs(draw: st.DrawFn) -> tuple[Schedule, Costs, int]:
    schedule = draw(schedules())
    return schedule, draw(some_costs(len(schedule.plan.stages))), draw(st.integers(1, 15))
