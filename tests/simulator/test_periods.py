"""Closed forms of time: makespan of flushing orders, period of asynchronous ones, at both depths."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from math import lcm

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipedream.core.cluster import Cluster
from pipedream.core.depth import full, noam
from pipedream.core.plan import Plan, Stage
from pipedream.core.timeline import Timeline
from pipedream.lowering import lower
from pipedream.metrics import measure, steady
from pipedream.schedules import build
from pipedream.simulator import costs, simulate

SECONDS = st.floats(0.1, 10.0)


def run(name: str, plan: Plan, microbatches: int | None, total: int, overlap: bool = True) -> Timeline:
    return simulate(lower(build(name, plan, microbatches)), costs(plan, overlap=overlap), total)


def period_s(timeline: Timeline, every: int, skip: int) -> float:
    """Returns the seconds a minibatch between ends of backwards of rank 0, `every` so many apart, before the drain."""
    spans = [span for span in timeline.of_rank(0) if span.kind == "B"]
    first, last = skip, skip + (len(spans) - 30 - skip) // every * every
    assert last > first
    return (spans[last].end_s - spans[first].end_s) / (spans[last].index - spans[first].index)


@given(st.integers(1, 6), st.integers(1, 12), SECONDS, SECONDS, st.floats(0.0, 1.0))
@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_makespan_of_a_flushing_minibatch(name: str, p: int, m: int, f: float, b: float, share: float) -> None:
    # GPipe, section 2.3. A message as long as an op at most is hidden in the stream and counts once each way.
    c = share * min(f, b) if name == "gpipe" else 0.0
    found = run(name, Plan.uniform(p, f, b, c), m, m).makespan_s
    assert found == pytest.approx((m + p - 1) * (f + b) + 2 * c * (p - 1))


@settings(max_examples=40)
@given(st.integers(1, 6), SECONDS, SECONDS, st.floats(0.0, 1.0))
def test_period_at_the_papers_depth_shows_messages(p: int, f: float, b: float, share: float) -> None:
    c = share * (f + b)
    timeline = run("pipedream", Plan.uniform(p, f, b, c), None, 20 * p + 60)
    assert period_s(timeline, p, 10 * p) == pytest.approx(f + b + 2 * c * (p - 1) / p)


@settings(max_examples=40)
@given(st.integers(1, 6), SECONDS, SECONDS, st.floats(0.0, 1.0))
def test_period_at_full_depth_hides_messages(p: int, f: float, b: float, share: float) -> None:
    plan = Plan.uniform(p, f, b, share * (f + b)).with_depth("full")
    timeline = run("pipedream", plan, None, 200)
    assert period_s(timeline, 1, 120) == pytest.approx(f + b)
    assert min(steady(timeline, skip=120).busy_shares) == pytest.approx(1.0)


def test_the_design_pages_example() -> None:
    timeline = run("pipedream", Plan.uniform(4, 1.0, 1.0, 1.0), None, 400)
    assert max(steady(timeline, skip=200).busy_shares) == pytest.approx(4 / 7, abs=1e-2)  # "57% busy"


@given(st.lists(st.tuples(SECONDS, SECONDS), min_size=1, max_size=5))
def test_throughput_is_that_of_the_slowest_stage(times: list[tuple[float, float]]) -> None:
    rows = tuple(Stage(s, s + 1, 1, f, b) for s, (f, b) in enumerate(times))
    plan = Plan(rows, tuple(range(len(rows), 0, -1)), Cluster.flat(len(rows)), unit="microbatch")
    timeline = run("pipedream", plan, None, 120)
    slowest, rank = max((f + b, s) for s, (f, b) in enumerate(times))
    ends = [span.end_s for span in timeline.of_rank(rank) if span.kind == "B"]
    found = (ends[100] - ends[40]) / 60
    # Stages almost as slow take long to fall into step with it, so the period is met from above.
    assert slowest * (1 - 1e-9) <= found <= slowest * 1.01
    assert measure(timeline).throughput_per_s <= 1 / slowest + 1e-9


def balanced(replicas: tuple[int, ...], forward_s: float = 1.0, backward_s: float = 2.0) -> Plan:
    """Returns a plan whose stages take r_s times as long on r_s replicas: one period for all."""
    rows = tuple(Stage(s, s + 1, r, forward_s * r, backward_s * r) for s, r in enumerate(replicas))
    return Plan(rows, noam(replicas), Cluster.flat(sum(replicas)), unit="microbatch")


AT_NOAM = {
    (2, 1): 1.00,
    (3, 1): 1.00,
    (2, 2, 1): 1.00,
    (1, 2): 0.80,
    (3, 2): 0.86,
    (2, 3): 0.75,
    (2, 1, 1): 0.67,
    (4, 2, 1): 0.67,
    (5, 3): 0.79,
    (5, 6, 3): 5 / 11,
}
"""Least busy share of a balanced plan at the paper's depth (docs/design.md, Depth)."""


@pytest.mark.parametrize("replicas", AT_NOAM, ids=str)
def test_busy_share_of_replicated_plans(replicas: tuple[int, ...]) -> None:
    shallow = run("pipedream", balanced(replicas), None, 1200)
    found = 3.0 / period_s(shallow, lcm(*replicas), 100)
    assert found == pytest.approx(AT_NOAM[replicas], abs=0.005)
    full = run("pipedream", balanced(replicas).with_depth("full"), None, 300)
    assert min(steady(full, skip=150).busy_shares) == pytest.approx(1.0)


