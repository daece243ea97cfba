"""Pages as HTML text: their frame, tables, key figures and values."""

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

from pipedream.apps.report.style import page_style
from pipedream.core.tabular import fold
from pipedream.core.units import format_bytes, format_number, format_seconds

NOTHING = "-"
"""Shown for an unknown value."""


def document(heading: str, note: str, main: str) -> str:
    """Returns a page, self-contained, with a line of text below its heading."""
    line = f"<p>{escape(note)}</p>" if note else ""
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n<link rel="icon" href="data:,">\n'
        f"<title>{escape(heading)}</title>\n<style>{page_style()}</style>\n</head>\n<body>\n"
        f"<header><h1>{escape(heading)}</h1>{line}</header>\n<main>\n{main}</main>\n</body>\n</html>\n"
    )


def section(name: str, inside: str) -> str:
    """Returns a part of a page below its heading; "" where nothing is inside."""
    return f"<section><h2>{escape(name)}</h2>{inside}</section>" if inside else ""


def scroll(label: str, inside: str, classes: str = "") -> str:
    """Returns a part that scrolls sideways on narrow screens; screen readers name it by its label."""
    return (
        f'<div class="{" ".join(filter(None, ("scroll", classes)))}" tabindex="0" role="region" '
        f'aria-label="{escape(label)}">{inside}</div>'
    )


def table(
    caption: str, heads: Sequence[str], rows: Iterable[Sequence[str]], *, words: int = 1, show_caption: bool = True
) -> str:
    """Returns a table of HTML cells.

    Args:
        words: the number of columns, from the first, that are aligned left.
        show_caption: False leaves the caption to screen readers.
    """

    def cells(row: Sequence[str]) -> str:
        first = f'<th scope="row">{row[0]}</th>'
        return first + "".join(
            f"<td{'' if i < words else ' class=number'}>{cell}</td>" for i, cell in enumerate(row[1:], 1)
        )

    head = "".join(
        f'<th scope="col"{"" if i < words else " class=number"}>{escape(name)}</th>' for i, name in enumerate(heads)
    )
    body = "".join(f"<tr>{cells(row)}</tr>" for row in rows)
    shown = f"<caption>{escape(caption)}</caption>" if show_caption else ""
    return scroll(caption, f"<table>{shown}<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>")


def pairs(caption: str, values: Mapping[str, Any]) -> str:
    """Returns a table of the values that are set; nested names are joined with dots."""
    return table(
        caption, ("name", "value"), list(_flatten(values)) or [(NOTHING, NOTHING)], words=2, show_caption=False
    )


def _flatten(values: Mapping[str, Any], before: str = "") -> Iterable[tuple[str, str]]:
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _flatten(value, f"{before}{name}.")
        elif value or (isinstance(value, (int, float)) and value is not False):
            yield escape(f"{before}{name}"), _write_cell("", value)


def amount(value: Any) -> str:
    """Formats a value: numbers short, words escaped, None and '' as `-`."""
    if isinstance(value, float):
        return format_number(value)
    return NOTHING if value is None or value == "" else escape(str(value))


def percent(value: Any) -> str:
    """Formats a fraction.

    >>> percent(0.8731), percent(None)
    ('87.3%', '-')
    """
    return f"{100 * value:.1f}%" if isinstance(value, (int, float)) else NOTHING


def cards(figures: Iterable[tuple[str, str, str]]) -> str:
    """Returns the key figures: name, value, and a note below."""
    return "".join(
        f'<div class="card"><dt>{escape(name)}</dt><dd>{escape(value)}'
        f"<small>{escape(note) or '&nbsp;'}</small></dd></div>"
        for name, value, note in figures
    )


Heads = Mapping[str, str]
"""Column of a result's rows -> its head."""

