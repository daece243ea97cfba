"""The loss curve, inside its frame and honest about what it leaves out; ticks, lanes and colours of pictures."""

import math
import re
from dataclasses import replace
from itertools import pairwise, permutations
from xml.etree import ElementTree

import pytest
from hypothesis import given, strategies as st

from pipedream.apps.report import charts, lanes
from pipedream.apps.report.method_comparison import MethodComparison, MethodFigures
from pipedream.apps.report.style import COLOURS, LINES, page_style, ticks
from pipedream.core.schedule.timeline import Span
from tests.apps.report.conftest import SVG, Simulated

LOSSES = st.lists(st.floats(allow_nan=True, allow_infinity=True, width=32), max_size=500)


@given(losses=LOSSES)
def test_any_losses_give_a_picture_in_its_frame(losses: list[float]) -> None:
    tree = ElementTree.fromstring(charts.curve_svg(enumerate(losses), marks=[3, 10**9]))
    for line in [*tree.iter(f"{SVG}polyline"), *tree.iter(f"{SVG}polygon")]:
        for point in (line.get("points") or "").split():
            x, y = map(float, point.split(","))
            assert 0 <= x <= 640
            assert 0 <= y <= 240
    missing = sum(not math.isfinite(loss) for loss in losses)
    words = " ".join(text.text or "" for text in tree.iter(f"{SVG}text"))
    assert (f"{missing} not finite" in words) == bool(missing)
    assert ("no loss was recorded" in words) == (missing == len(losses))


@given(losses=st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=2000))
def test_thinning_keeps_the_extremes(losses: list[float]) -> None:
    means = charts.average_neighbours([(float(i), loss) for i, loss in enumerate(losses)])
    assert len(means) <= 200
    assert min(low for _, low, _, _ in means) == min(losses)
    assert max(high for *_, high in means) == max(losses)
    assert all(low <= mean + 1e-6 and mean <= high + 1e-6 for _, low, mean, high in means)


@pytest.mark.parametrize("title", ["", "Test accuracy"])
def test_labels_are_whole_and_do_not_cover_each_other(title: str) -> None:
    """A label that begins or is centred at the right edge would be cut."""
    points = [(45.0, 0.88), (90.0, 0.9), (135.0, 0.961)]
    drawn = charts.curve_svg(points, title=title, y_label="accuracy", named=[(133, "2bw")], width_px=480, height_px=180)
    boxes = []
    for label in ElementTree.fromstring(drawn).iter(f"{SVG}text"):
        tall = float(label.get("font-size", "11"))
        wide = tall * 0.55 * len(label.text or "")
        left = float(label.get("x", "")) - {"end": wide, "middle": wide / 2}.get(label.get("text-anchor", ""), 0.0)
        boxes.append((left, left + wide, float(label.get("y", "")) - 0.75 * tall, float(label.get("y", ""))))
    for i, (left, right, top, bottom) in enumerate(boxes):
        assert right <= 480
        for a, b, c, d in boxes[:i]:
            assert right <= a or b <= left or bottom <= c or d <= top, (boxes[i], (a, b, c, d))


@given(st.lists(st.tuples(st.floats(0.1, 4.0), st.floats(0.0, 0.5)), min_size=2, max_size=8))
def test_labels_of_methods_are_in_the_order_of_their_dots(points: list[tuple[float, float]]) -> None:
    methods = (MethodFigures(f"method{i}", activations=a, bubble=b, weights=1) for i, (a, b) in enumerate(points))
    tree = ElementTree.fromstring(charts.methods_svg(MethodComparison(4, tuple(methods))))
    dots = {(dot.findtext(f"{SVG}title") or "").split(":")[0]: dot for dot in tree.iter(f"{SVG}circle")}
    labels = {label.text or "": label for label in tree.iter(f"{SVG}text") if label.text in dots}
    assert len(labels) == len(points)
    assert all(label.get("fill") == dots[name].get("fill") for name, label in labels.items())
    rows = [
        (float(label.get("x", "")), float(label.get("y", "")), float(dots[name].get("cy", "")))
        for name, label in labels.items()
    ]
    for (left, height, dot), (other_left, other_height, other_dot) in permutations(rows, 2):
        if abs(left - other_left) < 6.4 * len("method0") - 0.2 and dot <= other_dot:
            assert abs(height - other_height) > 12.8
            assert height < other_height or dot == other_dot


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


