"""Timelines as pictures: one self-contained SVG, light or dark like the reader's screen; by CairoSVG also PDF, PNG."""

import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from html import escape
from itertools import groupby
from pathlib import Path

from pipedream.apps.report.lanes import assign_rows, match_waits
from pipedream.apps.report.style import COLOURS, LINES, colour_class, length, svg_style, ticks, time_unit
from pipedream.core.artifact import new_file
from pipedream.core.errors import PlanError
from pipedream.core.schedule.timeline import WORK, Span, Timeline
from pipedream.core.units import format_number, format_seconds

LEFT, RIGHT = 78, 16
"""Pixels to the left and to the right of the lanes."""

_GAP, _AXIS, _LEGEND = 12, 22, 26
SPAN_NAMES = {
    "F": "forward",
    "B": "backward",
    "I": "input gradient",
    "W": "weight gradient",
    "U": "update",
    "wait": "waiting",
    "send": "message",
}


def timeline_svg(
    timeline: Timeline,
    *,
    title: str = "",
    width_px: float = 960,
    px_per_s: float | None = None,
    start_s: float | None = None,
    end_s: float | None = None,
    versions: bool = False,
    standalone: bool = True,
) -> str:
    """Returns the picture of a timeline.

    Args:
        width_px: if `px_per_s` is not given.
        px_per_s: for pictures that are to be compared.
        start_s, end_s: the part to show, by default all. The axis counts from `start_s`.
        versions: show the weight versions that passes read, if the timeline has them.
        standalone: False inside an HTML page.
    """
    begin = min((span.start_s for span in timeline.spans), default=0.0) if start_s is None else start_s
    end = max((span.end_s for span in timeline.spans), default=1.0) if end_s is None else end_s
    seconds = max(end - begin, 1e-12)
    scale = (width_px - LEFT - RIGHT) / seconds if px_per_s is None else px_per_s
    lane_px = 36 if versions else 26
    top = 34 if title else 10
    bottom = top + timeline.workers * (lane_px + _GAP)
    width = LEFT + seconds * scale + RIGHT
    # A window leaves out spans that only touch it; the whole keeps an update of no length at its very end.
    spans = timeline.spans if start_s is None and end_s is None else timeline.between(begin, end).spans

    def x(time_s: float) -> float:
        return LEFT + (min(max(time_s, begin), end) - begin) * scale

    def y(rank: int) -> float:
        return top + rank * (lane_px + _GAP)

    version_of = timeline.versions_read()
    parts = [text(LEFT, 21, title, size=14, weight=600)] if title else []
    parts += _draw_axis(seconds, scale, top, bottom)
    parts += _draw_lanes(timeline, y, lane_px, LEFT + seconds * scale)
    parts += _draw_boxes(spans, x, y, lane_px, version_of, match_waits(timeline))
    parts += _draw_labels(spans, x, y, lane_px, version_of if versions else None)
    parts += _draw_messages(spans, x, lambda rank: y(rank) + lane_px)
    parts += _draw_legend(
        [kind for kind in SPAN_NAMES if any(span.kind == kind for span in spans)],
        bottom + _AXIS,
        *((LEFT, 38) if standalone else (8, 28)),  # a page on a narrow screen shows the whole legend
    )
    label = title or f"Timeline of {timeline.name}, {timeline.source}"
    return frame("".join(parts), width, bottom + _AXIS + _LEGEND, label, standalone)


def frame(inside: str, width: float, height: float, label: str, standalone: bool) -> str:
    """Returns an SVG of drawn parts, with its background and colours."""
    space = ' xmlns="http://www.w3.org/2000/svg"' if standalone else ""
    style = f"<style>{svg_style()}</style>" if standalone else ""
    w, h = length(width), length(height)
    return (
        f'<svg{space} class="pd" role="img" aria-label="{escape(label)}" width="{w}" height="{h}" '
        f'viewBox="0 0 {w} {h}">{style}<rect class="paper" width="{w}" height="{h}" rx="6" '
        f'fill="{COLOURS["paper"][0]}"/>{inside}</svg>\n'
    )


def text(
    x: float, y: float, words: str, *, colour: str = "ink", size: float = 11, weight: int = 400, anchor: str = "start"
) -> str:
    """Returns a line of text."""
    bold = f' font-weight="{weight}"' if weight != 400 else ""
    where = f' text-anchor="{anchor}"' if anchor != "start" else ""
    return (
        f'<text class="{colour}" x="{length(x)}" y="{length(y)}" font-size="{length(size)}"{bold}{where} '
        f'fill="{(COLOURS | LINES)[colour][0]}">{escape(words)}</text>'
    )


def shape(tag: str, kind: str, *, title: str = "", **attributes: str | float) -> str:
    """Returns an element of a class, with a tooltip; numbers are pixels, and attributes of '' are left out."""
    words = "".join(
        f' {name.replace("_", "-")}="{value if isinstance(value, str) else length(value)}"'
        for name, value in attributes.items()
        if value != ""
    )
    closing = f"><title>{escape(title)}</title></{tag}>" if title else "/>"
    return f'<{tag} class="{kind}"{words}{closing}'


