"""Words can be read on what is behind them, on light and on dark screens (WCAG 2.2, contrast 4.5 to 1)."""

from __future__ import annotations

import pytest

from pipedream.report.style import COLOURS, LINES, page_style

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
@pytest.mark.parametrize(("ink", "paper"), ON + BARS)
def test_contrast(ink: str, paper: str, screen: int) -> None:
    assert _compute_contrast(COLOURS[ink][screen], COLOURS[paper][screen]) >= 4.5


@pytest.mark.parametrize("screen", [0, 1], ids=["light", "dark"])
def test_lines_and_kinds_are_seen(screen: int) -> None:
    for pair in (COLOURS["send"], COLOURS["mark"], *LINES.values()):
        assert _compute_contrast(pair[screen], COLOURS["paper"][screen]) >= 3
    assert len({COLOURS[name][screen] for name in COLOURS if name[0] in "FBIW"}) == 8
    assert len({pair[screen] for pair in LINES.values()}) == len(LINES)


def test_all_variables_are_defined() -> None:
    import re

    style = page_style()
    assert set(re.findall(r"var\(--pd-([\w-]+)\)", style)) <= set(COLOURS)
