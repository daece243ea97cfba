"""The page of a comparison: every run is in the pictures and in the table, for any figures."""

import re
from xml.etree import ElementTree

from hypothesis import given, strategies as st

from pipedream.apps.compare.variants import DDP, ONE_WORKER, RecipeComparison, Variant
from pipedream.apps.compare.variants_page import comparison_page, comparison_svg
from tests.apps.report.conftest import SVG

NAMES = (ONE_WORKER, DDP, "1f1b", "PipeDream <full>", "x & y")
RATES = st.none() | st.floats(1e-3, 1e7)


@st.composite
def comparisons(draw: st.DrawFn) -> RecipeComparison:
    links = draw(
        st.lists(st.sampled_from([(1.25e7, 0.0), (5e7, 0.0), (5e7, 0.05)]), min_size=1, max_size=3, unique=True)
    )
    names = draw(st.lists(st.sampled_from(NAMES), min_size=1, unique=True))
    losses = st.lists(st.floats(allow_nan=True), max_size=3).map(lambda values: tuple(enumerate(values, 1)))
    variants = (
        Variant(name, rate, "", "", draw(RATES), draw(RATES), losses=draw(losses), latency_s=latency_s)
        for rate, latency_s in links
        for name in names
    )
    return RecipeComparison("net", 2, tuple(variants), delayed=draw(st.booleans()))


@given(comparisons())
def test_every_run_is_in_the_picture_and_on_the_page(comparison: RecipeComparison) -> None:
    picture = ElementTree.fromstring(comparison_svg(comparison))
    words = "\n".join(element.text or "" for element in picture.iter(f"{SVG}text"))
    assert all(variant.name in words for variant in comparison.variants) or "was recorded" in words
    page = comparison_page(comparison)
    assert page.count("<table>") == 1
    assert page.count("<tr>") == 1 + len(comparison.variants)
    assert "<script" not in page
    assert "PipeDream <full>" not in page
    for drawn in map(ElementTree.fromstring, re.findall(r"<svg.*?</svg>", page, re.DOTALL)):
        names = [text for text in drawn.iter("text") if (text.text or "").endswith(NAMES)]
        assert all(float(text.get("x", "")) < 100 for text in names), "on narrow screens, too"
    links = len(comparison.links)
    assert page.count(": training loss</text>") == links
    assert page.count("<svg") == links + (links > 1), "losses over each link, and one picture of the speed-ups"


def test_the_picture_shows_speed_up_over_one_worker() -> None:
    variants = (
        Variant(name, link, samples_per_s=rate)
        for link, row in {5e8: (20, 40, 30), 5e7: (20, 10, 36)}.items()
        for name, rate in zip((ONE_WORKER, DDP, "pipedream"), row, strict=True)
    )
    picture = ElementTree.fromstring(comparison_svg(RecipeComparison("net", 2, tuple(variants))))
    words = [element.text for element in picture.iter(f"{SVG}text")]
    assert [word for word in words if word and "bit/s" in word] == ["4 Gbit/s", "400 Mbit/s"]
    assert [word for word in words if word and word[0] in "01" and "x " in word] == [
        "1.8x pipedream", f"1x {ONE_WORKER}", f"0.5x {DDP}"
    ]  # fmt: skip
    ours, one_worker, ddp = (
        [float(point.split(",")[1]) for point in line.get("points", "").split()]
        for line in picture.iter(f"{SVG}polyline")
    )
    assert ddp[0] < ours[0] < one_worker[0] == one_worker[1], "over the fast link, upwards; one worker is the base line"
    assert ours[1] < one_worker[1] < ddp[1], "over the slow one"
