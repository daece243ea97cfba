"""The page of a comparison: every variant is in the picture and in the tables, for any figures."""

from __future__ import annotations

from itertools import pairwise
from xml.etree import ElementTree

from hypothesis import given, strategies as st

from pipedream.core.variants import ONE_WORKER, TORCH, OverLink, RecipeComparison, Variant
from pipedream.report.variants import variants_page, variants_svg
from tests.report.conftest import SVG

NAMES = (ONE_WORKER, *TORCH, "1F1B", "PipeDream <full>", "2BW", "x & y")
RATES = st.none() | st.floats(1e-3, 1e7)


@st.composite
def comparisons(draw: st.DrawFn) -> RecipeComparison:
    links = draw(st.lists(st.sampled_from([1.25e7, 5e7, 1.25e9]), min_size=1, max_size=3, unique=True))
    names = draw(st.lists(st.sampled_from(NAMES), min_size=1, unique=True))
    over_links = tuple(
        OverLink(
            (rate,),
            tuple(Variant(name, 2, samples_per_s=draw(RATES), predicted_per_s=draw(RATES)) for name in names),
        )
        for rate in links
    )
    return RecipeComparison("net", 2, ("accuracy", 0.9), over_links)


@given(comparisons())
def test_every_variant_is_in_the_picture(comparison: RecipeComparison) -> None:
    picture = ElementTree.fromstring(variants_svg(comparison))
    words = [element.text for element in picture.iter(f"{SVG}text")]
    variants = comparison.links[0].variants
    assert {variant.name for variant in variants} <= set(words)
    measured = {
        (link.link, variant.name) for link in comparison.links for variant in link.variants if variant.samples_per_s
    }
    stories = [element.text or "" for element in picture.iter(f"{SVG}title")]
    assert len(measured) == sum(" samples/s measured" in story and ": - samples/s" not in story for story in stories)
    wide, high = float(picture.get("width", "0")), float(picture.get("height", "0"))
    for shape in picture.iter(f"{SVG}circle"):
        assert 0 <= float(shape.get("cx", "-1")) <= wide
        assert 0 <= float(shape.get("cy", "-1")) <= high


@given(comparisons())
def test_page_has_verdict_and_tables(comparison: RecipeComparison) -> None:
    page = variants_page(comparison)
    assert page.count("<table>") == len(comparison.links)
    assert "<script" not in page
    assert "PipeDream <full>" not in page
    assert comparison.verdict.replace("<", "&lt;").replace(">", "&gt;").replace(" & ", " &amp; ") in page


def over(bytes_per_s: float, **rates: float) -> OverLink:
    names = {"alone": "one worker", "ddp": "DDP", "ours": "PipeDream"}
    rows = (Variant(names[name], 2, samples_per_s=rate, predicted_per_s=rate) for name, rate in rates.items())
    return OverLink((bytes_per_s,), tuple(rows))


def words(*links: OverLink) -> list[str | None]:
    picture = ElementTree.fromstring(variants_svg(RecipeComparison("net", 2, None, links)))
    return [element.text for element in picture.iter(f"{SVG}text")]


def test_picture_shows_speed_up_over_one_worker() -> None:
    slow, fast = over(5e7, alone=20, ddp=10, ours=36), over(5e8, alone=20, ddp=40, ours=38)
    for links in ((slow, fast), (fast, slow)):
        texts = words(*links)
        assert texts[0] == "net, 2 workers: speed-up over one worker"
        assert [texts[texts.index(name) - 1] for name in ("one worker", "DDP", "PipeDream")] == [
            "1.0x",
            "0.50x",
            "1.8x",
        ]
        assert [word for word in texts if word and "bit/s" in word] == ["4 Gbit/s", "400 Mbit/s"]
    picture = ElementTree.fromstring(variants_svg(RecipeComparison("net", 2, None, (slow, fast))))
    weights = {element.text: element.get("font-weight") for element in picture.iter(f"{SVG}text")}
    assert (weights["one worker"], weights["DDP"]) == ("600", None)
    base = next(line for line in picture.iter(f"{SVG}polyline") if line.get("class") == "of-faint")
    assert base.get("stroke-width") == "3"
    assert len({point.split(",")[1] for point in base.get("points", "").split()}) == 1, "it is the base line"


def test_picture_without_one_worker_shows_speed_up_over_ddp() -> None:
    texts = words(over(5e7, ddp=10, ours=36), over(5e8, ddp=40, ours=38))
    assert texts[0] == "net, 2 workers: speed-up over DDP"
    assert [texts[texts.index(name) - 1] for name in ("DDP", "PipeDream")] == ["1.0x", "3.6x"]


def test_picture_without_ddp_shows_samples_per_second() -> None:
    texts = words(over(5e7, ours=36), over(5e8, ours=38))
    assert texts[0] == "net, 2 workers: samples per second"
    assert texts[texts.index("PipeDream") - 1] == "36"


def test_predicted_is_dashed_over_one_link() -> None:
    assert variants_svg(RecipeComparison("net", 2, None, (over(5e7, ddp=10),))).count("stroke-dasharray") == 1


def test_names_are_apart() -> None:
    picture = ElementTree.fromstring(variants_svg(RecipeComparison("net", 2, None, (
        over(5e7, alone=20, ddp=20, ours=20), over(5e8, alone=20, ddp=20, ours=20)))))  # fmt: skip
    named = [element for element in picture.iter(f"{SVG}text") if element.text in ("one worker", "DDP", "PipeDream")]
    heights = sorted(float(element.get("y", "0")) for element in named)
    assert [second - first >= 16 for first, second in pairwise(heights)] == [True, True]
