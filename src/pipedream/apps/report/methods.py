"""The picture of several methods on equal workers as points: bubble over memory."""

from pipedream.apps.report.style import COLOURS, LINES, line_style, ticks
from pipedream.apps.report.svg import frame, line, shape, text, write_points, y_axis
from pipedream.core.method_comparison import MethodComparison
from pipedream.core.units import format_number

_LEFT, _TOP = 74, 70
_WIDTH, _HEIGHT, _RIGHT = 560, 320, 130
_CORNERS: tuple[tuple[tuple[float, float], ...], ...] = (
    (),  # a circle
    ((-3, -3), (3, -3), (3, 3), (-3, 3)),
    ((0, -4.2), (4.2, 0), (0, 4.2), (-4.2, 0)),
    ((0, -4), (3.8, 3), (-3.8, 3)),
)


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
    right, bottom = _LEFT + _WIDTH, _TOP + _HEIGHT
    heading, stroke = f"Bubble over memory, {comparison.workers} workers with equal stages", COLOURS["line"][0]
    parts = [f"<style>{line_style()}</style>", text(16, 24, heading, size=14, weight=600)]
    parts.append(text(8, _TOP - 12, "bubble", colour="faint"))

    def up(bubble: float) -> float:
        return bottom - bubble / highest * _HEIGHT

    parts += y_axis(ticks(0.0, highest, 6), up, _LEFT, right, lambda mark: f"{100 * mark:.3g}%")
    for mark in ticks(0.0, most, 8):
        x = _LEFT + mark / most * _WIDTH
        parts.append(line("tick", x, x, _TOP, bottom + 4, stroke))
        parts.append(text(x, bottom + 17, format_number(mark), colour="faint", anchor="middle"))
    under = "activations of the fullest worker, in units of the first stage's under 1F1B"
    parts.append(text(_LEFT + _WIDTH / 2, bottom + 36, under, colour="faint", anchor="middle"))
    labels: list[tuple[float, float, float]] = []  # left, right, height
    for activations, bubble, weights, name, number in points:
        x, y = _LEFT + activations / most * _WIDTH, up(bubble)
        label = name if weights == 1 else f"{name} (weights x{weights:.3g})"
        label_px, height = 6.4 * len(label), y + 4
        left = x + 8 if x + 8 + label_px < right + _RIGHT else x - 8 - label_px
        while any(left < end and begin < left + label_px and abs(at - height) < 13 for begin, end, at in labels):
            height += 13
        labels.append((left, left + label_px, height))
        tooltip = f"{name}: bubble {bubble:.1%}, activations {activations:.3g}, weights {weights:.3g}"
        parts.append(_draw_mark(x, y, number, tooltip))
        parts.append(text(left, height, label))
    return frame("".join(parts), right + _RIGHT, max(bottom + 48, *(at + 12 for *_, at in labels)), heading, True)


def _draw_mark(x: float, y: float, number: int, tooltip: str) -> str:
    colour, corners = list(LINES)[number % len(LINES)], _CORNERS[(1 + number) % len(_CORNERS)]
    look = {"title": tooltip, "fill": LINES[colour][0]}
    if not corners:
        return shape("circle", colour, cx=x, cy=y, r=3.2, **look)
    return shape("polygon", colour, points=write_points((x + a, y + b) for a, b in corners), **look)
