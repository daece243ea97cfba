"""The picture of a timeline as SVG: well formed, one box an op, the right words in the right place."""

import re
from dataclasses import replace
from xml.etree import ElementTree

import pytest
from hypothesis import given, strategies as st

import pipedream as pd
from pipedream.apps.report import charts, svg
from tests.apps.report.conftest import SVG, Simulated


def _find_boxes(tree: ElementTree.Element, kind: str = "op") -> list[ElementTree.Element]:
    return [box for box in tree.iter(f"{SVG}rect") if box.get("class") == kind]


def _read_title(box: ElementTree.Element) -> str:
    return box.findtext(f"{SVG}title") or ""


@given(
    name=st.sampled_from(["naive", "gpipe", "1f1b", "pipedream", "pipedream_vertical_sync"]),
    stages=st.integers(1, 4),
    total=st.integers(1, 8),
    transfer_s=st.sampled_from([0.0, 0.25]),
)
def test_one_box_an_op_at_its_time(simulated: Simulated, name: str, stages: int, total: int, transfer_s: float) -> None:
    timeline = simulated(name, stages=stages, total=total, transfer_s=transfer_s)
    tree = ElementTree.fromstring(svg.timeline_svg(timeline, title='"a" < & b', px_per_s=50))
    drawn = {_read_title(box).split(":")[0]: box for box in _find_boxes(tree)}
    assert len(_find_boxes(tree)) == len(drawn) == len(timeline.work())
    for span in timeline.work():
        box = drawn[f"{span.stage}{span.kind}{span.index}"]
        assert float(box.get("x", "")) == pytest.approx(svg.LEFT + 50 * span.start_s, abs=0.1)
        if span.kind != "U":
            assert float(box.get("width", "")) == pytest.approx(50 * (span.end_s - span.start_s), abs=1)
    lines = [line for line in tree.iter(f"{SVG}line") if line.get("class") == "wave"]
    assert len(lines) == sum(span.kind == "send" for span in timeline.spans)
    assert bool(lines) == bool(transfer_s and stages > 1)


def test_labels_are_microbatches_and_versions(simulated: Simulated) -> None:
    timeline = simulated("pipedream", stages=3, total=8)
    tree = ElementTree.fromstring(svg.timeline_svg(timeline, versions=True, px_per_s=40))
    labels = [text.text for text in tree.iter(f"{SVG}text") if text.get("class") == "on-op"]
    assert sorted(label for label in labels if label and label[0] == "v") == sorted(
        f"v{tag.forward_version}" for tag in timeline.gradient_versions for _ in "FB"
    )
    assert sum(label == "7" for label in labels) == 6
    story = next(_read_title(box) for box in _find_boxes(tree) if _read_title(box).startswith("0B7"))
    assert story == "0B7: backward, microbatch 7, 2.00 s, reads version 5"


def test_a_window_is_cut_at_its_edges(simulated: Simulated) -> None:
    timeline = simulated("pipedream", total=40)
    tree = ElementTree.fromstring(svg.timeline_svg(timeline, start_s=60.5, end_s=70.5, px_per_s=30))
    assert tree.get("width") == str(svg.LEFT + 300 + 16)
    for box in _find_boxes(tree):
        assert float(box.get("x", "")) >= svg.LEFT
        assert float(box.get("x", "")) + float(box.get("width", "")) <= svg.LEFT + 300 + 1.5


def test_colours_follow_the_screen_and_have_a_fallback(simulated: Simulated) -> None:
    """In a file they are literal: converters that know no CSS variables draw black what has one."""
    picture = svg.timeline_svg(simulated("gpipe"))
    assert "prefers-color-scheme:dark" in picture
    for shape in re.findall(r"<(?:rect|text|line|g) [^>]*class=[^>]*>", picture):
        if 'class="op"' not in shape and 'class="idle"' not in shape:  # their group has it
            assert re.search(r'(fill|stroke)="#[0-9a-f]{6}"', shape), shape
    assert "var(" not in picture + charts.curve_svg(enumerate([3.0, 2.0]), marks=[1], named=[(1, "x")])
    assert "http" not in svg.timeline_svg(simulated("gpipe"), standalone=False), "inlined it names no address"


def test_what_is_not_known_is_not_drawn(simulated: Simulated) -> None:
    assert not _find_boxes(ElementTree.fromstring(svg.timeline_svg(pd.Timeline("x", "simulated", 2, (), 0))))
    without_versions = replace(simulated("pipedream", stages=3, total=8), gradient_versions=())
    assert 'class="on-op"' in svg.timeline_svg(without_versions, versions=True)
