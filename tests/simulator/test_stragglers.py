"""Ops that jitter and ranks that are slow: what they change, and what they leave."""

from __future__ import annotations

from math import log1p, sqrt
from statistics import NormalDist, fmean, stdev

import pytest
from drawn import runs
from hypothesis import given, settings
from hypothesis import strategies as st

import pipedream as pd
from pipedream.core.plan.plan import Plan
from pipedream.core.schedule.lowering import lower
from pipedream.core.schedule.schedule import Schedule
from pipedream.core.schedule.timeline import Timeline
from pipedream.metrics import steady_metrics
from pipedream.schedules import build
from pipedream.simulator import Costs, Stragglers, costs, simulate


def seconds_of(timeline: Timeline, kind: str, rank: int = 0) -> list[float]:
    return [span.end_s - span.start_s for span in timeline.of_rank(rank) if span.kind == kind]


@given(runs(), st.integers(0, 9))
def test_no_jitter_and_no_slow_rank_is_the_plain_run(run: tuple[Schedule, Costs, int], seed: int) -> None:
    schedule, seconds, total = run
    program = lower(schedule)
    plain = simulate(program, seconds, total)
    assert simulate(program, seconds, total, Stragglers(jitter=0.0, slow={0: 1.0}, seed=seed)) == plain
    assert simulate(program, seconds, total, Stragglers(jitter={"F": 0.0})) == plain


@settings(max_examples=30)
@given(st.integers(1, 5), st.data(), st.floats(1.0, 4.0))
def test_a_slow_rank_sets_the_pace(stages: int, data: st.DataObject, factor: float) -> None:
    slow = data.draw(st.integers(0, stages - 1))
    plan = Plan.uniform(stages, 1.0, 2.0)
    timeline = pd.simulate(plan, minibatches=80, slow={slow: factor})
    assert steady_metrics(timeline, skip=2 * stages).throughput_per_s == pytest.approx(1 / (3.0 * factor))
    assert seconds_of(timeline, "F", slow) == pytest.approx([factor] * 80)


def test_a_slow_replica_holds_its_stage_back() -> None:
    """Round robin gives every replica as much, so two replicas are as slow as the slower one."""
    plan = Plan.uniform(1, 1.0, 2.0, replicas=(2,))
    timeline = pd.simulate(plan, minibatches=100, slow={1: 1.5})
    assert timeline.makespan_s == pytest.approx(50 * 4.5)
    assert sum(s.end_s - s.start_s for s in timeline.of_rank(0) if s.kind == "wait") == pytest.approx(50 * 1.5)


@pytest.mark.parametrize("variation", [0.05, 0.3, 1.0])
def test_jitter_keeps_the_mean_and_has_the_variation_asked_for(variation: float) -> None:
    count = 20_000
    seconds = seconds_of(pd.simulate(Plan.uniform(1, 3.0, 6.0), minibatches=count, jitter=variation, seed=7), "B")
    # Five standard errors; the fourth moment of a lognormal is large, so its deviation is met less well.
    assert fmean(seconds) == pytest.approx(6.0, rel=5 * variation / sqrt(count))
    assert stdev(seconds) / fmean(seconds) == pytest.approx(variation, rel=0.1)
    assert min(seconds) > 0


def test_jitter_by_kind_of_op() -> None:
    timeline = pd.simulate(Plan.uniform(2, 1.0, 2.0), minibatches=50, jitter={"B": 0.2})
    assert seconds_of(timeline, "F") == pytest.approx([1.0] * 50)
    assert len(set(seconds_of(timeline, "B"))) == 50


def test_the_same_seed_is_the_same_run_whatever_the_others_do() -> None:
    plan = Plan.uniform(3, 1.0, 2.0, 0.25)
    first = pd.simulate(plan, minibatches=20, jitter=0.3, seed=1)
    assert pd.simulate(plan, minibatches=20, jitter=0.3, seed=1) == first
    assert pd.simulate(plan, minibatches=20, jitter=0.3, seed=2) != first
    # A rank draws for itself: another order of events changes when its ops begin, not how long they take.
    late = pd.simulate(plan, minibatches=20, jitter=0.3, seed=1, slow={2: 2.0})
    assert seconds_of(late, "B", 0) == pytest.approx(seconds_of(first, "B", 0))
    apart = pd.simulate(plan, minibatches=20, jitter={"B": 0.3}, seed=1)
    assert seconds_of(apart, "B", 0) != pytest.approx(seconds_of(apart, "B", 1))


def test_jitter_slows_a_pipeline_down() -> None:
    plan = Plan.uniform(4, 1.0, 2.0)
    smooth, rough = (pd.simulate(plan, minibatches=400, jitter=cv).makespan_s for cv in (0.0, 0.3))
    assert rough > 1.05 * smooth


def test_moments_of_the_draws() -> None:
    draw = Stragglers(jitter=0.5, seed=3).draws(0)
    assert draw is not None
    factors = [draw("F") for _ in range(50_000)]
    below = sum(factor < 1 for factor in factors) / len(factors)
    # ln X is normal with mean -sigma^2 / 2, so P(X < 1) is the normal distribution at sigma / 2.
    assert below == pytest.approx(NormalDist().cdf(sqrt(log1p(0.25)) / 2), abs=0.01)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"jitter": -0.1}, "0 or more, found -0.1"),
        ({"jitter": float("inf")}, "0 or more, found inf"),
        ({"jitter": {"X": 0.1}}, r"jitter was given for \['X'\]"),
        ({"slow": {0: 0.0}}, "found 0.0 for rank 0"),
    ],
)
def test_nonsense_is_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Stragglers(**options)  # type: ignore[arg-type]


def test_a_rank_that_there_is_not_is_refused() -> None:
    plan = Plan.uniform(2)
    with pytest.raises(ValueError, match="slow rank 2 was asked for, the ranks are 0 to 1"):
        simulate(lower(build("pipedream", plan)), costs(plan), 4, Stragglers(slow={2: 2.0}))
