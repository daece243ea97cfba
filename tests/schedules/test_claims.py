"""Every registered method keeps its paper's closed forms: all of them simulated, over many depths and counts."""

import pytest
from marks import slow

import pipedream as pd
from pipedream.apps.testing.checks import check_claims, small_schedules
from pipedream.simulator import costs, simulate

NAMES = (*pd.schedules.SCHEDULES, "paci[backward_rule=stash]")


def run(schedule: pd.Schedule, total: int) -> pd.Timeline:
    return simulate(pd.lower(schedule), costs(schedule.plan), total)


@pytest.mark.parametrize("name", NAMES)
def test_bubble_in_flight_staleness_and_versions(name: str) -> None:
    check_claims(name)
    assert all(schedule.claims.bubble or not schedule.flushes for _, _, schedule in small_schedules(name))


@pytest.mark.parametrize(("p", "total"), [(2, 1), (3, 2), (4, 3), (6, 5)])
@pytest.mark.parametrize("name", ["pipedream", "pipedream_vertical_sync"])
def test_in_flight_of_a_run_shorter_than_the_pipeline(name: str, p: int, total: int) -> None:
    schedule = pd.schedules.build(name, pd.Plan.uniform(p))
    timeline = run(schedule, total)
    for s in range(p):
        assert pd.metrics.in_flight(timeline, s) == schedule.claims.in_flight(p, total, s)


@pytest.mark.parametrize("p", [2, 4, *(slow(p) for p in (6, 16)), 8])
def test_two_pipelines_in_each_others_bubbles(p: int) -> None:
    """Chimera, SC 2021, sections 3.1 and 3.5: at m = p the makespan is 3p - 2 equal slots, of which p - 2 are idle."""
    for b, units, makespan_s in (
        (1.0, 1, 3 * p - 2),
        (2.0, 1, 5 * p - 4),
        *((1.0, units, 2 * units * p + p - 2) for units in (2, 3, 5)),  # in the bubbles of those before
    ):
        schedule = pd.schedules.build("chimera", pd.schedules.uniform("chimera", p, 1.0, b), units * p)
        assert run(schedule, units * p).makespan_s == makespan_s


SPLIT_TIMES = {
    "zb_h1": ((1, 1, 1), (2, 2, 1), (1, 3, 1), (2, 1, 1), (3, 4, 2.5), (1, 1, 0)),
    "zb_h2": ((1, 1, 1), (1, 1, 2), (2, 1, 2), (3, 2.5, 4), (1, 0, 1)),
    "zbv": ((1, 1, 1), (2.5, 2.5, 2.5)),
    "v_half": ((1, 1, 1),),
    "v_min": ((1, 1, 1),),
    "dualpipev": ((1, 1, 1), (2, 2, 1), (2, 1, 1), (4, 3, 2.5), (1, 1, 0)),
}
"""Seconds of forward, input gradient and weight gradient for which a makespan is claimed."""


@pytest.mark.parametrize(
    "p", [3, *(pytest.param(p, marks=pytest.mark.slow if p in (1, 4) else pytest.mark.long) for p in (1, 2, 4, 7))]
)
@pytest.mark.parametrize(
    ("name", "times"), [(name, times) for name, rows in SPLIT_TIMES.items() for times in rows], ids=str
)
def test_makespan_of_a_split_backward(name: str, times: tuple[float, float, float], p: int) -> None:
    f, i, w = times
    least = pd.schedules.build(name, pd.schedules.uniform(name, p)).claims.least(p)
    for m in (least, least + 1, 3 * p + 1):
        schedule = pd.schedules.build(name, pd.schedules.uniform(name, p, f, i + w), m)
        program = pd.lower(schedule)
        for n in (1, 3):
            timeline = simulate(program, costs(schedule.plan, weight_s=w), n * m)
            assert timeline.makespan_s == pytest.approx(schedule.claims.makespan_s(p, m, n, f, i, w), abs=1e-9)
