"""Small multiples: arms of one kind beside each other, a column a number of stages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pipedream.apps.report.style import LINES, length, line_style, ticks
from pipedream.apps.report.svg import frame, polyline, text, y_axis
from pipedream.core.units import format_number

WIDTH, HEIGHT, LEFT, TOP, GAP, LEGEND = 250, 150, 56, 76, 44, 150


Lines = Mapping[str, Sequence[tuple[float, float, float, float]]]
"""Name of an arm -> (x, least of the seeds, median, most) of each point."""


def panels_svg(
    rows: Sequence[Mapping[str, Lines]], *, title: str, x_label: str, y_label: str, low: float, high: float
) -> str:
    """Returns a picture of rows of panels, all of one height in y; what lies outside is drawn at the border.

    Args:
        rows: title of a panel -> its lines.
    """
    columns = max(len(row) for row in rows)
    width = LEFT + columns * (WIDTH + GAP) + LEGEND
    total = TOP + len(rows) * (HEIGHT + GAP)
    parts = [f"<style>{line_style()}</style>", text(16, 24, title, size=14, weight=600)]
    parts.append(
        text(
            16,
            42,
            f"{y_label} against {x_label}; a line is the median of the seeds, its band all of them",
            colour="faint",
        )
    )
    for number, row in enumerate(rows):
        y = TOP + number * (HEIGHT + GAP)
        names = list(dict.fromkeys(name for lines in row.values() for name in lines))
        for column, (heading, lines) in enumerate(row.items()):
            left = LEFT + column * (WIDTH + GAP)
            parts.append(text(left, y - 6, heading, colour="faint"))
            parts += _draw_panel(lines, names, left, y, low, high)
        for i, name in enumerate(names):
            colour = list(LINES)[i % len(LINES)]
            x = LEFT + columns * (WIDTH + GAP) - 20
            ends = (x, y + 20 + 16 * i), (x + 18, y + 20 + 16 * i)
            parts.append(polyline(f"series of-{colour}", ends, LINES[colour][0], 1.6))
            parts.append(text(x + 24, y + 24 + 16 * i, name))
    return frame("".join(parts), width, total, title, standalone=True)


def _draw_panel(lines: Lines, names: Sequence[str], left: float, top: float, low: float, high: float) -> list[str]:
    bottom, right = top + HEIGHT, left + WIDTH
    last = max((points[-1][0] for points in lines.values()), default=1.0)

    def at(x: float, y: float) -> tuple[float, float]:
        inside = min(max(y, low), high)
        return left + x / last * WIDTH, bottom - (inside - low) / (high - low) * HEIGHT

    parts = y_axis(ticks(low, high, 5), lambda tick: at(0, tick)[1], left, right, format_number)
    for tick in ticks(0, last, 4):
        parts.append(text(at(tick, low)[0], bottom + 14, format_number(tick), colour="faint", anchor="middle"))
    for name, points in lines.items():
        colour = list(LINES)[names.index(name) % len(LINES)]
        over = [at(x, most) for x, _, _, most in points]
        under = [at(x, least) for x, least, _, _ in reversed(points)]
        if over != under[::-1]:
            ring = " ".join(f"{length(x)},{length(y)}" for x, y in over + under)
            parts.append(f'<polygon class="{colour}" points="{ring}" fill="{LINES[colour][0]}" fill-opacity="0.15"/>')
        medians = [at(x, median) for x, _, median, _ in points]
        parts.append(polyline(f"series of-{colour}", medians, LINES[colour][0], 1.6, title=name))
    return parts
