"""Pages as HTML text: their frame, tables, key figures and values."""

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

from pipedream.apps.report.style import page_style
from pipedream.core.model.profile import Profile
from pipedream.core.plan.plan import Plan
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


def phase_table(phases: Iterable[Mapping[str, Any]]) -> str:
    """Returns the phases of a run."""
    heads = ("phase", "microbatches", "from minibatch", "to", "samples per second", "bubble")
    rows = [
        (
            escape(str(phase.get("schedule", NOTHING))),
            *(amount(phase.get(name)) for name in ("microbatches", "begin", "end", "samples_per_s")),
            percent(phase.get("bubble")),
        )
        for phase in phases
    ]
    return table("Phases", heads, rows, show_caption=False)


def pairs(caption: str, values: Mapping[str, Any]) -> str:
    """Returns a table of the values that are set; nested names are joined with dots."""
    return table(
        caption, ("name", "value"), list(_flatten(values)) or [(NOTHING, NOTHING)], words=2, show_caption=False
    )


def _flatten(values: Mapping[str, Any], before: str = "") -> Iterable[tuple[str, str]]:
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _flatten(value, f"{before}{name}.")
        elif isinstance(value, (list, tuple)) and value:
            yield escape(f"{before}{name}"), escape(", ".join(map(str, value)))
        elif value or (isinstance(value, (int, float)) and value is not False):
            yield escape(f"{before}{name}"), amount(value)


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


def bar(value: Any) -> str:
    """Formats a fraction on a bar of this length."""
    if not isinstance(value, (int, float)):
        return NOTHING
    return f'<span class="bar" style="--share:{min(max(100 * value, 0), 100):.1f}%">{percent(value)}</span>'


def cards(figures: Iterable[tuple[str, str, str]]) -> str:
    """Returns the key figures: name, value, and a note below."""
    return "".join(
        f'<div class="card"><dt>{escape(name)}</dt><dd>{escape(value)}'
        f"<small>{escape(note) or '&nbsp;'}</small></dd></div>"
        for name, value, note in figures
    )


_OF_PLANS = {
    "stage": "stage", "layers": "layers", "workers": "workers", "forward_s": "forward", "backward_s": "backward",
    "update_s": "update", "output_bytes": "output", "parameter_bytes": "weights", "in_flight": "in flight",
    "rate_factor": "rate factor", "peak_bytes": "peak",
}  # fmt: skip
_OF_PROFILES = {
    "layer": "layer", "kind": "kind", "forward_s": "forward", "backward_s": "backward", "output_bytes": "output",
    "activation_bytes": "kept", "parameter_bytes": "weights",
}  # fmt: skip
"""Column of a result's rows -> its head."""


def plan_table(plan: Plan) -> str:
    """Returns the stages of a plan."""
    caption = f"Plan {plan.config}: stages, seconds and bytes of one {plan.unit}"
    return table(caption, list(_OF_PLANS.values()), write_cells(plan.rows(), _OF_PLANS), words=2)


def profile_table(profile: Profile) -> str:
    """Returns the layers of a profile."""
    caption = f"Profile of {profile.model}: batch {profile.batch}, {profile.device}"
    return table(caption, list(_OF_PROFILES.values()), write_cells(profile.rows(), _OF_PROFILES), words=2)


def write_cells(rows: Iterable[Mapping[str, Any]], columns: Iterable[str]) -> list[list[str]]:
    """Returns the cells of some columns of a result's rows, with the units of their names; equal rows are joined."""
    return fold([_write_cell(name, row[name]) for name in columns] for row in rows)


def _write_cell(name: str, value: Any) -> str:
    if isinstance(value, int | float) and not isinstance(value, bool):
        if name.endswith("_s") and not name.endswith(("per_s", "samples_s")):
            return format_seconds(value)
        if name.endswith("_bytes"):
            return format_bytes(value)
    return amount(value)


def stage_table(stages: Sequence[Mapping[str, Any]]) -> str:
    """Returns what the workers of each stage did, measured and predicted."""
    rows = []
    for s, stage in enumerate(stages):
        rank = stage.get("rank", stage.get("ranks"))
        ranks = ", ".join(map(str, rank)) if isinstance(rank, (list, tuple)) else amount(rank)
        shares = [
            cell
            for word in ("busy", "wait", "send")
            for cell in (bar(stage.get(f"{word}_share")), percent(stage.get(f"predicted_{word}_share")))
        ]
        rows.append(
            (
                str(stage.get("stage", s)),
                _write_layers(tuple(map(str, stage.get("layers") or ()))),
                ranks,
                *shares,
                size(stage.get("bytes_sent")),
                *(size(stage.get(f"{word}_bytes")) for word in ("peak", "predicted_peak", "reserved")),
                amount(stage.get("versions")),
                amount(stage.get("staleness")),
                amount(stage.get("learning_rate")),
            )
        )
    times = ("busy", "predicted", "waiting", "predicted", "sending", "predicted")
    memory = ("peak memory", "predicted", "reserved")
    heads = ("stage", "layers", "rank", *times, "sent", *memory, "versions", "staleness", "rate")
    return table("Stages: shares of the time and memory of tensors, measured and predicted", heads, rows, words=2)


def collectives_table(stages: Sequence[Mapping[str, Any]]) -> str:
    """Returns what the ranks of each stage exchange, predicted and measured; "" where no stage has a mesh."""
    rows, shown = [], set()
    for stage in stages:
        sources = stage.get("collectives") or {}
        predicted, number = sources.get("predicted"), amount(stage.get("stage"))
        for name, measured in (sources.get("measured") or {}).items() if number not in shown else ():
            sides = [_sum_by_kind((predicted or {}).get(name, ())), _sum_by_kind(measured)]
            for key in sorted({*sides[0], *sides[1]}):
                (count, total), (measured_count, measured_size) = (side.get(key, (0, 0)) for side in sides)
                cells = (NOTHING, NOTHING) if predicted is None else (str(count), format_bytes(total))
                numbers = (cells[0], str(measured_count), cells[1], format_bytes(measured_size))
                rows.append((number, *map(amount, (stage.get("mesh"), name, *key)), *numbers))
        shown.add(number)
    if not rows:
        return ""
    heads = ("stage", "mesh", "of", "collective", "over", "predicted", "measured", "predicted", "measured")
    return table("Collectives of a microbatch and an update: number and bytes at a rank", heads, rows, words=5)


def _sum_by_kind(rows: Iterable[Mapping[str, Any]]) -> dict[tuple[str, str], tuple[int, int]]:
    """Returns (kind, dimension) -> number and bytes."""
    totals: dict[tuple[str, str], tuple[int, int]] = {}
    for row in rows:
        key = str(row.get("kind", "")), str(row.get("over", ""))
        count, total = totals.get(key, (0, 0))
        totals[key] = count + row.get("count", 0), total + row.get("size_bytes", 0)
    return totals


def _write_layers(names: tuple[str, ...]) -> str:
    if not names:
        return NOTHING
    short = names[0] if len(names) == 1 else f"{names[0]} .. {names[-1]}"
    return f'<span title="{escape(", ".join(names))}">{escape(short)}</span>'


def size(value: Any) -> str:
    """Formats bytes; what is no number as `-`."""
    return format_bytes(value) if isinstance(value, (int, float)) else NOTHING
