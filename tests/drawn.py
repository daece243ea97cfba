"""Drawn by hypothesis: registered methods on plans of any replicas, depth and lag, with any costs."""

from __future__ import annotations

from math import ceil, gcd

from hypothesis import strategies as st

from pipedream.core.cluster import Cluster
from pipedream.core.plan import Plan, Stage
from pipedream.core.schedule import Schedule
from pipedream.schedules import SCHEDULES, build
from pipedream.simulator import Costs

SECONDS = st.one_of(st.just(0.0), st.just(1.0), st.floats(0.1, 5.0))


def lag_has_room(warmup: list[int], replicas: tuple[int, ...], lag: list[int], u: int, s: int) -> bool:
    """Tells whether stage u sends what the replicas of stage s must forward before a lagging update of theirs.

    Update i + 1 of s then follows all forwards below (i + W_s + 2) r_s, and stage u makes those of its round j only
    after all backwards below (j - W_u) r_u; with a lag of its own, below (j - W_u - 1) r_u.
    """
    slack = replicas[u] if lag[u] else gcd(replicas[u], replicas[s])
    return (warmup[s] + 1) * replicas[s] <= warmup[u] * replicas[u] + slack


@st.composite
def schedules(draw: st.DrawFn) -> Schedule:
    """Draws a registered method on any replicated plan, of any depth and lag that the rules allow."""
    replicas = tuple(draw(st.lists(st.integers(1, 3), min_size=1, max_size=4)))
    warmup: list[int] = []
    for s in reversed(range(len(replicas))):
        least = max((w * r for w, r in zip(warmup, replicas[s + 1 :], strict=True)), default=0)
        warmup.insert(0, ceil(least / replicas[s]) + draw(st.integers(0, 2)))
    lag = [0] * len(replicas)
    for s, r in enumerate(replicas):
        if r > 1 and all(lag_has_room(warmup, replicas, lag, u, s) for u in range(s)) and len(replicas) > 1:
            lag[s] = draw(st.integers(0, 1))
    rows = tuple(Stage(s, s + 1, r) for s, r in enumerate(replicas))
    plan = Plan(rows, tuple(w + 1 for w in warmup), Cluster.flat(sum(replicas)), tuple(lag), unit="microbatch")
    name = draw(st.sampled_from(sorted(SCHEDULES)))
    least = max(max(w, 1) * r for w, r in zip(warmup, replicas, strict=True))
    if name == "pipedream_2bw":
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