def line(kind: str, x1: float, x2: float, y1: float, y2: float, stroke: str, **look: str) -> str:
    """Returns a line of a class; `look` is what `shape` takes besides."""
    return shape("line", kind, x1=x1, x2=x2, y1=y1, y2=y2, stroke=stroke, **look)


def rect(kind: str, x: float, y: float, width: float, height: float, **look: str) -> str:
    """Returns a rectangle of a class; without a fill it has that of its group."""
    return shape("rect", kind, x=x, y=y, width=width, height=height, **look)


def y_axis(
    marks: Iterable[float], y: Callable[[float], float], left: float, right: float, write: Callable[[float], str]
) -> list[str]:
    """Returns a line at each mark, and its words to the left of it."""
    parts = []
    for mark in marks:
        parts.append(line("tick", left, right, y(mark), y(mark), COLOURS["line"][0]))
        parts.append(text(left - 8, y(mark) + 4, write(mark), colour="faint", anchor="end"))
    return parts


def polyline(kind: str, points: Iterable[tuple[float, float]], stroke: str, width: float, *, title: str = "") -> str:
    """Returns a line through points."""
    look = {"fill": "none", "stroke": stroke, "stroke_width": str(width), "stroke_linejoin": "round"}
    return shape("polyline", kind, title=title, points=write_points(points), **look)


def write_points(points: Iterable[tuple[float, float]]) -> str:
    """Returns the corners of a line or a polygon, as an attribute."""
    return " ".join(f"{length(x)},{length(y)}" for x, y in points)


def _draw_axis(seconds: float, scale: float, top: float, bottom: float) -> list[str]:
    unit, size = time_unit(seconds)
    parts = []
    for tick in ticks(0.0, seconds / size, max(2, int(seconds * scale / 90))):
        x = LEFT + tick * size * scale
        parts.append(line("tick", x, x, top - 4, bottom, COLOURS["line"][0]))
        anchor = "end" if x > LEFT + seconds * scale - 24 else "middle"
        parts.append(text(x, bottom + 13, f"{format_number(tick)} {unit}", colour="faint", anchor=anchor))
    return parts


def _draw_lanes(timeline: Timeline, y: Callable[[int], float], lane_px: float, right: float) -> list[str]:
    stages: dict[int, set[int]] = defaultdict(set)
    for span in timeline.work():
        stages[span.rank].add(span.stage)
    parts = []
    for rank in range(timeline.workers):
        middle = y(rank) + lane_px / 2
        parts.append(rect("lane", LEFT, y(rank), right - LEFT, lane_px, fill=COLOURS["lane"][0]))
        parts.append(text(LEFT - 10, middle - 1, f"rank {rank}", anchor="end", weight=600))
        if stages[rank]:
            names = f"stage {', '.join(map(str, sorted(stages[rank])))}"
            parts.append(text(LEFT - 10, middle + 11, names, colour="faint", size=10, anchor="end"))
    return parts


def _draw_boxes(
    spans: tuple[Span, ...],
    x: Callable[[float], float],
    y: Callable[[int], float],
    lane_px: float,
    version_of: Callable[[Span], int | None],
    waits: Mapping[Span, tuple[str, Span]],
) -> list[str]:
    def colour(span: Span) -> str:
        return "wait" if span.kind == "wait" else colour_class(span.kind, span.index)

    drawn = [span for span in spans if span.kind in WORK or span.kind == "wait"]
    # Updates last, because one that takes no time is a line over its neighbours.
    drawn.sort(key=lambda span: (span.kind != "wait", span.kind == "U", colour(span), span.rank, span.start_s))
    parts = []
    for name, group in groupby(drawn, colour):
        parts.append(f'<g class="{name}" fill="{COLOURS[name][0]}">')
        for span in group:
            left, right = x(span.start_s), x(span.end_s)
            thick = max(right - left - (0.8 if right - left > 4 else 0), 1.5)
            inset = 6 if span.kind == "wait" else 0
            kind = "op" if span.kind in WORK else "idle"
            tooltip, rx = _describe_span(span, version_of(span), *waits.get(span, ())), "2" if thick > 5 else "0"
            parts.append(rect(kind, left, y(span.rank) + inset, thick, lane_px - 2 * inset, rx=rx, title=tooltip))
        parts.append("</g>")
    return parts


def _describe_span(span: Span, version: int | None, awaited: str = "", before: Span | None = None) -> str:
    took = format_seconds(span.end_s - span.start_s)
    if span.kind == "wait":
        what = f" for {awaited}" if awaited else ""
        return f"waiting{what}{f', before {before.stage}{before.kind}{before.index}' if before else ''}, {took}"
    if span.kind == "send":
        return f"message of stage {span.stage}, microbatch {span.index}: {took}"
    reads = "" if version is None else f", reads version {version}"
    what = "makes version" if span.kind == "U" else "microbatch"
    return f"{span.stage}{span.kind}{span.index}: {SPAN_NAMES[span.kind]}, {what} {span.index}, {took}{reads}"


