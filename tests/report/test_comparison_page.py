"""The page of a comparison: every variant is in the picture and in the tables, for any figures."""

from __future__ import annotations

from xml.etree import ElementTree

from hypothesis import given
from hypothesis import strategies as st

from pipedream.core.comparison import OverLink, RecipeComparison, Variant
from pipedream.report.comparison import comparison_page, comparison_svg

SVG = "{http://www.w3.org/2000/svg}"
NAMES = ("one worker", "DDP", "DDP, accumulating", "torch Schedule1F1B", "1F1B", "PipeDream <full>", "2BW", "x & y")
RATES = st.none() | st.floats(1e-3, 1e7)


@st.composite
def comparisons(draw: st.DrawFn) -> RecipeComparison:
    links = draw(st.lists(st.sampled_from([1.25e7, 5e7, 1.25e9]), min_size=1, max_size=3, unique=True))
    names = draw(st.lists(st.sampled_from(NAMES), min_size=1, unique=True))
    found = tuple(
        OverLink(
            (rate,),
            tuple(Variant(name, 2, samples_per_s=draw(RATES), predicted_per_s=draw(RATES)) for name in names),
        )
        for rate in links
    )
    return RecipeComparison("net", 2, ("accuracy", 0.9), found)


@given(comparisons())
def test_every_variant_is_in_the_picture(found: RecipeComparison) -> None:
    picture = ElementTree.fromstring(comparison_svg(found))
    words = [one.text for one in picture.iter(f"{SVG}text")]
    variants = found.links[0].variants
    assert {one.name for one in variants} <= set(words)
    measured = {(link.link, one.name) for link in found.links for one in link.variants if one.samples_per_s}
    stories = [one.text or "" for one in picture.iter(f"{SVG}title")]
    assert len(measured) == sum(" samples/s measured" in story and ": - samples/s" not in story for story in stories)
    wide, high = float(picture.get("width", "0")), float(picture.get("height", "0"))
    for shape in picture.iter(f"{SVG}circle"):
        assert 0 <= float(shape.get("cx", "-1")) <= wide
        assert 0 <= float(shape.get("cy", "-1")) <= high


@given(comparisons())
def test_page_has_verdict_and_tables(found: RecipeComparison) -> None:
    page = comparison_page(found)
    assert page.count("<table>") == len(found.links)
    assert "<script" not in page
    assert "PipeDream <full>" not in page
    assert found.verdict.replace("<", "&lt;").replace(">", "&gt;").replace(" & ", " &amp; ") in page


def test_predicted_is_dashed() -> None:
    rows = (Variant("DDP", 2, samples_per_s=10.0, predicted_per_s=11.0),)
    two = RecipeComparison("net", 2, None, (OverLink((5e7,), rows), OverLink((1e8,), rows)))
    assert comparison_svg(two).count("stroke-dasharray") == 1
    assert comparison_svg(RecipeComparison("net", 2, None, two.links[:1])).count("stroke-dasharray") == 1
