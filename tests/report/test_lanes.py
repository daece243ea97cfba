"""Rows for what overlaps, and the part of a run that is shown."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from pipedream.core.schedule.timeline import Span, Timeline
from pipedream.report.lanes import assign_rows, middle_window, start_window

Simulated = Callable[..., Timeline]
TIMES = st.lists(st.tuples(st.floats(0, 100), st.floats(0.1, 20)), max_size=30)


@given(times=TIMES)
def test_no_two_of_a_row_overlap_and_no_row_is_wasted(times: list[tuple[float, float]]) -> None:
    spans = [Span(0, "send", 0, i, start, start + length) for i, (start, length) in enumerate(sorted(times))]
    rows = assign_rows(spans)
    for row in set(rows):
        mine = [span for span, where in zip(spans, rows, strict=True) if where == row]
        assert all(b.start_s >= a.end_s for a, b in pairwise(mine))
    alive = [sum(a.start_s <= b.start_s < a.end_s for a in spans) for b in spans]
    assert max(rows, default=-1) + 1 == max(alive, default=0)


def test_steady_window_keeps_away_from_drains(simulated: Simulated) -> None:
    timeline = simulated("pipedream", total=100)
    window = middle_window(timeline, 12, [10, 30, 90])
    assert window is not None
    assert (window.first, window.last) == (54, 66)
    assert window.length_s == 36.0
    assert middle_window(timeline, 12, range(0, 100, 20)) is None


def test_steady_window_shows_whole_minibatches(simulated: Simulated) -> None:
    window = middle_window(simulated("gpipe", split=4, total=68), 8)
    assert window is not None
    assert (window.first, window.last) == (28, 36)  # the middle would be 30


def test_start_window(simulated: Simulated) -> None:
    timeline = simulated("pipedream", total=40)
    window = start_window(timeline, 12)
    assert window is not None
    assert (window.first, window.last, window.start_s) == (0, 12, 0.0)
    short = start_window(simulated("pipedream", total=3), 12)
    assert short is not None
    assert (short.last, short.end_s) == (3, simulated("pipedream", total=3).makespan_s)
    assert start_window(Timeline("x", "measured", 1, (), 0), 12) is None
