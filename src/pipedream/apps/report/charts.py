"""SVG charts: a curve, such as the loss of a run, the columns of a profile, and methods as points."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence

from pipedream.apps.report.method_comparison import MethodComparison
from pipedream.apps.report.style import COLOURS, LINES, line_style, ticks, time_unit
from pipedream.apps.report.svg import frame, line, polyline, rect, shape, text, write_points, y_axis
from pipedream.core.model.profile import Profile
from pipedream.core.units import format_number, format_seconds

_LEFT, _RIGHT, _BOTTOM = 56, 16, 40
_MAX_POINTS, _MAX_POINTS_OF_SEVERAL = 200, 50
_NAMES = 250  # pixels beside several curves
_HALF_LABEL = 24  # pixels
_POINTS_LEFT, _POINTS_TOP, _POINTS_RIGHT, _POINTS_WIDTH, _POINTS_HEIGHT = 74, 70, 130, 560, 320
_COLUMNS_LEFT, _COLUMNS_TOP, _COLUMNS_FOOT, _COLUMNS_WIDTH, _COLUMNS_HEIGHT = 64, 34, 34, 720, 150


def curve_svg(
    points: Iterable[tuple[float, float]] | Mapping[str, Iterable[tuple[float, float]]],
    *,
    title: str = "",
    width_px: float = 640,
    height_px: float = 240,
    x_label: str = "minibatch",
    y_label: str = "loss",
    marks: Iterable[float] = (),
    named: Iterable[tuple[float, str]] = (),
    failures: Iterable[tuple[float, str]] = (),
    x_ticks: Mapping[float, str] | None = None,
    standalone: bool = True,
) -> str:
    """Returns the picture of a curve. Many points become a line of means, in a band from minimum to maximum.

    Args:
        points: those that are not finite are only counted below the picture. Several curves by their names are lines
            of means, with the names beside them; inside a page above them, where narrow screens show them.
        marks: dashed vertical lines.
        named: labelled vertical lines.
        failures: vertical lines with a cross, each with a tooltip.
        x_ticks: labels of the horizontal axis; by default round numbers.
        standalone: False inside an HTML page.
    """
    several = isinstance(points, Mapping)
    curves = {name: list(curve) for name, curve in (points.items() if isinstance(points, Mapping) else [("", points)])}
    finite = {
        name: sorted(point for point in curve if all(map(math.isfinite, point))) for name, curve in curves.items()
    }
    groups = {name: average_neighbours(curve, _MAX_POINTS_OF_SEVERAL) for name, curve in finite.items()}
    means = {name: [(x, mean) for x, _, mean, _ in curve] for name, curve in groups.items()}
    shown = sorted(point for curve in (means if several else finite).values() for point in curve)
    names_px = 18 * len(curves) if several and not standalone else 0
    top, height_px = (46.0 if title else 20.0) + names_px, height_px + names_px
    right, bottom = width_px - (_NAMES if several and standalone else _RIGHT), height_px - _BOTTOM
    parts = [text(_LEFT, 21, title, size=14, weight=600)] if title else []
    if shown:
        left_x, right_x = shown[0][0], shown[-1][0] if shown[-1][0] > shown[0][0] else shown[0][0] + 1
        low = min(y for _, y in shown)
        high = max(y for _, y in shown)
        if low > 0 and low < high / 2:
            low = 0.0
        high = high if high > low else low + (abs(low) or 1.0)

        def at(x: float, y: float) -> tuple[float, float]:
            return (
                _LEFT + (x - left_x) / (right_x - left_x) * (right - _LEFT),
                bottom - (y - low) / (high - low) * (bottom - top),
            )

        parts += y_axis(ticks(low, high, 5), lambda tick: at(left_x, tick)[1], _LEFT, right, format_number)
        round_ticks = ticks(left_x, right_x, max(2, int(width_px / 100)))
        for tick, word in (x_ticks or {tick: format_number(tick) for tick in round_ticks}).items():
            x = at(tick, low)[0]
            anchor = "end" if x > right - _HALF_LABEL else "middle"
            parts.append(text(x, bottom + 15, word, colour="faint", anchor=anchor))

        def place(marks: Iterable[tuple[float, str]]) -> list[tuple[float, str]]:
            return [(at(mark, low)[0], words) for mark, words in marks if left_x <= mark <= right_x]

        faint = COLOURS["faint"][0]
        parts += [
            line("drain", x, x, top, bottom, faint, stroke_dasharray="3 4") for x, _ in place((m, "") for m in marks)
        ]
        for x, word in place(named):
            side = ("end", -4) if x > right - 7 * len(word) else ("start", 4)
            label = text(x + side[1], top + 11, word, colour="faint", anchor=side[0])
            parts += [line("phase", x, x, top, bottom, faint), label]
        for x, words in place(failures):
            for ends in ((x, x, top, bottom), (x - 4, x + 4, top - 4, top + 4), (x - 4, x + 4, top + 4, top - 4)):
                parts.append(line("failure", *ends, COLOURS["send"][0], title=words))
        if several:
            parts += _draw_curves(means, at, *((_LEFT, top - names_px - 9) if names_px else (right + 12, top)))
        else:
            parts += _draw_means(average_neighbours(shown), at, len(shown))
    else:
        parts.append(
            text(width_px / 2, (top + bottom) / 2, f"no {y_label} was recorded", colour="faint", anchor="middle")
        )
    missing = sum(len(curve) - len(finite[name]) for name, curve in curves.items())
    note = f"{x_label} ({missing} not finite left out)" if missing else x_label
    parts.append(text((_LEFT + right) / 2, height_px - 8, note, colour="faint", anchor="middle"))
    parts.append(text(8, top - 9, y_label, colour="faint"))
    return frame("".join(parts), width_px, height_px, title or f"{y_label} over {x_label}", standalone)


def average_neighbours(
    points: Sequence[tuple[float, float]], most: int = _MAX_POINTS
) -> list[tuple[float, float, float, float]]:
    """Returns at most so many of (x, minimum, mean, maximum), each of one point or of several neighbours."""
    together = -(-len(points) // most)
    means = []
    for i in range(0, len(points), together or 1):
        group = points[i : i + together]
        values = [y for _, y in group]
        means.append((sum(x for x, _ in group) / len(group), min(values), sum(values) / len(values), max(values)))
    return means


def _draw_curves(
    curves: Mapping[str, Sequence[tuple[float, float]]],
    at: Callable[[float, float], tuple[float, float]],
    left: float,
    top: float,
) -> list[str]:
    """Draws lines, thinner once the colours are used again, and their names from (left, top) downwards."""
    parts = [f"<style>{line_style()}</style>"]
    for number, (name, points) in enumerate(curves.items()):
        colour, width, y = list(LINES)[number % len(LINES)], 2.0 if number < len(LINES) else 1.0, top + 18 * number
        parts.append(polyline(f"of-{colour}", (at(x, height) for x, height in points), LINES[colour][0], width))
        parts.append(line(f"of-{colour}", left, left + 20, y, y, LINES[colour][0], stroke_width=str(width)))
        parts.append(text(left + 26, y + 4, name))
    return parts


def _draw_means(
    means: list[tuple[float, float, float, float]], at: Callable[[float, float], tuple[float, float]], count: int
) -> list[str]:
    parts = []
    if count > len(means):
        over = [at(x, most) for x, _, _, most in means]
        under = [at(x, least) for x, least, _, _ in reversed(means)]
        parts.append(shape("polygon", "band", points=write_points(over + under), fill=COLOURS["F1"][0]))
    if len(means) == 1:
        x, y = at(means[0][0], means[0][2])
        parts.append(shape("circle", "mark", cx=x, cy=y, r=3, fill=COLOURS["mark"][0]))
    else:
        parts.append(polyline("curve", (at(x, mean) for x, _, mean, _ in means), COLOURS["mark"][0], 2))
    return parts


def profile_svg(profile: Profile) -> str:
    """Returns the picture of the seconds of each layer, for one minibatch."""
    rows = zip(profile.graph.layers, profile.layers, strict=True)
    passes = [(layer.name, cost.forward_s, cost.backward_s) for layer, cost in rows]
    most_s = max(forward_s + backward_s for _, forward_s, backward_s in passes) or 1.0
    unit, size = time_unit(most_s)
    column_px, bottom = (_COLUMNS_WIDTH - _COLUMNS_LEFT - _RIGHT) / len(passes), _COLUMNS_TOP + _COLUMNS_HEIGHT
    parts = [text(_COLUMNS_LEFT, 21, f"{profile.model}: seconds of each layer", size=14, weight=600)]
    parts += y_axis(
        ticks(0.0, most_s / size, 5),
        lambda tick: bottom - tick * size / most_s * _COLUMNS_HEIGHT,
        _COLUMNS_LEFT,
        _COLUMNS_WIDTH - _RIGHT,
        lambda tick: f"{format_number(tick)} {unit}",
    )
    for i, (name, *seconds) in enumerate(passes):
        y: float = bottom
        for colour, word, pass_s in zip(("F0", "B0"), ("forward", "backward"), seconds, strict=True):
            bar_px = pass_s / most_s * _COLUMNS_HEIGHT
            y -= bar_px
            tooltip = f"{name}: {word} {format_seconds(pass_s)}"
            x, width = _COLUMNS_LEFT + i * column_px, max(column_px - 1, 0.5)
            parts.append(rect(colour, x, y, width, bar_px, fill=COLOURS[colour][0], title=tooltip))
    words = f"{len(passes)} layers, from {passes[0][0]} to {passes[-1][0]}; forward blue, backward green"
    parts.append(text(_COLUMNS_LEFT, bottom + 20, words, colour="faint"))
    return frame("".join(parts), _COLUMNS_WIDTH, bottom + _COLUMNS_FOOT, f"Profile of {profile.model}", standalone=True)


def methods_svg(comparison: MethodComparison) -> str:
    """Returns the picture of methods as points: bubble over the activations of the fullest worker.

    Labels name the weights of the fullest worker if they are not those of one stage.
    """
    points = sorted(
        (-method.bubble, method.activations, method.weights or 0.0, method.schedule, number)
        for number, method in enumerate(comparison.methods)
        if method.activations is not None and method.bubble is not None
    )
    most = max((activations for _, activations, *_ in points), default=1.0) * 1.15 or 1.0
    highest = -min((minus_bubble for minus_bubble, *_ in points), default=-1.0) * 1.15 or 1.0
    right, bottom = _POINTS_LEFT + _POINTS_WIDTH, _POINTS_TOP + _POINTS_HEIGHT
    heading, stroke = f"Bubble over memory, {comparison.workers} workers with equal stages", COLOURS["line"][0]
    parts = [f"<style>{line_style()}</style>", text(16, 24, heading, size=14, weight=600)]
    parts.append(text(8, _POINTS_TOP - 12, "bubble", colour="faint"))

    def up(bubble: float) -> float:
        return bottom - bubble / highest * _POINTS_HEIGHT

    parts += y_axis(ticks(0.0, highest, 6), up, _POINTS_LEFT, right, lambda mark: f"{100 * mark:.3g}%")
    for mark in ticks(0.0, most, 8):
        x = _POINTS_LEFT + mark / most * _POINTS_WIDTH
        parts.append(line("tick", x, x, _POINTS_TOP, bottom + 4, stroke))
        parts.append(text(x, bottom + 17, format_number(mark), colour="faint", anchor="middle"))
    under = "activations of the fullest worker, in units of the first stage's under 1F1B"
    parts.append(text(_POINTS_LEFT + _POINTS_WIDTH / 2, bottom + 36, under, colour="faint", anchor="middle"))
    labels: list[tuple[float, float, float]] = []  # left, right, height
    for minus_bubble, activations, weights, name, number in points:
        x, y = _POINTS_LEFT + activations / most * _POINTS_WIDTH, up(-minus_bubble)
        label = name if weights == 1 else f"{name} (weights x{weights:.3g})"
        label_px = 6.4 * len(label)
        left = x + 8 if x + 8 + label_px < right + _POINTS_RIGHT else x - 8 - label_px
        # Below those of the dots above.
        height = max([y + 4, *(at + 13 for begin, end, at in labels if left < end and begin < left + label_px)])
        labels.append((left, left + label_px, height))
        tooltip = f"{name}: bubble {-minus_bubble:.1%}, activations {activations:.3g}, weights {weights:.3g}"
        colour = list(LINES)[number % len(LINES)]
        parts.append(shape("circle", colour, title=tooltip, cx=x, cy=y, r=3.5, fill=LINES[colour][0]))
        parts.append(text(left, height, label, colour=colour))
    return frame(
        "".join(parts), right + _POINTS_RIGHT, max(bottom + 48, *(at + 12 for *_, at in labels)), heading, True
    )
