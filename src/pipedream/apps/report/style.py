"""Colours of pictures and pages, light and dark, for SVG, HTML and the terminal; round ticks and short numbers.

Forwards are blue and backwards green, as in PipeDream's figures.
"""

import math
from collections.abc import Callable
from importlib.resources import files

FONT = "ui-sans-serif,system-ui,-apple-system,'Segoe UI',Roboto,'Helvetica Neue',Arial,sans-serif"
MONO = "ui-monospace,SFMono-Regular,Menlo,Consolas,'DejaVu Sans Mono',monospace"

COLOURS: dict[str, tuple[str, str]] = {
    "paper": ("#ffffff", "#14171c"),
    "ink": ("#1b2027", "#e8ebf0"),
    "faint": ("#59626f", "#9aa5b4"),
    "line": ("#d9dee6", "#323944"),
    "lane": ("#f4f6f9", "#1c2128"),
    "wait": ("#e9ecf1", "#262c35"),
    "send": ("#b3560d", "#f0a35e"),
    "mark": ("#1f5fbf", "#7fb0f5"),
    "on-op": ("#10202f", "#f3f7ff"),
    "F0": ("#9cc3f7", "#2a5ca8"),
    "F1": ("#c3dbfb", "#1f4784"),
    "B0": ("#98d8ab", "#24703f"),
    "B1": ("#c2e9cd", "#1b5630"),
    "I0": ("#f5c08a", "#94560f"),
    "I1": ("#fadbb9", "#73430c"),
    "W0": ("#cdb5f0", "#6440a3"),
    "W1": ("#e1d3f7", "#4e327f"),
    "U0": ("#aab2bf", "#5d6673"),
    "U1": ("#aab2bf", "#5d6673"),
}
"""Name of a colour -> (light, dark)."""

LINES: dict[str, tuple[str, str]] = {
    "line0": ("#1f5fbf", "#7fb0f5"),
    "line1": ("#b3560d", "#f0a35e"),
    "line2": ("#1d7a3e", "#6fcf8d"),
    "line3": ("#6a3fb5", "#b99cf0"),
    "line4": ("#a8327a", "#f08cc4"),
    "line5": ("#0b7285", "#63c5d6"),
}
"""The same for several lines in one picture (`line_style`)."""

_FILLS = {**{name: name for name in COLOURS}, "band": "F1"}
_STROKES = {"tick": "line", "wave": "send", "curve": "mark", "drain": "faint", "phase": "faint", "failure": "send"}
"""Class of a shape -> name of its colour."""

TERMINAL: dict[str, str] = {
    "F0": "bright_blue",
    "F1": "blue",
    "B0": "bright_green",
    "B1": "green",
    "I0": "orange1",
    "I1": "dark_orange3",
    "W0": "bright_magenta",
    "W1": "magenta",
    "U0": "bright_black",
    "U1": "bright_black",
    "wait": "bright_black",
}
"""Name of a colour -> rich's colour."""


def colour_class(kind: str, index: int) -> str:
    """Returns the name of an op's colour.

    >>> colour_class("F", 3)
    'F1'
    """
    return f"{kind}{index % 2}"


def svg_style() -> str:
    """Returns the CSS of a picture in a file.

    Light colours are attributes of the shapes, for viewers with little CSS or none; dark ones follow the screen. All
    are literal, because some converters draw a shape black whose colour is a variable.
    """
    dark = _write_rules(lambda colour: COLOURS[colour][1])
    return f".pd text{{font-family:{FONT}}}@media(prefers-color-scheme:dark){{{dark}}}"


def line_style() -> str:
    """Returns the CSS of the colours of `LINES`, for strokes (``of-NAME``) and fills; see `svg_style`."""
    dark = "".join(f".pd .{name}{{fill:{pair[1]}}}.pd .of-{name}{{stroke:{pair[1]}}}" for name, pair in LINES.items())
    return f"@media(prefers-color-scheme:dark){{{dark}.pd .of-faint{{stroke:{COLOURS['faint'][1]}}}}}"


def page_style() -> str:
    """Returns the CSS of a page and of the pictures in it."""
    light, dark = (";".join(f"--pd-{name}:{pair[i]}" for name, pair in COLOURS.items()) for i in (0, 1))
    variables = f":root{{{light}}}@media(prefers-color-scheme:dark){{:root{{{dark}}}}}"
    drawn = f".pd text{{font-family:{FONT}}}" + _write_rules(lambda colour: f"var(--pd-{colour})")
    layout = files("pipedream.apps.report").joinpath("page.css").read_text(encoding="utf-8")
    return f"{variables}{drawn}\n{layout}".replace("FONT", FONT).replace("MONO", MONO)


def _write_rules(colour: Callable[[str], str]) -> str:
    fills = (f".pd .{name}{{fill:{colour(of)}}}" for name, of in _FILLS.items())
    return "".join([*fills, *(f".pd .{name}{{stroke:{colour(of)}}}" for name, of in _STROKES.items())])


def ticks(low: float, high: float, most: int) -> tuple[float, ...]:
    """Returns at most `most` round numbers (1, 2 or 5 times a power of ten apart) between low and high.

    >>> ticks(0, 9.3, 6)
    (0.0, 2.0, 4.0, 6.0, 8.0)
    """
    if not math.isfinite(high - low) or high <= low or most < 1:  # finite ones may differ by infinity
        return (low,)
    power = 10.0 ** math.floor(math.log10((high - low) / most))
    step = next(size * power for size in (1, 2, 5, 10, 20, 50) if _count(low, high, size * power) <= most or size == 50)
    first = math.ceil(low / step - 1e-9)
    return tuple((first + i) * step for i in range(_count(low, high, step)))


def _count(low: float, high: float, step: float) -> int:
    return math.floor(high / step + 1e-9) - math.ceil(low / step - 1e-9) + 1


def time_unit(seconds: float) -> tuple[str, float]:
    """Returns a suitable unit and its seconds.

    >>> time_unit(0.25)
    ('ms', 0.001)
    """
    for name, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= 3 * size:
            return name, size
    return "us", 1e-6


def length(value: float) -> str:
    """Formats a length in pixels.

    >>> length(3.04), length(12.0)
    ('3', '12')
    """
    return f"{value:.1f}".rstrip("0").rstrip(".") or "0"
