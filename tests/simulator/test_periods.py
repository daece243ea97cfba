"""Closed forms of time: makespan of flushing orders, period of asynchronous ones, at both depths."""

from dataclasses import replace
from math import lcm

import pytest
from hypothesis import example, given, settings, strategies as st
from marks import thinned
from programs import program_of

import pipedream as pd
from pipedream.core.hardware.cluster import Workers
from pipedream.core.plan.depth import full, noam
from pipedream.simulator import costs, simulate, time_updates

SECONDS = st.floats(0.1, 10.0)


def run(name: str, plan: pd.Plan, microbatches: int | None, total: int) -> pd.Timeline:
    return simulate(program_of(name, plan, microbatches), costs(plan), total)


def period_s(timeline: pd.Timeline, every: int, skip: int) -> float:
    """Returns the seconds a minibatch between ends of backwards of rank 0, `every` so many apart, before the drain."""
    spans = [span for span in timeline.of_rank(0) if span.kind == "B"]
    first, last = skip, skip + (len(spans) - 30 - skip) // every * every
    assert last > first
    return (spans[last].end_s - spans[first].end_s) / (spans[last].index - spans[first].index)


@given(st.integers(1, 6), st.integers(1, 12), SECONDS, SECONDS, st.floats(0.0, 1.0), st.booleans())
@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_makespan_with_a_flush(name: str, p: int, m: int, f: float, b: float, share: float, recompute: bool) -> None:
    # GPipe, section 2.3. A message as long as an op at most is hidden in the stream and counts once each way. Nothing
    # is recomputed between the backwards of a microbatch: each stage has done so when the gradient arrives.
    c = share * min(f, b) if name == "gpipe" else 0.0
    plan = pd.Plan.uniform(p, f, b, c)
    plan = replace(plan, stages=tuple(replace(stage, recompute=recompute) for stage in plan.stages))
    expected_s = (m + p - 1) * (f + b) + 2 * c * (p - 1) + m * f * recompute
    assert run(name, plan, m, m).makespan_s == pytest.approx(expected_s)


@given(st.integers(1, 6), SECONDS, SECONDS, st.floats(0.0, 1.0))
def test_period_at_the_papers_depth_shows_messages(p: int, f: float, b: float, share: float) -> None:
    """In the whole run, and in the updates, which are timed until they repeat themselves."""
    c = share * min(f, b)  # longer ones meet at the ports of the stages between
    plan, expected_s = pd.Plan.uniform(p, f, b, c), f + b + 2 * c * (p - 1) / p
    assert period_s(run("pipedream", plan, None, 20 * p + 60), p, 10 * p) == pytest.approx(expected_s)
    seconds, updates = time_updates(program_of("pipedream", plan), costs(plan), 20 * p + 60, 4 * p, 16 * p)
    assert seconds / updates == pytest.approx(expected_s)
    assert updates in (1, p), "a minibatch, or a round of what is in flight"


