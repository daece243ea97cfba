"""Pictures of sweeps: throughput, bubble and memory over the bandwidth, with a column for each number of workers.

With a single bandwidth, the axis is the number of workers. A vertical line shows where a method overtakes data
parallelism. Methods on equal workers are points: bubble over memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from html import escape

from pipedream.core.sweep import DATA_PARALLEL, Crossover, MethodComparison, Point, Sweep
from pipedream.core.units import format_bytes, format_number, format_rate
from pipedream.report.html_tables import NOTHING, document, percent, scroll, section, table
from pipedream.report.style import COLOURS, LINES, length, line_style, log_ticks, ticks
from pipedream.report.svg import frame, line, polyline, text, y_axis

_LEFT, _GAP, _WIDTH, _HEIGHT, _TOP, _FOOT = 74, 44, 290, 150, 70, 44
_POINTS_WIDTH, _POINTS_HEIGHT, _POINTS_RIGHT = 560, 320, 130
_SHAPES = ("circle", "square", "diamond", "triangle")

Scale = Callable[[float], float]


def sweep_svg(sweep: Sweep, *, standalone: bool = True) -> str:
    """Returns the picture of a sweep of at least one point; `standalone` is False inside an HTML page."""
    over_workers = len({point.bandwidth_bytes_per_s for point in sweep.points}) == 1
    names = list(dict.fromkeys(point.schedule for point in sweep.points))
    groups = [0] if over_workers else list(dict.fromkeys(point.workers for point in sweep.points))
    heading = f"{sweep.model} by method"
    rows: list[tuple[str, Callable[[Point], float | None], Callable[[float], str], bool]] = [
        ("samples/s", lambda point: point.samples_per_s, format_number, False),
        ("bubble", lambda point: point.bubble, lambda share: f"{100 * share:.0f}%", True),
        ("peak of a worker", lambda point: point.peak_bytes or None, _format_size, False),
    ]
    parts = [f"<style>{line_style()}</style>", text(16, 24, heading, size=14, weight=600)]
    for column, workers in enumerate(groups):
        shown = [point for point in sweep.points if over_workers or point.workers == workers]
        left = _LEFT + column * (_WIDTH + _GAP)
        head = (
            f"by workers, at {_format_rate(shown[0].bandwidth_bytes_per_s)}" if over_workers else f"{workers} workers"
        )
        parts.append(text(left, _TOP - 16, head, size=12, weight=600))
        place, named = _scale_across(shown, over_workers, left)
        for row, (label, value, write, is_share) in enumerate(rows):
            top = _TOP + row * (_HEIGHT + _FOOT)
            all_values = [v for point in sweep.points if (v := value(point)) is not None]
            up, marks = _scale_up(all_values, is_share, top)
            parts += y_axis(marks, up, left, left + _WIDTH, None if column else write)
            for mark, name in named:
                x, y = place(mark), top + _HEIGHT
                parts.append(line("tick", x, x, y, y + 4, COLOURS["line"][0]))
                parts.append(text(x, y + 16, name, colour="faint", anchor="middle"))
            if not column:
                parts.append(text(8, top - 10, label, colour="faint"))
            if row == 0 and not over_workers:
                shown_crossovers = [crossover for crossover in sweep.crossovers if crossover.workers == workers]
                parts += _draw_crossings(shown_crossovers, names, place, [mark for mark, _ in named], top)
            for number, name in enumerate(names):
                points = [
                    (place(_read_place(point, over_workers)), up(v), f"{name}, {point.config}: {write(v)}")
                    for point in shown
                    if point.schedule == name and (v := value(point)) is not None
                ]
                parts += _draw_line(points, number)
    bottom = _TOP + len(rows) * (_HEIGHT + _FOOT)
    width = max(_LEFT + len(groups) * (_WIDTH + _GAP), 420)
    legend, end = _draw_legend(names, bottom + 6, width)
    parts += legend
    return frame("".join(parts), width, end + 14, heading, standalone)


def sweep_page(sweep: Sweep) -> str:
    """Returns a page with the picture, the crossovers and the table of a sweep."""
    heads = ("method", "workers", "bandwidth", "plan", "microbatches", "samples/s", "bubble", "peak")
    rows = [
        (
            escape(point.schedule),
            str(point.workers),
            format_rate(point.bandwidth_bytes_per_s),
            escape(point.config) or escape(point.why.split(";")[0]),
            str(point.microbatches) if point.config else NOTHING,
            format_number(point.samples_per_s),
            percent(point.bubble),
            format_bytes(point.peak_bytes) if point.peak_bytes else NOTHING,
        )
        for point in sweep.points
    ]
    heading = f"{sweep.model} by method"
    crossed = "".join(f"<li>{escape(str(crossover))}</li>" for crossover in sweep.crossovers)
    picture = scroll("Picture", sweep_svg(sweep, standalone=False))
    crossovers = section("Crossovers", f"<ul>{crossed}</ul>" if crossed else "")
    points = section("Points", table("Points", heads, rows, words=1, show_caption=False))
    return document(heading, "", f"<section>{picture}</section>\n{crossovers}{points}")


def methods_svg(comparison: MethodComparison) -> str:
    """Returns the picture of methods as points: bubble over the activations of the fullest worker.

    Labels name the weights of the fullest worker if they are not those of one stage.
    """
    points = sorted(
        (method.activations, method.bubble, method.weights or 0.0, method.schedule, number)
        for number, method in enumerate(comparison.methods)
        if method.activations is not None and method.bubble is not None
    )
    most = max((activations for activations, *_ in points), default=1.0) * 1.15 or 1.0
    highest = max((bubble for _, bubble, *_ in points), default=1.0) * 1.15 or 1.0
    right, bottom = _LEFT + _POINTS_WIDTH, _TOP + _POINTS_HEIGHT
    heading, stroke = f"Bubble over memory, {comparison.workers} workers with equal stages", COLOURS["line"][0]
    parts = [f"<style>{line_style()}</style>", text(16, 24, heading, size=14, weight=600)]
    parts.append(text(8, _TOP - 12, "bubble", colour="faint"))

    def up(bubble: float) -> float:
        return bottom - bubble / highest * _POINTS_HEIGHT

    parts += y_axis(ticks(0.0, highest, 6), up, _LEFT, right, lambda mark: f"{100 * mark:.3g}%")
    for mark in ticks(0.0, most, 8):
        x = _LEFT + mark / most * _POINTS_WIDTH
        parts.append(line("tick", x, x, _TOP, bottom + 4, stroke))
        parts.append(text(x, bottom + 17, format_number(mark), colour="faint", anchor="middle"))
    under = "activations of the fullest worker, in units of the first stage's under 1F1B"
    parts.append(text(_LEFT + _POINTS_WIDTH / 2, bottom + 36, under, colour="faint", anchor="middle"))
    labels: list[tuple[float, float, float]] = []  # left, right, height
    for activations, bubble, weights, name, number in points:
        x, y = _LEFT + activations / most * _POINTS_WIDTH, up(bubble)
        label = name if weights == 1 else f"{name} (weights x{weights:.3g})"
        label_px, height = 6.4 * len(label), y + 4
        left = x + 8 if x + 8 + label_px < right + _POINTS_RIGHT else x - 8 - label_px
        while any(left < end and begin < left + label_px and abs(at - height) < 13 for begin, end, at in labels):
            height += 13
        labels.append((left, left + label_px, height))
        tooltip = f"{name}: bubble {bubble:.1%}, activations {activations:.3g}, weights {weights:.3g}"
        parts.append(f"<g>{_draw_mark(x, y, 1 + number)}<title>{escape(tooltip)}</title></g>")
        parts.append(text(left, height, label))
    return frame(
        "".join(parts), right + _POINTS_RIGHT, max(bottom + 48, *(at + 12 for *_, at in labels)), heading, True
    )


def _read_place(point: Point, over_workers: bool) -> float:
    return float(point.workers) if over_workers else point.bandwidth_bytes_per_s


def _scale_across(points: Sequence[Point], over_workers: bool, left: float) -> tuple[Scale, list[tuple[float, str]]]:
    places = sorted({_read_place(point, over_workers) for point in points})
    low, high = (places[0] / 1.3, places[-1] * 1.3) if places[0] < places[-1] else (places[0] / 2, places[0] * 2)
    marks = places if len(places) <= 4 else list(log_ticks(low, high))
    write = format_number if over_workers else _format_rate
    return (
        lambda value: left + _WIDTH * math.log(value / low) / math.log(high / low),
        [(mark, write(mark)) for mark in marks],
    )


def _scale_up(values: Sequence[float], is_share: bool, top: float) -> tuple[Scale, list[float]]:
    """Linear from 0, or logarithmic if values differ tenfold."""
    finite = [value for value in values if math.isfinite(value)]
    high = 1.0 if is_share else max(finite, default=1.0) * 1.05 or 1.0
    low = min((value for value in finite if value > 0), default=high)
    if is_share or high / low < 10:
        return lambda value: top + _HEIGHT * (1 - value / high), list(ticks(0.0, high, 4))
    low /= 1.2
    return lambda value: top + _HEIGHT * (1 - math.log(max(value, low) / low) / math.log(high / low)), list(
        log_ticks(low, high)
    )


def _draw_line(points: Sequence[tuple[float, float, str]], number: int) -> list[str]:
    colour, dashes = _choose_colour(number)
    parts = []
    if len(points) > 1:
        path = ((x, y) for x, y, _ in points)
        parts.append(polyline(f"series of-{colour}", path, _find_colour(colour), 1.8, dashes))
    parts += [f"<g>{_draw_mark(x, y, number)}<title>{escape(tooltip)}</title></g>" for x, y, tooltip in points]
    return parts


def _choose_colour(number: int) -> tuple[str, str]:
    if number == 0:
        return "faint", ' stroke-dasharray="5 4"'
    return list(LINES)[(number - 1) % len(LINES)], ""


def _find_colour(name: str) -> str:
    return {**COLOURS, **LINES}[name][0]


def _draw_mark(x: float, y: float, number: int) -> str:
    colour, _ = _choose_colour(number)
    shape = _SHAPES[number % len(_SHAPES)]
    look = f'class="{colour}" fill="{_find_colour(colour)}"'
    if shape == "circle":
        return f'<circle {look} cx="{length(x)}" cy="{length(y)}" r="3.2"/>'
    corners = {
        "square": ((-3, -3), (3, -3), (3, 3), (-3, 3)),
        "diamond": ((0, -4.2), (4.2, 0), (0, 4.2), (-4.2, 0)),
        "triangle": ((0, -4), (3.8, 3), (-3.8, 3)),
    }[shape]
    return f'<polygon {look} points="{" ".join(f"{length(x + a)},{length(y + b)}" for a, b in corners)}"/>'


def _draw_crossings(
    crossovers: Sequence[Crossover], names: Sequence[str], place: Scale, marks: Sequence[float], top: float
) -> list[str]:
    parts, edges = [], (place(marks[0]) - 20, place(marks[-1]) + 20)
    for crossover in crossovers:
        rate = crossover.bandwidth_bytes_per_s
        if rate is None or not edges[0] <= place(rate) <= edges[1]:
            continue
        colour, _ = _choose_colour(names.index(crossover.schedule))
        ends, look = (place(rate), place(rate), top, top + _HEIGHT), ' stroke-width="1.2" stroke-dasharray="1 3"'
        parts.append(line(f"of-{colour}", *ends, _find_colour(colour), look, title=str(crossover)))
    return parts


def _draw_legend(names: Sequence[str], y: float, width: float) -> tuple[list[str], float]:
    parts, x = [], float(_LEFT)
    for number, name in enumerate(names):
        needs = 40 + 6.4 * len(name)
        if x + needs > width and x > _LEFT:
            x, y = float(_LEFT), y + 18
        colour, dashes = _choose_colour(number)
        look = f' stroke-width="1.8"{dashes}'
        parts.append(line(f"of-{colour}", x, x + 22, y, y, _find_colour(colour), look))
        parts.append(_draw_mark(x + 11, y, number))
        parts.append(text(x + 28, y + 4, name if name != DATA_PARALLEL else "data parallelism", colour="faint"))
        x += needs + 10
    return parts, y


def _format_size(value: float) -> str:
    """Formats bytes without trailing zeros: 250 MB."""
    number, unit = format_bytes(value).split()
    return f"{format_number(float(number))} {unit}"


def _format_rate(value: float) -> str:
    return f"{_format_size(value)}/s"