def _draw_labels(
    spans: tuple[Span, ...],
    x: Callable[[float], float],
    y: Callable[[int], float],
    lane_px: float,
    version_of: Callable[[Span], int | None] | None,
) -> list[str]:
    """Microbatches, where there is room; below them the stage if a rank has several, else the version."""
    stages: dict[int, set[int]] = defaultdict(set)
    for span in spans:
        stages[span.rank].add(span.stage)
    parts = []
    for span in spans:
        if span.kind not in WORK or span.kind == "U":
            continue
        left, right = x(span.start_s), x(span.end_s)
        middle = (left + right) / 2
        if right - left < 7 * len(str(span.index)) + 3:
            continue
        version = version_of(span) if version_of else None
        below = f"s{span.stage}" if len(stages[span.rank]) > 1 else None if version is None else f"v{version}"
        if version_of is None or below is None:
            parts.append(text(middle, y(span.rank) + lane_px / 2 + 4, str(span.index), colour="on-op", anchor="middle"))
            continue
        parts.append(
            text(middle, y(span.rank) + 16, str(span.index), colour="on-op", size=12, weight=600, anchor="middle")
        )
        if right - left >= 6 * len(below) + 2:
            parts.append(text(middle, y(span.rank) + 29, below, colour="on-op", size=10, anchor="middle"))
    return parts


def _draw_messages(spans: tuple[Span, ...], x: Callable[[float], float], y: Callable[[int], float]) -> list[str]:
    sends = sorted((span for span in spans if span.kind == "send"), key=lambda span: (span.rank, span.start_s))
    parts = []
    for rank, group in groupby(sends, lambda span: span.rank):
        rank_sends = list(group)
        for span, row in zip(rank_sends, assign_rows(rank_sends), strict=True):
            ends, height = (x(span.start_s), x(span.end_s)), y(rank) + 3 + 3 * min(row, 2)
            title = _describe_span(span, None)
            parts.append(line("wave", *ends, height, height, COLOURS["send"][0], title=title, stroke_width="2"))
    return parts


def _draw_legend(kinds: list[str], y: float, x: float, apart: float) -> list[str]:
    parts = []
    for kind in kinds:
        name = {"wait": "wait", "send": "send"}.get(kind, f"{kind}0")
        height = 3 if kind == "send" else 10
        parts.append(rect(name, x, y + 10 - height / 2, 14, height, rx="1.5", fill=COLOURS[name][0]))
        parts.append(text(x + 20, y + 14, SPAN_NAMES[kind], colour="faint"))
        x += apart + 6.2 * len(SPAN_NAMES[kind])
    return parts


PICTURES = (".svg", ".pdf", ".png")
"""Suffixes of pictures."""

_PNG_SCALE = 2.0  # pixels of a PNG for one of the SVG


def check_picture(path: str | os.PathLike[str]) -> Path:
    """Returns the path of a picture that `save_picture` can write.

    Raises:
        PlanError: its suffix is another one, or CairoSVG is needed and missing.
    """
    path = Path(path)
    if path.suffix.lower() not in ("", *PICTURES):
        raise PlanError(
            f"a picture was to be written to {path}, but it is an SVG, PDF or PNG; write name.svg, .pdf or .png"
        )
    if path.suffix.lower() in (".pdf", ".png"):
        try:
            import cairosvg  # noqa: F401
        except ModuleNotFoundError:
            raise PlanError(
                f"a picture was to be written to {path}, but CairoSVG is not installed, which makes PDF and PNG; "
                "install it (pip install 'torch-pipedream[pictures]'), or write a .svg"
            ) from None
        except OSError as error:
            raise PlanError(
                f"a picture was to be written to {path}, but CairoSVG does not find the library cairo: "
                f"{str(error).splitlines()[0]}; install it (Debian, Ubuntu: apt install libcairo2; macOS: brew install "
                "cairo), or write a .svg"
            ) from None
    return path


def save_picture(picture: str, path: str | os.PathLike[str]) -> Path:
    """Writes an SVG text to a file, as SVG, PDF or PNG by the suffix (none: SVG). Returns the path.

    PDF and PNG need the extra ``pictures``. Their colours are those of a light screen.

    Raises:
        PlanError: see `check_picture`.
        ArtifactError: it cannot be written.
    """
    path, data = check_picture(path), picture.encode()
    if path.suffix.lower() in (".pdf", ".png"):
        import cairosvg

        is_pdf = path.suffix.lower() == ".pdf"
        data = cairosvg.svg2pdf(data) if is_pdf else cairosvg.svg2png(data, scale=_PNG_SCALE)
    with new_file(path) as scratch:
        scratch.write_bytes(data)
    return path