@given(times=st.lists(st.tuples(st.floats(0, 100), st.floats(0.1, 20)), max_size=30))
def test_no_two_of_a_row_overlap_and_no_row_is_wasted(times: list[tuple[float, float]]) -> None:
    spans = [Span(0, "send", 0, i, start, start + length) for i, (start, length) in enumerate(sorted(times))]
    rows = lanes.assign_rows(spans)
    for row in set(rows):
        mine = [span for span, where in zip(spans, rows, strict=True) if where == row]
        assert all(b.start_s >= a.end_s for a, b in pairwise(mine))
    alive = [sum(a.start_s <= b.start_s < a.end_s for a in spans) for b in spans]
    assert max(rows, default=-1) + 1 == max(alive, default=0)


def test_windows(simulated: Simulated) -> None:
    """The middle shows whole minibatches; a start may be shorter than asked for."""
    timeline, short = simulated("pipedream", total=100), simulated("pipedream", total=3)
    window = lanes.middle_window(timeline, 12)
    assert (window.first, window.last, window.end_s - window.start_s) == (44, 56, 36.0)
    assert lanes.middle_window(timeline, 51) is None
    window = lanes.middle_window(simulated("gpipe", split=4, total=68), 8)
    assert (window.first, window.last) == (28, 36)  # the middle would be 30
    for run, last in ((timeline, 12), (short, 3)):
        window = lanes.start_window(run, 12)
        assert (window.first, window.last, window.start_s) == (0, last, 0.0)
    assert window.end_s == short.makespan_s
    evaluation = tuple(Span(0, "F", 0, k, 900.0 + k, 901.0 + k) for k in range(20))
    for spans in ((), timeline.spans[40:], (*timeline.spans[40:], *evaluation)):  # of a long run the first are dropped
        assert lanes.start_window(replace(timeline, spans=spans), 12) is None
    evaluated = replace(timeline, spans=(*timeline.spans, *evaluation))
    assert lanes.start_window(evaluated, 12, begin=0) == lanes.start_window(timeline, 12)
    assert lanes.start_window(timeline, 12, begin=1) is None


ON = [("on-op", name) for name in COLOURS if name[0] in "FBIWU"] + [
    (ink, paper) for ink in ("ink", "faint") for paper in ("paper", "lane")
]
BARS = [("ink", "F1"), ("ink", "wait")]


def _compute_luminance(colour: str) -> float:
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def _compute_contrast(ink: str, paper: str) -> float:
    low, high = sorted((_compute_luminance(ink), _compute_luminance(paper)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("screen", [0, 1], ids=["light", "dark"])
def test_letters_lines_and_kinds_are_seen(screen: int) -> None:
    for ink, paper in ON + BARS:
        assert _compute_contrast(COLOURS[ink][screen], COLOURS[paper][screen]) >= 4.5, (ink, paper)
    for pair in (COLOURS["send"], COLOURS["mark"], *LINES.values()):
        assert _compute_contrast(pair[screen], COLOURS["paper"][screen]) >= 3
    assert len({COLOURS[name][screen] for name in COLOURS if name[0] in "FBIW"}) == 8
    assert len({pair[screen] for pair in LINES.values()}) == len(LINES)


def test_all_variables_are_defined() -> None:
    assert set(re.findall(r"var\(--pd-([\w-]+)\)", page_style())) <= set(COLOURS)
