"""A comparison as one page: the verdict, samples per second over the links' rates, a table for each link."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from html import escape

from pipedream.core.comparison import OverLink, RecipeComparison, Variant, link_text
from pipedream.report.axis import figure, length, log_ticks, ticks
from pipedream.report.html_tables import table
from pipedream.report.style import COLOURS, LINES, line_style, page_style
from pipedream.report.svg import frame, text

__all__ = ["comparison_page", "comparison_svg"]

_LEFT, _TOP, _WIDTH, _HEIGHT, _FOOT, _LEGEND = 74, 56, 520, 300, 36, 240
_NAME, _BAR, _ROW = 190, 480, 26

Points = list[tuple[float, float, str]]


def comparison_svg(found: RecipeComparison, *, standalone: bool = True) -> str:
    """Returns samples per second over the rate of the outermost links, one line a variant, predicted dashed.

    Over one link each variant has a bar, with a dashed line at the predicted rate.

    Args:
        standalone: False inside an HTML page.
    """
    title = f"{found.recipe}, {found.workers} workers: samples per second"
    if len(found.links) == 1:
        return _bars(found.links[0], title, standalone)
    links = sorted((link for link in found.links if link.bytes_per_s), key=lambda link: link.bytes_per_s[-1])
    rates = [link.bytes_per_s[-1] for link in links]
    low, high = (rates[0] / 1.3, rates[-1] * 1.3) if rates[0] < rates[-1] else (rates[0] / 2, rates[0] * 2)
    rows = [one for link in links for one in link.variants]
    up, marks = _scale([value for one in rows for value in (one.samples_per_s, one.predicted_per_s) if value])
    bottom = _TOP + _HEIGHT

    def across(rate: float) -> float:
        return _LEFT + _WIDTH * math.log(rate / low) / math.log(high / low)

    parts = [f"<style>{line_style()}</style>", text(16, 24, title, size=14, weight=600)]
    parts.append(text(_LEFT, _TOP - 12, "samples/s; predicted dashed", colour="faint"))
    for mark in marks:
        parts.append(_grid(_LEFT, up(mark), _LEFT + _WIDTH, up(mark)))
        parts.append(text(_LEFT - 8, up(mark) + 4, figure(mark), colour="faint", anchor="end"))
    for rate in rates:
        parts.append(_grid(across(rate), bottom, across(rate), bottom + 4))
        parts.append(text(across(rate), bottom + 18, link_text(rate), colour="faint", anchor="middle"))
    for number, name in enumerate(dict.fromkeys(one.name for one in rows)):
        own = [
            (across(r), one) for link, r in zip(links, rates, strict=True) for one in link.variants if one.name == name
        ]
        measured = [(x, up(one.samples_per_s), _story(one)) for x, one in own if one.samples_per_s]
        predicted = [(x, up(one.predicted_per_s), _story(one)) for x, one in own if one.predicted_per_s]
        parts += [
            _line(predicted, number, ' stroke-dasharray="5 4"'),
            _line(measured, number),
            *_dots(measured, number),
        ]
        place = (float(_LEFT + _WIDTH + 16), _TOP + 18.0 * number, "")
        parts += [
            _line([place, (place[0] + 22, place[1], "")], number),
            *_dots([(place[0] + 11, place[1], name)], number),
        ]
        parts.append(text(place[0] + 28, place[1] + 4, name))
    return frame("".join(parts), _LEFT + _WIDTH + _LEGEND, bottom + _FOOT, title, standalone)


def comparison_page(found: RecipeComparison) -> str:
    """Returns the page: verdict, picture, tables, and why figures are missing."""
    heading = f"{found.recipe} on {found.workers} workers"
    tables = "".join(
        f"<section><h2>Over {escape(link.link)}</h2>"
        + table(
            f"Over {link.link}",
            found.heads,
            [[escape(cell) for cell in found.row(link, one)] for one in link.variants],
            words=2,
            show_caption=False,
        )
        + "</section>\n"
        for link in found.links
    )
    reasons = "".join(f"<li>{escape(reason)}</li>" for reason in found.reasons())
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n<link rel="icon" href="data:,">\n'
        f"<title>{escape(heading)}</title>\n<style>{page_style()}</style>\n</head>\n<body>\n"
        f"<header><h1>{escape(heading)}</h1><p>{escape(found.verdict)}</p></header>\n<main>\n"
        f'<section><div class="scroll" tabindex="0" role="region" aria-label="Picture">'
        f"{comparison_svg(found, standalone=False)}</div></section>\n{tables}"
        + (f"<section><h2>Notes</h2><ul>{reasons}</ul></section>\n" if reasons else "")
        + "</main>\n</body>\n</html>\n"
    )


def _bars(link: OverLink, title: str, standalone: bool) -> str:
    most = max((v for one in link.variants for v in (one.samples_per_s, one.predicted_per_s) if v), default=1.0)
    parts = [f"<style>{line_style()}</style>", text(16, 24, title, size=14, weight=600)]
    parts.append(text(_NAME, _TOP - 12, f"over {link.link}; predicted dashed", colour="faint"))
    colour = next(iter(LINES))
    for number, one in enumerate(link.variants):
        top = _TOP + _ROW * number
        parts.append(text(_NAME - 10, top + 13, one.name, anchor="end"))
        wide = _BAR * (one.samples_per_s or 0.0) / most
        parts.append(
            f'<rect class="{colour}" x="{_NAME}" y="{length(top)}" width="{length(wide)}" height="{_ROW - 8}" '
            f'fill="{LINES[colour][0]}"><title>{escape(_story(one))}</title></rect>'
        )
        if one.predicted_per_s:
            x = _NAME + _BAR * one.predicted_per_s / most
            parts.append(
                f'<line class="of-faint" x1="{length(x)}" x2="{length(x)}" y1="{length(top - 3)}" '
                f'y2="{length(top + _ROW - 5)}" stroke="{COLOURS["faint"][0]}" stroke-width="1.6" '
                'stroke-dasharray="3 2"/>'
            )
        words = "did not run" if one.samples_per_s is None else figure(one.samples_per_s)
        parts.append(text(_NAME + _BAR + 12, top + 13, words, colour="faint"))
    return frame("".join(parts), _NAME + _BAR + 100, _TOP + _ROW * len(link.variants) + 8, title, standalone)


def _story(one: Variant) -> str:
    figures = [figure(value) if value else "-" for value in (one.samples_per_s, one.predicted_per_s)]
    return f"{one.name}: {figures[0]} samples/s measured, {figures[1]} predicted"


def _scale(values: Sequence[float]) -> tuple[Callable[[float], float], Sequence[float]]:
    """Linear from 0, or logarithmic if values differ tenfold; with its ticks."""
    most, least = max(values, default=1.0) * 1.05, min(values, default=1.0) / 1.2
    if most < 10 * least:
        return lambda value: _TOP + _HEIGHT * (1 - value / most), ticks(0.0, most, 6)
    return lambda value: _TOP + _HEIGHT * (1 - math.log(value / least) / math.log(most / least)), log_ticks(least, most)


def _grid(x1: float, y1: float, x2: float, y2: float) -> str:
    return (
        f'<line class="tick" x1="{length(x1)}" x2="{length(x2)}" y1="{length(y1)}" y2="{length(y2)}" '
        f'stroke="{COLOURS["line"][0]}"/>'
    )


def _line(points: Points, number: int, dashes: str = "") -> str:
    if len(points) < 2:
        return ""
    colour = list(LINES)[number % len(LINES)]
    path = " ".join(f"{length(x)},{length(y)}" for x, y, _ in points)
    return (
        f'<polyline class="series of-{colour}" points="{path}" fill="none" stroke="{LINES[colour][0]}" '
        f'stroke-width="{"1.2" if dashes else "1.8"}" stroke-linejoin="round"{dashes}/>'
    )


def _dots(points: Points, number: int) -> list[str]:
    """Circles; squares once the colours are used again."""
    colour = list(LINES)[number % len(LINES)]
    look = f'class="{colour}" fill="{LINES[colour][0]}"'
    found = []
    for x, y, story in points:
        if number < len(LINES):
            shape = f'<circle {look} cx="{length(x)}" cy="{length(y)}" r="3.4">'
        else:
            shape = f'<rect {look} x="{length(x - 3.4)}" y="{length(y - 3.4)}" width="6.8" height="6.8">'
        found.append(f"{shape}<title>{escape(story)}</title></{'circle' if number < len(LINES) else 'rect'}>")
    return found
