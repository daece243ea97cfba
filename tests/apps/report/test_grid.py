"""The picture of a timeline in the terminal: golden, and by what it must hold for any."""

import re
from importlib import import_module

import pytest
from hypothesis import given, strategies as st

import pipedream as pd
from pipedream.apps.report.text import choose_slot, grid, grid_rich
from pipedream.core.schedule.timeline import Span
from tests.apps.report.conftest import Simulated


def test_updates_that_fill_a_column_are_ops(simulated: Simulated) -> None:
    picture = grid(simulated("naive", split=1, total=1, backward_s=1.0, update_s=1.0))
    assert picture.splitlines() == ["time   | 0 s", "rank 0 | F0 .  .  B0 U1", "rank 1 | .  F0 B0 U1"]


DOCSTRINGS = {
    name: re.findall(r"^ *(rank .*)", import_module(build.__module__).__doc__ or "", re.M)
    for name, build in pd.schedules.SCHEDULES.items()
}
SPLIT_IN_TWO = ("pipedream_2bw", "pipemare", "xpipe", "paci", "timeprest", "v_timeprest", "timeprest_interpolated")


@pytest.mark.parametrize("name", DOCSTRINGS)
def test_pictures_of_docstrings(simulated: Simulated, name: str) -> None:
    """The library draws a method as its own file does; a docstring shows one minibatch, or the beginning of a run."""
    told = DOCSTRINGS[name]
    total = 1 + max(int(k) for row in told for k in re.findall(r"F(\d+)", row))
    built = pd.schedules.SCHEDULES[name](pd.schedules.uniform(name, 2), None)
    split = total if built.flushes else 2 if name in SPLIT_IN_TWO else None
    plan = pd.schedules.uniform(name, len(told), 1.0, 2.0 if built.splits_backward else 1.0)  # each half takes a column
    drawn = grid(simulated(name, plan=plan, split=split, total=total)).splitlines()[1:]
    assert len(told) == len(drawn)
    for short, long in zip(told, drawn, strict=True):
        assert long.split()[: len(short.split())] == short.split()


@given(name=st.sampled_from(["naive", "pipedream"]), width=st.integers(30, 140), total=st.integers(1, 12))
def test_width_is_kept(simulated: Simulated, name: str, width: int, total: int) -> None:
    timeline = simulated(name, stages=3, split=1 if name == "naive" else None, total=total)
    whole, narrow = grid(timeline).splitlines(), grid(timeline, width=width).splitlines()
    assert max(map(len, narrow)) <= width
    for long, short in zip(whole[1:], narrow[1:], strict=True):
        assert short == long or short.endswith("...")
        # Columns are as wide as their widest word, so the spaces may differ.
        assert "".join(long.split()).startswith("".join(short.removesuffix("...").split()))
    assert any(row.endswith("...") for row in narrow) == (max(map(len, whole)) > width)


def test_colours_change_no_letter(simulated: Simulated) -> None:
    timeline = simulated("pipedream", stages=3, total=5)
    picture = grid_rich(timeline)
    assert [row.rstrip() for row in picture.plain.splitlines()] == grid(timeline).splitlines()
    styles = {picture.plain[span.start : span.end].strip(" '"): str(span.style) for span in picture.spans}
    assert styles["F0"] != styles["F1"] != styles["B1"]


def test_uneven_times(measured: pd.Timeline) -> None:
    """Also a measured picture shows each op of its beginning, and no clock reading stretches it."""
    picture = grid(measured, width=200)
    begun = [s.index for s in measured.spans if s.kind == "B" and s.end_s < 18 * choose_slot(measured)]
    assert begun
    assert all(re.search(rf"\bB{k}\b", picture) for k in begun)


@pytest.mark.parametrize(
    ("spans", "rank_0"),
    [
        # A column shows what its middle meets.
        ("F 0 0 0.0 1.0, B 0 0 1.4 3.4, F 0 1 3.6 4.4, B 0 1 4.6 6.6", "rank 0 | F0 B0 == .  F1 B1 =="),
        ("F 0 0 0.0 1.0, F 1 0 1.0 2.0", "rank 0 | 0F0 1F0"),  # two stages
        ("", "rank 0 |"),
    ],
)
def test_pictures_of_spans(spans: str, rank_0: str) -> None:
    words = [span.split() for span in spans.split(", ") if span]
    drawn = tuple(Span(0, kind, int(s), int(k), float(a), float(b)) for kind, s, k, a, b in words)
    assert grid(pd.Timeline("x", "measured", 1, drawn, 2), slot_s=1.0).splitlines()[1] == rank_0
