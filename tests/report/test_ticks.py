"""Ticks of an axis."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipedream.core.units import format_number
from pipedream.report.style import ticks


@given(low=st.floats(-1e6, 1e6), length=st.floats(1e-3, 1e9), most=st.integers(2, 20))
def test_ticks_are_few_round_and_inside(low: float, length: float, most: int) -> None:
    marks = ticks(low, low + length, most)
    assert len(marks) <= most
    slack = 1e-6 * (length + abs(low))
    assert all(low - slack <= tick <= low + length + slack for tick in marks)
    steps = [b - a for a, b in pairwise(marks)]
    assert all(step == pytest.approx(steps[0], rel=1e-3) for step in steps)
    if steps and abs(low) < 1e4 * length:
        assert f"{steps[0]:.0e}"[0] in "125"
    # Not fewer than need be: half as many would be the next rounder step.
    assert len(marks) >= most // 5


def test_figures() -> None:
    assert [format_number(value) for value in (0.1, 7411.9, 12.0, float("nan"))] == ["0.1", "7412", "12", "nan"]
