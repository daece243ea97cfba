"""Predicted against measured: every point where its numbers say, inside the frame."""

from xml.etree import ElementTree

from hypothesis import given, strategies as st

from benchmarks.scatter import Pair, scatter_svg

SVG = "{http://www.w3.org/2000/svg}"
NUMBER = st.floats(1e-6, 1e12)


def points(picture: str) -> list[tuple[float, float]]:
    tree = ElementTree.fromstring(picture)
    circles = [circle for circle in tree.iter(f"{SVG}circle") if circle.find(f"{SVG}title") is not None]
    return [(float(circle.get("cx", "")), float(circle.get("cy", ""))) for circle in circles]


@given(st.lists(st.builds(Pair, NUMBER, NUMBER, st.text("ab<&", max_size=3), st.sampled_from("xyz")), min_size=1))
def test_points_lie_in_the_frame_as_their_numbers_do(pairs: list[Pair]) -> None:
    centres = points(scatter_svg(pairs, title="All & each", unit="s", tolerance=0.15))
    assert len(centres) == len(pairs)
    for x, y in centres:
        assert 74 <= x <= 474
        assert 44 <= y <= 444
    for (x, y), pair in zip(centres, pairs, strict=True):
        up = (444 - y) - (x - 74)  # above the line where both agree
        assert abs(up) < 0.25 or (up > 0) == (pair.measured > pair.predicted)