@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("slots", [0.3, 1.0, 2.5])
@pytest.mark.parametrize("replicas", AT_NOAM, ids=str)
def test_full_depth_hides_messages_of_replicated_plans(replicas: tuple[int, ...], slots: float, lag: int) -> None:
    """One-way message times of several slots: at the paper's depth they show, at full they do not."""
    plan, lags = balanced(replicas), tuple(lag if r > 1 else 0 for r in replicas)
    # Latency alone, as longer messages than a slot would be the bottleneck themselves; sums cost nothing here.
    # Where a lagging sum begins with the backward already, the paper's depth may be enough.
    seconds = replace(costs(plan, overlap=False), latency_s=slots * 3.0)
    overlapped = replace(costs(plan), latency_s=slots * 3.0)
    round_trips = (2 * slots,) * (len(replicas) - 1)
    shares = []
    for counts in (full(replicas, round_trips, lags), noam(replicas, lags)):
        program = lower(build("pipedream", replace(plan, in_flight=counts, lag=lags)))
        shares.append(min(steady(simulate(program, seconds, 600), skip=400).busy_shares))
        assert simulate(program, overlapped, 600).makespan_s <= simulate(program, seconds, 600).makespan_s
    assert shares[0] == pytest.approx(1.0)
    assert shares[1] < 0.95


def test_rings_are_as_deep_as_what_lies_between_replicas() -> None:
    """2-1-2 with every link full: each replica of stage 0 has up to six minibatches on the way to stage 1."""
    plan, replicas = balanced((2, 1, 2)), (2, 1, 2)
    rows = tuple(replace(stage, output_bytes=3) for stage in plan.stages)
    counts = full(replicas, (7.0, 7.0))
    assert counts == (11, 11, 1)
    plan = replace(plan, stages=rows, cluster=Cluster.flat(5, 1.0), in_flight=counts)
    assert plan.slowest_stage_s == 3.0
    program = lower(build("pipedream", plan))
    assert {(c.source, c.target): c.depth for c in program.channels if c.carries == "activation"} == {
        (0, 1): 7,
        (1, 2): 6,
    }
    timeline = simulate(program, replace(costs(plan), latency_s=7.5), 600)
    assert min(steady(timeline, skip=400).busy_shares) == pytest.approx(1.0)


@st.composite
def replicated_plans(draw: st.DrawFn) -> Plan:
    """Unlike stages on replicas, with sums and with messages that may be the bottleneck."""
    replicas = draw(st.lists(st.integers(1, 3), min_size=1, max_size=3))
    eighths = st.integers(1, 24).map(lambda n: n / 8)
    rows = tuple(
        Stage(
            s,
            s + 1,
            r,
            r * draw(eighths),
            r * draw(eighths),
            draw(st.sampled_from([0.0, 0.5])),
            output_bytes=draw(st.sampled_from([0, 1, 8, 40])),
            parameter_bytes=draw(st.sampled_from([0, 6, 24])),
        )
        for s, r in enumerate(replicas)
    )
    bandwidth, latency = draw(st.sampled_from([2.0, 8.0, 100.0])), draw(st.sampled_from([0.0, 0.25]))
    plan = Plan(rows, noam(tuple(replicas)), Cluster.flat(sum(replicas), bandwidth, latency), unit="microbatch")
    return plan.with_depth("full")


@settings(max_examples=60)
@given(replicated_plans())
def test_the_planners_period_is_the_simulated_one(plan: Plan) -> None:
    timeline = run("pipedream", plan, None, 480, overlap=False)
    ends = sorted(span.end_s for span in timeline.spans if span.kind == "B" and span.stage == len(plan.stages) - 1)
    found = (ends[419] - ends[179]) / 240
    # Stages almost as slow take long to fall into step, and the ends of a round's replicas are not even.
    assert plan.slowest_stage_s * 0.98 <= found <= plan.slowest_stage_s * 1.02


def test_replicas_share_each_others_links() -> None:
    """2-1: the one link of the second stage carries every message, so two replicas do not halve their time."""
    rows = (Stage(0, 1, 2, 1.0, 1.0, output_bytes=6), Stage(1, 2, 1, 1.0, 1.0))
    pair = Plan(rows, (2, 1), Cluster.flat(3, 1.0), unit="microbatch").with_depth("full")
    assert pair.slowest_stage_s == 6.0
    assert period_s(run("pipedream", pair, None, 200), 1, 40) == pytest.approx(6.0)
    both = (Stage(0, 1, 2, 1.0, 1.0, output_bytes=6), Stage(1, 2, 2, 1.0, 1.0))
    twice = Plan(both, (2, 1), Cluster.flat(4, 1.0), unit="microbatch").with_depth("full")
    assert twice.slowest_stage_s == 3.0
    assert period_s(run("pipedream", twice, None, 200), 1, 40) == pytest.approx(3.0)


@settings(max_examples=25)
@given(
    st.lists(st.integers(1, 4), min_size=1, max_size=4), st.sampled_from([(1, 1), (1, 2), (2, 1)]), st.integers(0, 4)
)
def test_full_depth_fills_replicated_plans(replicas: list[int], times: tuple[int, int], quarters: int) -> None:
    base = balanced(tuple(replicas), *map(float, times))
    period = Fraction(sum(times))
    size = Fraction(quarters, 4) * period
    rows = tuple(
        Stage(s.first, s.last, s.replicas, s.forward_s, s.backward_s, output_bytes=int(size * 4)) for s in base.stages
    )
    plan = Plan(rows, base.in_flight, Cluster.flat(sum(replicas), 4.0), unit="microbatch")
    assert plan.slowest_stage_s == float(period)
    timeline = run("pipedream", plan.with_depth("full"), None, 400)
    assert min(steady(timeline, skip=250).busy_shares) == pytest.approx(1.0)
