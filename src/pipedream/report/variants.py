"""A comparison as a picture and as one page: the verdict, the picture, a table for each link."""

from __future__ import annotations

import math
from html import escape

from pipedream.core.units import format_number
from pipedream.core.variants import DDP, ONE_WORKER, OverLink, RecipeComparison, Variant, format_link, format_ratio
from pipedream.report.html_tables import document, scroll, section, table
from pipedream.report.style import COLOURS, LINES, length, line_style, log_ticks
from pipedream.report.svg import frame, line, polyline, rect, text, y_axis

_LEFT, _TOP, _WIDTH, _HEIGHT, _FOOT, _LABELS, _SPACE = 56, 72, 560, 320, 52, 224, 18
_NAME, _BAR, _ROW, _BARS_TOP = 190, 480, 26, 56

_TORCH = (DDP, "torch ")
"""Prefixes of the names of what torch itself offers, which has thin lines."""

Points = list[tuple[float, float, str]]


def variants_svg(comparison: RecipeComparison, *, standalone: bool = True) -> str:
    """Returns the speed-up over one worker against the rate of the outermost links, one line a variant.

    One worker is the base line, in bold. Without its figures the speed-up is that over DDP, and without these the
    picture shows samples per second. Over one link each variant has a bar of its samples per second,
    with a dashed line at the predicted ones.

    Args:
        standalone: False inside an HTML page.
    """
    if len(comparison.links) == 1:
        return _draw_bars(
            comparison.links[0], f"{comparison.recipe}, {comparison.workers_text}: samples per second", standalone
        )
    links = sorted(comparison.links, key=lambda link: link.bytes_per_s[-1], reverse=True)
    rates = [link.bytes_per_s[-1] for link in links]
    measured = [(link, variant) for link in links for variant in link.variants if variant.samples_per_s]
    bases = (name for name in (ONE_WORKER, DDP) if all(link.compare_with(name, variant) for link, variant in measured))
    base = next(bases, "")
    meaning = f"speed-up over {base}" if base else "samples per second"
    title = f"{comparison.recipe}, {comparison.workers_text}: {meaning}"
    lines: dict[str, Points] = {}
    for link in links:
        for variant in link.variants:
            value = link.compare_with(base, variant) if base else variant.samples_per_s
            points = lines.setdefault(variant.name, [])
            if value:
                points.append((link.bytes_per_s[-1], value, _describe_figures(variant)))
    values = [value for points in lines.values() for _, value, _ in points] or [1.0]
    low, high = min(values) / 1.2, max(values) * 1.2
    right, bottom, grid = _LEFT + _WIDTH, _TOP + _HEIGHT, COLOURS["line"][0]

    def across(rate: float) -> float:  # slow links on the right, where the lines are far apart
        return right - 8 - (_WIDTH - 32) * math.log(rate / rates[-1]) / math.log(rates[0] / rates[-1])

    def up(value: float) -> float:
        return bottom - _HEIGHT * math.log(value / low) / math.log(high / low)

    def words(value: float) -> str:
        return f"{format_ratio(value)}x" if base else format_number(value)

    parts = [f"<style>{line_style()}</style>", text(16, 30, title, size=17, weight=600)]
    alone = "one worker alone, without a network" if base == ONE_WORKER else "DDP over the same link"
    note = f"samples per second over those of {alone}; both axes logarithmic"
    parts.append(text(16, 50, note if base else "both axes logarithmic", colour="faint", size=12))
    times = "x" if base else ""
    parts += y_axis(log_ticks(low, high), up, _LEFT, right, lambda mark: format_number(mark) + times, size=12)
    for rate in rates:
        parts.append(line("tick", across(rate), across(rate), _TOP, bottom + 4, grid))
        parts.append(text(across(rate), bottom + 20, format_link(rate), size=12, anchor="middle"))
    parts.append(text(_LEFT + _WIDTH / 2, bottom + 40, "link rate", colour="faint", size=12, anchor="middle"))
    # Methods of this library first: they have the first colours, and thick lines.
    names = sorted(lines, key=lambda name: (name == ONE_WORKER, name.startswith(_TORCH)))
    ends: dict[str, float] = {}
    for number, name in enumerate(names):
        drawn = [(across(rate), up(value), tooltip) for rate, value, tooltip in lines[name]]
        parts += [_draw_line(drawn, number, name), *_draw_dots(drawn, number, name)]
        ends[name] = drawn[-1][1] if drawn else bottom
    places = _spread_labels(ends, bottom)
    for number, name in enumerate(names):
        height, value = places[name], lines[name][-1][1] if lines[name] else None
        parts += [_draw_line([(right, ends[name], ""), (right + 12, height, "")], number, name)] if value else []
        parts.append(text(right + 60, height + 4, words(value) if value else "-", size=13, weight=600, anchor="end"))
        parts.append(text(right + 66, height + 4, name, size=13, weight=400 if name.startswith(_TORCH) else 600))
    return frame("".join(parts), right + _LABELS, bottom + _FOOT, title, standalone)