@given(
    st.lists(st.tuples(st.integers(1, 3), SECONDS, SECONDS), min_size=1, max_size=4),
    st.sampled_from(["pipedream", "1f1b"]),
    st.integers(0, 2_000_000),
)
@example([(1, 1.0, 2.0), (3, 1.0, 6.0), (3, 1.0, 1.0)], "pipedream", 0)
def test_updates_are_timed_as_in_a_long_run(rows: list[tuple[int, float, float]], name: str, size: int) -> None:
    """Whether or not they repeat themselves: with replicas, and with messages that meet at ports, some never do."""
    stages = tuple(pd.Stage(s, s + 1, r, f, b, output_bytes=size) for s, (r, f, b) in enumerate(rows))
    replicas = tuple(r for r, _, _ in rows)
    plan = pd.Plan(stages, noam(replicas), pd.Cluster.flat(sum(replicas), 1e6), unit="microbatch")
    program = program_of(name, plan, None if name == "pipedream" else 2 * lcm(*replicas))
    per_update, total = program.updates.per_update[0], 120 * program.cycle
    first, last = (part * program.cycle // per_update for part in (40, 100))
    seconds, updates = time_updates(program, costs(plan), total, first, last)
    ends = [(span.index, span.end_s) for span in simulate(program, costs(plan), total).of_rank(0) if span.kind == "U"]
    far = dict(ends)
    assert updates <= last - first
    assert seconds / updates == pytest.approx((far[last] - far[first]) / (last - first), rel=0.02)


def balanced(replicas: tuple[int, ...], forward_s: float = 1.0, backward_s: float = 2.0) -> pd.Plan:
    """Returns a plan whose stages take r_s times as long on r_s replicas: one period for all."""
    rows = tuple(pd.Stage(s, s + 1, r, forward_s * r, backward_s * r) for s, r in enumerate(replicas))
    return pd.Plan(rows, noam(replicas), pd.Cluster.flat(sum(replicas)), unit="microbatch")


AT_NOAM = {(2, 1): 1.00, (3, 1): 1.00, (2, 2, 1): 1.00, (1, 2): 0.80, (3, 2): 0.86, (2, 3): 0.75}
AT_NOAM |= {(2, 1, 1): 0.67, (4, 2, 1): 0.67, (5, 3): 0.79, (5, 6, 3): 5 / 11}
"""Least busy share of a balanced plan at the paper's depth (docs/exact_rules.md, Depth)."""


@pytest.mark.parametrize("replicas", thinned((key,) for key in AT_NOAM), ids=str)
def test_busy_share_of_replicated_plans(replicas: tuple[int, ...]) -> None:
    busy = 3.0 / period_s(run("pipedream", balanced(replicas), None, 1200), lcm(*replicas), 100)
    assert busy == pytest.approx(AT_NOAM[replicas], abs=0.005)
    full = run("pipedream", balanced(replicas).with_depth("full"), None, 300)
    assert min(pd.metrics.steady_metrics(full, skip=150).busy_shares) == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("replicas", "slots", "update_delay"),
    thinned(pytest.param(replicas, (1.0, 0.3, 2.5)[i % 3], i % 2) for i, replicas in enumerate(AT_NOAM)),
    ids=str,
)
def test_full_depth_hides_messages_of_replicas(replicas: tuple[int, ...], slots: float, update_delay: int) -> None:
    """One-way message times of several slots: at the paper's depth they show, at full they do not."""
    plan, delays_updates = balanced(replicas), tuple(update_delay if r > 1 else 0 for r in replicas)
    # Latency alone, as longer messages than a slot would be the bottleneck themselves; sums cost nothing here.
    # Where a lagging sum begins with the backward already, the paper's depth may be enough.
    far = pd.Cluster.flat(plan.workers, latency_s=slots * 3.0)
    seconds, overlapped = replace(costs(plan, overlap=False), cluster=far), replace(costs(plan), cluster=far)
    round_trips = (2 * slots,) * (len(replicas) - 1)
    shares = []
    for counts in (full(replicas, round_trips, delays_updates), noam(replicas, delays_updates)):
        program = program_of("pipedream", replace(plan, in_flight=counts, update_delay=delays_updates))
        timeline = simulate(program, seconds, 600)
        shares.append(min(pd.metrics.steady_metrics(timeline, skip=400).busy_shares))
        assert simulate(program, overlapped, 600).makespan_s <= timeline.makespan_s
    assert shares[0] == pytest.approx(1.0)
    assert shares[1] < 0.95


def test_rings_are_as_deep_as_what_lies_between_replicas() -> None:
    """2-1-2 with the middle's port full: each replica of stage 0 has up to six minibatches on the way to stage 1."""
    plan, replicas = balanced((2, 1, 2)), (2, 1, 2)
    rows = tuple(replace(stage, output_bytes=3) for stage in plan.stages)
    counts = full(replicas, (7.0, 7.0))
    assert counts == (11, 11, 1)
    plan = replace(plan, stages=rows, cluster=pd.Cluster.flat(5, 2.0), in_flight=counts)
    assert plan.slowest_stage_s == 3.0
    program = program_of("pipedream", plan)
    depths = {(c.source, c.target): c.depth for c in program.channels if c.carries == "activation"}
    assert depths == {(0, 1): 7, (1, 2): 6}
    timeline = simulate(program, replace(costs(plan), cluster=pd.Cluster.flat(5, 2.0, 7.5)), 600)
    assert min(pd.metrics.steady_metrics(timeline, skip=400).busy_shares) == pytest.approx(1.0)


