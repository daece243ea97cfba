"""Drawn by hypothesis: registered methods on plans of any replicas, depth and lag, with any costs."""

from __future__ import annotations

from dataclasses import replace
from math import ceil, gcd

from hypothesis import strategies as st

from pipedream.core.cluster import Cluster, Level, Workers
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
def clusters(draw: st.DrawFn, workers: int) -> Cluster:
    """Draws a cluster of at least so many workers: of one to three levels, even or not, with links and speeds alike or
    not."""
    machines = draw(st.lists(st.integers(1, max(1, workers)), min_size=1, max_size=4))
    machines[0] += max(0, workers - sum(machines))
    rate = st.sampled_from([1.0, 1.0, 0.5, 3.0])
    levels = [Level(max(machines), draw(rate), sizes=tuple(machines))]
    if len(machines) == 1:
        levels = [Level(machines[0], 1.0)]
    elif len(machines) == 4 and draw(st.booleans()):
        levels += [Level(2, draw(rate)), Level(2, draw(rate))]
    else:
        levels += [Level(len(machines), draw(rate))]
    latencies, receiving = st.sampled_from([0.0, 0.0, 0.5]), st.sampled_from([None, None, 0.25, 2.0])
    levels = [replace(level, latency_s=draw(latencies), receive_bytes_per_s=draw(receiving)) for level in levels]
    kinds: tuple[Workers, ...] = ()
    if draw(st.booleans()):
        kinds = tuple(Workers(1, speed=draw(st.sampled_from([1.0, 0.5, 1.7]))) for _ in range(sum(machines)))
    return Cluster(tuple(levels), kinds=kinds, sums=draw(st.sampled_from(["ring", "tree"])))


@st.composite
def some_costs(draw: st.DrawFn, stages: int, workers: int) -> Costs:
    def vector() -> tuple[float, ...]:
        return tuple(draw(SECONDS) for _ in range(stages))

    backward = vector()
    cluster = draw(clusters(workers))
    return Costs(
        forward_s=vector(),
        backward_s=backward,
        weight_s=tuple(seconds / 2 for seconds in backward),
        update_s=vector(),
        sync_s=vector(),
        output_bytes=vector(),
        cluster=cluster,
        workers=tuple(draw(st.permutations(range(cluster.workers)))[:workers]),
        input_bytes=draw(SECONDS),
        sum_bytes=vector(),
    )


@st.composite
def runs(draw: st.DrawFn) -> tuple[Schedule, Costs, int]:
    schedule = draw(schedules())
    return schedule, draw(some_costs(len(schedule.plan.stages), schedule.placement.workers)), draw(st.integers(1, 15))