def variants_page(comparison: RecipeComparison) -> str:
    """Returns the page: verdict, picture, tables, and why figures are missing."""
    heading = f"{comparison.recipe} on {comparison.workers_text}"
    tables = "".join(
        section(
            f"Over {link.link}",
            table(
                f"Over {link.link}",
                comparison.heads,
                [[escape(cell) for cell in comparison.row(link, variant)] for variant in link.variants],
                words=2,
                show_caption=False,
            ),
        )
        for link in comparison.links
    )
    reasons = "".join(f"<li>{escape(reason)}</li>" for reason in comparison.reasons())
    picture = scroll("Picture", variants_svg(comparison, standalone=False))
    notes = section("Notes", f"<ul>{reasons}</ul>" if reasons else "")
    return document(heading, comparison.verdict, f"<section>{picture}</section>\n{tables}{notes}")


def _draw_bars(link: OverLink, title: str, standalone: bool) -> str:
    most = max(
        (v for variant in link.variants for v in (variant.samples_per_s, variant.predicted_per_s) if v), default=1.0
    )
    parts = [f"<style>{line_style()}</style>", text(16, 24, title, size=14, weight=600)]
    parts.append(text(_NAME, _BARS_TOP - 12, f"over {link.link}; predicted dashed", colour="faint"))
    colour = next(iter(LINES))
    for number, variant in enumerate(link.variants):
        top = _BARS_TOP + _ROW * number
        weight = 600 if variant.name == ONE_WORKER else 400
        parts.append(text(_NAME - 10, top + 13, variant.name, weight=weight, anchor="end"))
        bar_px = _BAR * (variant.samples_per_s or 0.0) / most
        parts.append(
            rect(colour, _NAME, top, bar_px, _ROW - 8, fill=LINES[colour][0], title=_describe_figures(variant))
        )
        if variant.predicted_per_s:
            x = _NAME + _BAR * variant.predicted_per_s / most
            look = ' stroke-width="1.6" stroke-dasharray="3 2"'
            parts.append(line("of-faint", x, x, top - 3, top + _ROW - 5, COLOURS["faint"][0], look))
        words = "did not run" if variant.samples_per_s is None else format_number(variant.samples_per_s)
        parts.append(text(_NAME + _BAR + 12, top + 13, words, colour="faint"))
    return frame("".join(parts), _NAME + _BAR + 100, _BARS_TOP + _ROW * len(link.variants) + 8, title, standalone)


def _describe_figures(variant: Variant) -> str:
    figures = [format_number(value) if value else "-" for value in (variant.samples_per_s, variant.predicted_per_s)]
    return f"{variant.name}: {figures[0]} samples/s measured, {figures[1]} predicted"


def _spread_labels(ends: dict[str, float], bottom: float) -> dict[str, float]:
    """Returns the heights of labels, which are as near to the lines' ends as room allows."""
    names = sorted(ends, key=lambda name: ends[name])
    places: list[float] = []
    for name in names:
        places.append(max(ends[name], places[-1] + _SPACE if places else _TOP))
    for number, height in enumerate(reversed(places)):
        places[-1 - number] = max(min(height, bottom - _SPACE * number), _TOP)
    return dict(zip(names, places, strict=True))


def _choose_colour(number: int, name: str) -> tuple[str, str]:
    if name == ONE_WORKER:
        return "faint", COLOURS["faint"][0]
    colour = list(LINES)[number % len(LINES)]
    return colour, LINES[colour][0]


def _draw_line(points: Points, number: int, name: str) -> str:
    if len(points) < 2:
        return ""
    (colour, light), thick = _choose_colour(number, name), 1.6 if name.startswith(_TORCH) else 3
    return polyline(f"of-{colour}", ((x, y) for x, y, _ in points), light, thick)


def _draw_dots(points: Points, number: int, name: str) -> list[str]:
    """Circles; squares once the colours are used again."""
    colour, light = _choose_colour(number, name)
    shapes = []
    for x, y, tooltip in points:
        if number < len(LINES):
            shape, tag = f'cx="{length(x)}" cy="{length(y)}" r="4"', "circle"
        else:
            shape, tag = f'x="{length(x - 4)}" y="{length(y - 4)}" width="8" height="8"', "rect"
        shapes.append(f'<{tag} class="{colour}" fill="{light}" {shape}><title>{escape(tooltip)}</title></{tag}>')
    return shapes