@st.composite
def replicated_plans(draw: st.DrawFn, levels: bool) -> pd.Plan:
    """Unlike stages on replicas, with sums and with messages that may be the bottleneck, on unlike workers."""
    replicas = draw(st.lists(st.integers(1, 4), min_size=1, max_size=3 if levels else 4))
    eighths = st.integers(1, 24).map(lambda n: n / 8)

    def stage(s: int, r: int) -> pd.Stage:
        seconds = r * draw(eighths), r * draw(eighths), draw(st.sampled_from([0.0, 0.5]))
        output_bytes = draw(st.sampled_from([0, 1, 8, 20] if not levels else [1, 8, 20])) << 20
        parameter_bytes = draw(st.sampled_from([0, 1, 6, 24])) << 20
        return pd.Stage(s, s + 1, r, *seconds, output_bytes, parameter_bytes, recompute=draw(st.booleans()))

    rows = tuple(stage(s, r) for s, r in enumerate(replicas))
    mebibyte = 1 << 20
    rates = st.sampled_from([2.0 * mebibyte, 8.0 * mebibyte, 100.0 * mebibyte])
    latency, receiving = draw(st.sampled_from([0.0, 0.25])), draw(st.sampled_from([None, 4.0 * mebibyte]))
    machines = (sum(replicas),)
    outer: list[pd.Level] = []
    if levels:
        machines = tuple(draw(st.lists(st.integers(1, 4), min_size=4, max_size=4)))
        machines = (max(machines[0], sum(replicas) - sum(machines[1:])), *machines[1:])
        outer = (
            [pd.Level(4, draw(rates))] if draw(st.booleans()) else [pd.Level(2, draw(rates)), pd.Level(2, draw(rates))]
        )
    inner = pd.Level(max(machines), draw(rates), latency, receiving, sizes=machines)
    kinds = tuple(Workers(1, speed=draw(st.sampled_from([1.0, 0.5]))) for _ in range(sum(machines)))
    cluster = pd.Cluster((inner, *outer), kinds=kinds, all_reduce=draw(st.sampled_from(["ring", "tree"])))
    order: tuple[int, ...] = ()
    if levels and draw(st.booleans()):
        order = tuple(draw(st.permutations(range(cluster.workers)))[: sum(replicas)])
    return pd.Plan(rows, noam(tuple(replicas)), cluster, unit="microbatch", worker_order=order).with_depth("full")


def far_down_s(plan: pd.Plan) -> float:
    """Returns the simulated seconds a minibatch at the last stage, over whole rounds of all stages."""
    every = lcm(*plan.replicas)
    skip = max(240, 10 * max(plan.in_flight)) // every * every
    timeline = run("pipedream", plan, None, 2 * skip + 60)
    ends = sorted(span.end_s for span in timeline.spans if span.kind == "B" and span.stage == len(plan.stages) - 1)
    return (ends[2 * skip - 1] - ends[skip - 1]) / skip


@pytest.mark.slow
@pytest.mark.parametrize("levels", [False, True])
@settings(max_examples=7)
@given(data=st.data())
def test_the_planners_period_is_the_simulated_one(levels: bool, data: st.DataObject) -> None:
    """On levels too, with what machines and racks carry."""
    plan = data.draw(replicated_plans(levels))
    if not plan.worker_order:  # what stages know of a port is a bound from below, where they lie one beside the other
        assert plan.slowest_stage_s <= plan.period_s * (1 + 1e-9)
    assert levels or plan.period_s == plan.slowest_stage_s
    rows = (replace(stage, forward_s=0.0, backward_s=0.0, update_s=0.0) for stage in plan.stages)
    # Each sum over replicas may wait for all else that its ports carry in its round.
    collisions_s = replace(plan, stages=tuple(rows)).period_s if max(plan.replicas) > 1 else 0.0
    # Stages almost as slow take long to fall into step.
    assert plan.period_s * 0.97 <= far_down_s(plan) <= (plan.period_s + collisions_s) * 1.03


def test_stages_of_a_machine_share_its_port() -> None:
    """Six stages on three machines of two: the middle one sends gradients to the left and activations to the right."""
    rows = tuple(pd.Stage(s, s + 1, 1, 1.0, 1.0, output_bytes=12 * (s % 2)) for s in range(6))
    plan = pd.Plan(rows, (6, 5, 4, 3, 2, 1), pd.Cluster((pd.Level(2, 100.0), pd.Level(3, 8.0))), unit="microbatch")
    assert (plan.slowest_stage_s, plan.period_s) == (2.0, 3.0)
    assert far_down_s(plan.with_depth("full")) == pytest.approx(3.0)
    alone = replace(plan, cluster=pd.Cluster((pd.Level(3, 100.0), pd.Level(2, 8.0))))
    assert (alone.slowest_stage_s, alone.period_s) == (2.0, 2.0)  # the boundary between the machines has no bytes
