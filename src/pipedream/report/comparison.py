"""A comparison as a picture and as one page: the verdict, the picture, a table for each link."""

from __future__ import annotations

import math
from html import escape

from pipedream.core.comparison import ONE_WORKER, TORCH, OverLink, RecipeComparison, Variant, format_link, format_ratio
from pipedream.report.axis import figure, length, log_ticks
from pipedream.report.html_tables import table
from pipedream.report.style import COLOURS, LINES, line_style, page_style
from pipedream.report.svg import frame, text

_LEFT, _TOP, _WIDTH, _HEIGHT, _FOOT, _LABELS, _SPACE = 56, 72, 560, 320, 52, 224, 18
_NAME, _BAR, _ROW, _BARS_TOP = 190, 480, 26, 56

_PLAIN = (ONE_WORKER, *TORCH)
"""What is drawn with thin lines."""

Points = list[tuple[float, float, str]]


def comparison_svg(found: RecipeComparison, *, standalone: bool = True) -> str:
    """Returns the speed-up over DDP against the rate of the outermost links, one line a variant.

    Without DDP's figures it shows samples per second. Over one link each variant has a bar of its samples per second,
    with a dashed line at the predicted ones.

    Args:
        standalone: False inside an HTML page.
    """
    if len(found.links) == 1:
        return _bars(found.links[0], f"{found.recipe}, {found.workers_text}: samples per second", standalone)
    links = sorted(found.links, key=lambda link: link.bytes_per_s[-1], reverse=True)
    rates = [link.bytes_per_s[-1] for link in links]
    is_ratio = all(link.of_ddp(one) for link in links for one in link.variants if one.samples_per_s)
    title = f"{found.recipe}, {found.workers_text}: {'speed-up over DDP' if is_ratio else 'samples per second'}"
    lines: dict[str, Points] = {}
    for link in links:
        for one in link.variants:
            value = link.of_ddp(one) if is_ratio else one.samples_per_s
            points = lines.setdefault(one.name, [])
            if value:
                points.append((link.bytes_per_s[-1], value, _story(one)))
    values = [value for points in lines.values() for _, value, _ in points] or [1.0]
    low, high = min(values) / 1.2, max(values) * 1.2
    right, bottom = _LEFT + _WIDTH, _TOP + _HEIGHT

    def across(rate: float) -> float:  # slow links on the right, where the lines are far apart
        return right - 8 - (_WIDTH - 32) * math.log(rate / rates[-1]) / math.log(rates[0] / rates[-1])

    def up(value: float) -> float:
        return bottom - _HEIGHT * math.log(value / low) / math.log(high / low)

    def words(value: float) -> str:
        return f"{format_ratio(value)}x" if is_ratio else figure(value)

    parts = [f"<style>{line_style()}</style>", text(16, 30, title, size=17, weight=600)]
    note = "samples per second over those of DDP over the same link; both axes logarithmic"
    parts.append(text(16, 50, note if is_ratio else "both axes logarithmic", colour="faint", size=12))
    for mark in log_ticks(low, high):
        parts.append(_grid(_LEFT, up(mark), right, up(mark)))
        label = figure(mark) + ("x" if is_ratio else "")
        parts.append(text(_LEFT - 8, up(mark) + 4, label, colour="faint", size=12, anchor="end"))
    for rate in rates:
        parts.append(_grid(across(rate), _TOP, across(rate), bottom + 4))
        parts.append(text(across(rate), bottom + 20, format_link(rate), size=12, anchor="middle"))
    parts.append(text(_LEFT + _WIDTH / 2, bottom + 40, "link rate", colour="faint", size=12, anchor="middle"))
    # Methods of this library first: they have the first colours, and thick lines.
    names = sorted(lines, key=lambda name: (name == ONE_WORKER, name in TORCH))
    ends: dict[str, float] = {}
    for number, name in enumerate(names):
        drawn = [(across(rate), up(value), story) for rate, value, story in lines[name]]
        parts += [_line(drawn, number, name), *_dots(drawn, number, name)]
        ends[name] = drawn[-1][1] if drawn else bottom
    places = _apart(ends, bottom)
    for number, name in enumerate(names):
        height, value = places[name], lines[name][-1][1] if lines[name] else None
        parts += [_line([(right, ends[name], ""), (right + 12, height, "")], number, name)] if value else []
        parts.append(text(right + 60, height + 4, words(value) if value else "-", size=13, weight=600, anchor="end"))
        parts.append(text(right + 66, height + 4, name, size=13, weight=400 if name in _PLAIN else 600))
    return frame("".join(parts), right + _LABELS, bottom + _FOOT, title, standalone)


def comparison_page(found: RecipeComparison) -> str:
    """Returns the page: verdict, picture, tables, and why figures are missing."""
    heading = f"{found.recipe} on {found.workers_text}"
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
    parts.append(text(_NAME, _BARS_TOP - 12, f"over {link.link}; predicted dashed", colour="faint"))
    colour = next(iter(LINES))
    for number, one in enumerate(link.variants):
        top = _BARS_TOP + _ROW * number
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
    return frame("".join(parts), _NAME + _BAR + 100, _BARS_TOP + _ROW * len(link.variants) + 8, title, standalone)


def _story(one: Variant) -> str:
    figures = [figure(value) if value else "-" for value in (one.samples_per_s, one.predicted_per_s)]
    return f"{one.name}: {figures[0]} samples/s measured, {figures[1]} predicted"


def _apart(ends: dict[str, float], bottom: float) -> dict[str, float]:
    """Returns the heights of labels, which are as near to the lines' ends as room allows."""
    names = sorted(ends, key=lambda name: ends[name])
    places: list[float] = []
    for name in names:
        places.append(max(ends[name], places[-1] + _SPACE if places else _TOP))
    for number, height in enumerate(reversed(places)):
        places[-1 - number] = max(min(height, bottom - _SPACE * number), _TOP)
    return dict(zip(names, places, strict=True))


def _grid(x1: float, y1: float, x2: float, y2: float) -> str:
    return (
        f'<line class="tick" x1="{length(x1)}" x2="{length(x2)}" y1="{length(y1)}" y2="{length(y2)}" '
        f'stroke="{COLOURS["line"][0]}"/>'
    )


def _look(number: int, name: str) -> tuple[str, str]:
    """Returns a line's class and its light colour."""
    if name == ONE_WORKER:
        return "faint", COLOURS["faint"][0]
    colour = list(LINES)[number % len(LINES)]
    return colour, LINES[colour][0]


def _line(points: Points, number: int, name: str) -> str:
    if len(points) < 2:
        return ""
    (colour, light), thick = _look(number, name), 1.6 if name in _PLAIN else 3
    path = " ".join(f"{length(x)},{length(y)}" for x, y, _ in points)
    dashes = ' stroke-dasharray="6 4"' if name == ONE_WORKER else ""
    return (
        f'<polyline class="of-{colour}" points="{path}" fill="none" stroke="{light}" stroke-width="{thick}" '
        f'stroke-linejoin="round"{dashes}/>'
    )


def _dots(points: Points, number: int, name: str) -> list[str]:
    """Circles; squares once the colours are used again."""
    colour, light = _look(number, name)
    found = []
    for x, y, story in points:
        if number < len(LINES):
            shape, tag = f'cx="{length(x)}" cy="{length(y)}" r="4"', "circle"
        else:
            shape, tag = f'x="{length(x - 4)}" y="{length(y - 4)}" width="8" height="8"', "rect"
        found.append(f'<{tag} class="{colour}" fill="{light}" {shape}><title>{escape(story)}</title></{tag}>')
    return found
