"""SVG pictures of predicted against measured numbers, on logarithmic axes with a line of equality."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from math import ceil, floor, log10

from pipedream.apps.report.style import COLOURS, LINES, length, line_style
from pipedream.apps.report.svg import frame, line, text
from pipedream.core.units import format_number

_SIDE, _LEFT, _TOP, _FOOT, _RIGHT = 400, 74, 44, 46, 20


def log_ticks(low: float, high: float) -> list[float]:
    """Returns the powers of ten between low and high, both above 0; also 2 and 5 times them if there are few."""
    powers = [10.0**power for power in range(floor(log10(low)), ceil(log10(high)) + 1)]
    steps = (1, 2, 5) if high / low < 100 else (1,)
    candidates = (size * power for power in powers for size in steps)
    return [value for value in candidates if low * (1 - 1e-9) <= value <= high * (1 + 1e-9)]


@dataclass(frozen=True)
class Pair:
    """One case, both numbers above 0.

    Attributes:
        label: of the tooltip.
        series: cases of one series have the same colour.
        filled: False draws a ring.
    """

    predicted: float
    measured: float
    label: str = ""
    series: str = ""
    filled: bool = True


def scatter_svg(
    pairs: Sequence[Pair],
    *,
    title: str,
    unit: str,
    tolerance: float = 0.0,
    write: Callable[[float], str] = format_number,
) -> str:
    """Returns the picture of at least one pair.

    Args:
        tolerance: dashed lines where the measured is by this share above or below the predicted.
        write: formats a tick.

    Raises:
        ValueError: no pair, or a number that is not positive.
    """
    numbers = [number for pair in pairs for number in (pair.predicted, pair.measured)]
    if not numbers or min(numbers) <= 0:
        raise ValueError(f"predicted and measured numbers must be positive, found {min(numbers, default=None)}")
    low, high = log10(min(numbers)) - 0.06, log10(max(numbers)) + 0.06

    def along(number: float) -> float:
        return (log10(number) - low) / (high - low) * _SIDE

    def at(predicted: float, measured: float) -> tuple[float, float]:
        return _LEFT + along(predicted), _TOP + _SIDE - along(measured)

    series = list(dict.fromkeys(pair.series for pair in pairs))
    parts = [f"<style>{line_style()}</style>", text(16, 24, title, size=14, weight=600)]
    right, bottom, stroke, look = _LEFT + _SIDE, _TOP + _SIDE, COLOURS["faint"][0], {"stroke_width": "0.8"}
    parts.append(line("of-faint", _LEFT, _LEFT, _TOP, bottom, stroke, **look))
    parts.append(line("of-faint", _LEFT, right, bottom, bottom, stroke, **look))
    for tick in log_ticks(10**low, 10**high):
        x, y = at(tick, tick)
        parts.append(text(x, _TOP + _SIDE + 16, write(tick), colour="faint", anchor="middle"))
        parts.append(text(_LEFT - 6, y + 4, write(tick), colour="faint", anchor="end"))
    parts.append(text(_LEFT + _SIDE / 2, _TOP + _SIDE + 36, f"predicted {unit}", colour="faint", anchor="middle"))
    parts.append(text(_LEFT + 8, _TOP + 14, f"measured {unit}", colour="faint"))
    for share in (1.0, 1 + tolerance, 1 - tolerance) if tolerance else (1.0,):
        ends = max(low, low - log10(share)), min(high, high - log10(share))
        xs, ys = zip(*(at(10**power, 10**power * share) for power in ends), strict=True)
        parts.append(line("of-faint", *xs, *ys, stroke, **look, stroke_dasharray="5 4" if share != 1 else ""))
    for pair in pairs:
        colour = list(LINES)[series.index(pair.series) % len(LINES)]
        x, y = at(pair.predicted, pair.measured)
        fill = LINES[colour][0] if pair.filled else "none"
        tooltip = f"{pair.label}: {write(pair.predicted)} predicted, {write(pair.measured)} measured".removeprefix(": ")
        parts.append(
            f'<circle class="{colour if pair.filled else "series"} of-{colour}" cx="{length(x)}" cy="{length(y)}" '
            f'r="4" fill="{fill}" stroke="{LINES[colour][0]}"><title>{escape(tooltip)}</title></circle>'
        )
    for number, name in enumerate(series if any(series) else ()):
        colour, y = list(LINES)[number % len(LINES)], _TOP + _SIDE - 12 - 16 * (len(series) - 1 - number)
        parts.append(
            f'<circle class="{colour}" cx="{_LEFT + _SIDE - 110}" cy="{y - 4}" r="4" fill="{LINES[colour][0]}"/>'
        )
        parts.append(text(_LEFT + _SIDE - 100, y, name))
    return frame("".join(parts), _LEFT + _SIDE + _RIGHT, _TOP + _SIDE + _FOOT, title, standalone=True)
