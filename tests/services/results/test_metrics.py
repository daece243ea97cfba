"""Numbers of timelines, simulated and measured."""

import re

import pytest

import pipedream as pd
from pipedream.core.schedule.timeline import GradientVersions, Span
from pipedream.simulator import costs, simulate

RANK_0 = """
F 0 10 11    send 0 11 11.5    F 1 11.2 12    send 1 11.3 12.5    wait 0 12 14
B 0 14.1 16    U 1 16 16.1    F 2 16.2 17.2    B 1 17.5 19    B 2 19 20
"""
RANK_1 = "F 0 11.5 12.5    B 0 12.5 14    F 1 14.5 15    B 1 15 16.5    F 2 17.3 17.8    B 2 17.8 18.5"
ROWS = [[span.split() for span in re.split(r" {4}|\n", row.strip())] for row in (RANK_0, RANK_1)]
SPANS = [Span(r, kind, r, int(k), float(a), float(b)) for r, row in enumerate(ROWS) for kind, k, a, b in row]
TAGS = [GradientVersions(*tag) for tag in ((0, 0, 0, 0, 0), (0, 1, 0, 0, 1), (0, 2, 1, 1, 2), (1, 2, 2, 2, 2))]
MEASURED = pd.Timeline("pipedream", "measured", 2, tuple(SPANS), 3, batch=32, gradient_versions=tuple(TAGS),
                       peak_bytes=(2000, 1000))  # fmt: skip


def test_steady_part_of_a_measured_run() -> None:
    assert pd.metrics.steady_window(MEASURED) == (16.0, 17.2)
    metrics = pd.metrics.steady_metrics(MEASURED)
    assert metrics.makespan_s == pytest.approx(1.2)
    assert [row.busy_s for row in metrics.per_rank] == pytest.approx([1.1, 0.5])
    assert [row.wait_s for row in metrics.per_rank] == [0.0, 0.0]
    assert metrics.per_rank[0].peak_in_flight == 2


def simulated(method: str, plan: pd.Plan, total: int, split: int | None = None) -> pd.Timeline:
    return simulate(pd.lower(pd.schedules.build(method, plan, split)), costs(plan), total)


def test_steady_part_has_neither_warm_up_nor_drain() -> None:
    timeline = simulated("pipedream", pd.Plan.uniform(4), 40)
    whole, steady = pd.metrics.run_metrics(timeline), pd.metrics.steady_metrics(timeline)
    assert whole.bubble > 0.05
    assert steady.bubble == pytest.approx(0.0)
    assert steady.throughput_per_s == pytest.approx(1 / 3)
    assert pd.metrics.steady_window(timeline) == (12.0, 12.0 + 36 * 3 - 2)
    assert pd.metrics.steady_window(timeline, skip=5)[0] == 12.0 + 15


def test_run_without_steady_part_is_refused() -> None:
    gpipe = simulated("gpipe", pd.Plan.uniform(3), 6, 6)
    for skip, words in ((0, "this run of 6 microbatches drains earlier"), (7, "beyond 8 backwards")):
        with pytest.raises(ValueError, match=words):
            pd.metrics.steady_metrics(gpipe, **{"skip": skip} if skip else {})


def test_in_flight_counts_until_the_weight_gradient() -> None:
    letters = ["F", "F", "I", "F", "W", "I", "I", "W", "W"]
    spans = tuple(Span(0, letter, 0, i, float(i), i + 1.0) for i, letter in enumerate(letters))
    assert pd.metrics.in_flight(pd.Timeline("split", "simulated", 1, spans, 3), 0) == 3


def test_what_did_not_run_has_no_figures() -> None:
    metrics = pd.metrics.run_metrics(pd.Timeline("none", "measured", 2, (), 0))
    assert (metrics.makespan_s, metrics.bubble, metrics.throughput_per_s) == (0.0, 0.0, 0.0)
    assert (metrics.busy_shares, metrics.per_rank[1].staleness) == ((0.0, 0.0), None)
    with pytest.raises(ValueError, match="no gradient versions"):
        pd.metrics.staleness(MEASURED, 2)


def test_a_measured_run_with_gaps_prints_as_a_table_and_can_be_saved() -> None:
    """Messages that overlap count once."""
    metrics = pd.metrics.run_metrics(MEASURED)
    assert str(metrics).splitlines() == [
        "pipedream, measured: 10.0 s, bubble 35.0%, 0.3 microbatches/s, 9.6 samples/s",
        "rank    busy  share   waits   sends  in flight  versions  staleness     peak",
        "   0  7.30 s  73.0%  2.00 s  1.50 s          2         -          1  2.00 kB",
        "   1  5.70 s  57.0%     0 s     0 s          1         -          0  1.00 kB",
    ]
    assert metrics.bubble == pytest.approx(1 - 13.0 / 20.0)
    assert pd.metrics.Metrics.from_json(metrics.to_json()) == metrics
