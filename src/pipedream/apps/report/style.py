"""Colours of pictures and pages, light and dark, for SVG, HTML and the terminal; round ticks and short numbers.

Forwards are blue and backwards green, as in PipeDream's figures.
"""

import math
from collections.abc import Callable

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
    return variables + drawn + _PAGE.replace("FONT", FONT).replace("MONO", MONO)


def _write_rules(colour: Callable[[str], str]) -> str:
    fills = (f".pd .{name}{{fill:{colour(of)}}}" for name, of in _FILLS.items())
    return "".join([*fills, *(f".pd .{name}{{stroke:{colour(of)}}}" for name, of in _STROKES.items())])


_PAGE = """
:root{color-scheme:light dark}
*{box-sizing:border-box}
body{margin:0;background:var(--pd-lane);color:var(--pd-ink);font:15px/1.5 FONT;-webkit-text-size-adjust:100%}
header,main{max-width:1260px;margin:0 auto;padding:0 24px}
header{padding-top:28px}
h1{font-size:26px;line-height:1.25;margin:0;letter-spacing:-.01em}
p code{font:13px MONO;overflow-wrap:anywhere}
header p{margin:4px 0 0;color:var(--pd-faint)}
h2{font-size:17px;margin:0 0 12px}
h3{font-size:14px;margin:18px 0 8px;color:var(--pd-faint);font-weight:600}
h2+h3{margin-top:0}
main{padding-bottom:48px}
section,details{background:var(--pd-paper);border:1px solid var(--pd-line);border-radius:10px;padding:18px 20px;
 margin:16px 0;min-width:0}
section p{margin:8px 0 0;color:var(--pd-faint);font-size:13px}
summary{font-size:17px;font-weight:700;cursor:pointer}
.cards{display:grid;grid-template-columns:repeat(auto-fit,minmax(130px,1fr));gap:12px;margin:18px 0 0}
.card{background:var(--pd-paper);border:1px solid var(--pd-line);border-radius:10px;padding:12px 16px}
dt{color:var(--pd-faint);font-size:13px}
dd{margin:0;font-size:25px;font-weight:650;line-height:1.3;font-variant-numeric:tabular-nums;letter-spacing:-.01em}
small{display:block;font-size:12.5px;font-weight:400;letter-spacing:0;color:var(--pd-faint)}
.columns{display:grid;grid-template-columns:repeat(auto-fit,minmax(360px,1fr));gap:0 16px}
.scroll{overflow-x:auto;border-radius:6px;background:linear-gradient(90deg,var(--pd-paper) 50%,transparent) 0/48px 100%,
 linear-gradient(270deg,var(--pd-paper) 50%,transparent) 100%/48px 100%,
 linear-gradient(90deg,var(--pd-line),transparent) 0/16px 100%,
 linear-gradient(270deg,var(--pd-line),transparent) 100%/16px 100%;
 background-repeat:no-repeat;background-attachment:local,local,scroll,scroll}
.scroll:focus-visible,summary:focus-visible{outline:2px solid var(--pd-mark);outline-offset:2px}
.scroll svg{display:block}
.fits svg{max-width:100%;min-width:900px;height:auto}
.row svg{min-width:440px}
.row{display:flex;flex-wrap:wrap;gap:12px}
.timelines svg+svg{margin-top:2px}
table{border-collapse:collapse;width:100%;font-size:13.5px;font-variant-numeric:tabular-nums}
caption{text-align:left;color:var(--pd-faint);font-size:13px;padding-bottom:6px}
th,td{padding:5px 10px;text-align:left;border-bottom:1px solid var(--pd-line);white-space:nowrap;font-weight:400}
thead th{color:var(--pd-faint);font-size:12.5px}
tbody tr:last-child>*{border-bottom:0}
th:first-child{padding-left:0}
.number{text-align:right}
.columns td{font-family:MONO;font-size:12.5px;white-space:normal;overflow-wrap:anywhere}
.bar{display:inline-block;min-width:64px;padding:0 4px;border-radius:3px;
 background:linear-gradient(90deg,var(--pd-F1) var(--share),var(--pd-wait) var(--share))}
@media(max-width:560px){header,main{padding-left:12px;padding-right:12px}.columns{grid-template-columns:1fr}}
@media print{body{background:none}section,details,.card{break-inside:avoid}}
"""


def ticks(low: float, high: float, most: int) -> tuple[float, ...]:
    """Returns at most `most` round numbers (1, 2 or 5 times a power of ten apart) between low and high.

    >>> ticks(0, 9.3, 6)
    (0.0, 2.0, 4.0, 6.0, 8.0)
    """
    if not (math.isfinite(low) and math.isfinite(high)) or high <= low or most < 1:
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
