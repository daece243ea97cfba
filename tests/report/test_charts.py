"""The loss curve: all of it inside its frame, and honest about what it leaves out."""

from __future__ import annotations

import math
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipedream.report.charts import average_neighbours, curve_svg

SVG = "{http://www.w3.org/2000/svg}"
LOSSES = st.lists(st.floats(allow_nan=True, allow_infinity=True, width=32), max_size=500)


@given(losses=LOSSES)
def test_any_losses_give_a_picture_in_its_frame(losses: list[float]) -> None:
    tree = ElementTree.fromstring(curve_svg(enumerate(losses), marks=[3, 10**9]))
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
    means = average_neighbours([(float(i), loss) for i, loss in enumerate(losses)])
    assert len(means) <= 200
    assert min(low for _, low, _, _ in means) == min(losses)
    assert max(high for *_, high in means) == max(losses)
    assert all(low <= mean + 1e-6 and mean <= high + 1e-6 for _, low, mean, high in means)


def test_falling_losses_fall_in_the_picture() -> None:
    tree = ElementTree.fromstring(curve_svg((i, 1 / (1 + i)) for i in range(50)))
    (line,) = tree.iter(f"{SVG}polyline")
    heights = [float(point.split(",")[1]) for point in (line.get("points") or "").split()]
    assert heights == sorted(heights)
    assert heights[-1] - heights[0] == pytest.approx(240 - 40 - 20, abs=5)


@pytest.mark.parametrize("title", ["", "Test accuracy"])
def test_labels_do_not_cover_each_other(title: str) -> None:
    points = [(45.0, 0.88), (90.0, 0.9), (135.0, 0.961)]
    drawn = curve_svg(points, title=title, y_label="accuracy", width_px=480, height_px=180)
    boxes = []
    for label in ElementTree.fromstring(drawn).iter(f"{SVG}text"):
        tall = float(label.get("font-size", "11"))
        wide = tall * 0.55 * len(label.text or "")
        left = float(label.get("x", "")) - {"end": wide, "middle": wide / 2}.get(label.get("text-anchor", ""), 0.0)
        boxes.append((left, left + wide, float(label.get("y", "")) - 0.75 * tall, float(label.get("y", ""))))
    for i, (left, right, top, bottom) in enumerate(boxes):
        for a, b, c, d in boxes[:i]:
            assert right <= a or b <= left or bottom <= c or d <= top, (boxes[i], (a, b, c, d))


def test_labels_at_the_right_edge_are_whole() -> None:
    """A label that begins or is centred there would be cut."""
    drawn = curve_svg([(x, 1.0) for x in range(0, 10_001, 100)], named=[(9_900, "pipedream_2bw")], width_px=400)
    for label in ElementTree.fromstring(drawn).iter("{http://www.w3.org/2000/svg}text"):
        wide = 6 * len(label.text or "")
        right = {"end": 0.0, "middle": wide / 2, "start": wide}[label.get("text-anchor", "start")]
        assert float(label.get("x", "")) + right <= 400, label.text