PHASES: Heads = {
    "schedule": "phase", "microbatches": "microbatches", "begin": "from minibatch", "end": "to",
    "samples_per_s": "samples per second", "bubble": "bubble",
}  # fmt: skip
PLANS: Heads = {
    "stage": "stage", "layers": "layers", "workers": "workers", "forward_s": "forward", "backward_s": "backward",
    "update_s": "update", "output_bytes": "output", "parameter_bytes": "weights", "in_flight": "in flight",
    "rate_factor": "rate factor", "peak_bytes": "peak",
}  # fmt: skip
PROFILES: Heads = {
    "layer": "layer", "kind": "kind", "forward_s": "forward", "backward_s": "backward", "output_bytes": "output",
    "activation_bytes": "kept", "parameter_bytes": "weights",
}  # fmt: skip
STAGES: Heads = {
    "stage": "stage", "layers": "layers", "rank": "rank", "busy_share": "busy", "predicted_busy_share": "predicted",
    "wait_share": "waiting", "predicted_wait_share": "predicted", "send_share": "sending",
    "predicted_send_share": "predicted", "bytes_sent": "sent", "peak_bytes": "peak memory",
    "predicted_peak_bytes": "predicted", "reserved_bytes": "reserved", "versions": "versions",
    "staleness": "staleness", "learning_rate": "rate",
}  # fmt: skip


def result_table(caption: str, rows: Iterable[Mapping[str, Any]], heads: Heads, **how: Any) -> str:
    """Returns a table of some columns of a result's rows; `how` is that of `table`."""
    return table(caption, list(heads.values()), write_cells(rows, heads), **{"words": 2} | how)


def write_cells(rows: Iterable[Mapping[str, Any]], columns: Iterable[str]) -> list[list[str]]:
    """Returns the cells of some columns of a result's rows, with the units of their names; equal rows are joined."""
    columns = list(columns)
    return fold([_write_cell(name, row.get(name)) for name in columns] for row in rows)


def _write_cell(name: str, value: Any) -> str:
    if isinstance(value, list | tuple) and name == "layers" and value:
        short = value[0] if len(value) == 1 else f"{value[0]} .. {value[-1]}"
        return f'<span title="{escape(", ".join(value))}">{escape(short)}</span>'
    if isinstance(value, list | tuple):
        return amount(", ".join(map(str, value)))
    if isinstance(value, int | float) and not isinstance(value, bool):
        if name.endswith("_s") and not name.endswith(("per_s", "samples_s")):
            return format_seconds(value)
        if name.endswith("_bytes") or name == "bytes_sent":
            return format_bytes(value)
        if name == "bubble" or (name.startswith("predicted_") and name.endswith("_share")):
            return percent(value)
        if name.endswith("_share"):  # on a bar of this length
            return f'<span class="bar" style="--share:{min(max(100 * value, 0), 100):.1f}%">{percent(value)}</span>'
    return amount(value)


def collectives_table(stages: Sequence[Mapping[str, Any]]) -> str:
    """Returns what the ranks of each stage exchange, predicted and measured; "" where no stage has a mesh."""
    rows, shown = [], set()
    for stage in stages:
        sources = stage.get("collectives") or {}
        predicted, number = sources.get("predicted"), amount(stage.get("stage"))
        for name, measured in (sources.get("measured") or {}).items() if number not in shown else ():
            sides = [
                {(row.get("kind"), row.get("over"), row.get("of_weights")): row for row in side}
                for side in ((predicted or {}).get(name, ()), measured)
            ]
            for kind, over, of_weights in sides[0] | sides[1]:
                cells = [side.get((kind, over, of_weights), {}) for side in sides]
                counts = [str(cell.get("count", 0)) for cell in cells]
                sizes = [format_bytes(cell.get("size_bytes", 0)) for cell in cells]
                if predicted is None:
                    counts[0] = sizes[0] = NOTHING
                what = f"{kind} of weights" if of_weights else kind
                rows.append((number, *map(amount, (stage.get("mesh"), name, what, over)), *counts, *sizes))
        shown.add(number)
    if not rows:
        return ""
    heads = ("stage", "mesh", "of", "collective", "over", "predicted", "measured", "predicted", "measured")
    return table("Collectives of a microbatch and an update: number and bytes at a rank", heads, rows, words=5)


def size(value: Any) -> str:
    """Formats bytes; what is no number as `-`."""
    return format_bytes(value) if isinstance(value, (int, float)) else NOTHING
