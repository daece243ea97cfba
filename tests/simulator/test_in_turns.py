"""Ranks that share a thread, as the workers of a single process do."""

from __future__ import annotations

from itertools import pairwise

import pytest
from drawn import runs
from hypothesis import given

from pipedream.core.plan.plan import Plan
from pipedream.core.schedule.lowering import lower
from pipedream.core.schedule.schedule import Schedule
from pipedream.metrics import steady_metrics
from pipedream.schedules import build
from pipedream.simulator import Costs, costs, simulate


@given(runs())
def test_one_works_at_a_time(run: tuple[Schedule, Costs, int]) -> None:
    schedule, seconds, total = run
    program = lower(schedule)
    shared, apart = simulate(program, seconds, total, in_turns=True), simulate(program, seconds, total)
    work = sorted(shared.work(), key=lambda span: (span.start_s, span.end_s))
    assert all(after.start_s >= before.end_s * (1 - 1e-12) for before, after in pairwise(work))
    assert sorted(span[:4] for span in work) == sorted(span[:4] for span in apart.work())


@pytest.mark.parametrize("name", ["1f1b", "pipedream"])
def test_nothing_overlaps_and_nobody_is_idle_at_once(name: str) -> None:
    plan = Plan.uniform(3, forward_s=1.0, backward_s=2.0, update_s=0.5)
    program = lower(build(name, plan, 4 if name == "1f1b" else None))
    timeline = simulate(program, costs(plan), 40, in_turns=True)
    updates = sum(span.kind == "U" for span in timeline.spans)
    assert timeline.makespan_s == pytest.approx(3 * 40 * 3.0 + updates * 0.5)
    assert steady_metrics(timeline).bubble == pytest.approx(2 / 3, abs=0.02)
