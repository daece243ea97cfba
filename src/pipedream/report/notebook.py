"""Shows results in a notebook: first line, picture and table."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import singledispatch
from html import escape
from typing import Any

from pipedream import schedules
from pipedream.core.display import Tabular, fold
from pipedream.core.errors import PipelineError
from pipedream.core.model.profile import Profile
from pipedream.core.plan.plan import Plan
from pipedream.core.schedule.lowering import lower
from pipedream.core.schedule.program import Program
from pipedream.core.schedule.timeline import Timeline
from pipedream.core.sweep import Sweep
from pipedream.core.units import format_bytes, format_seconds
from pipedream.planner import Comparison
from pipedream.report.charts import profile_svg
from pipedream.report.html_tables import amount, table
from pipedream.report.lanes import start_window
from pipedream.report.svg import timeline_svg
from pipedream.report.sweep import sweep_svg
from pipedream.simulator import costs, simulate

__all__ = ["html", "picture", "timeline_svg"]

_MAX_ROWS = 60
_MAX_SPANS = 1500
_MAX_WORKERS = 32
_MAX_MICROBATCHES = 40
_OF_LAYERS = ("layer", "kind", "forward_s", "backward_s", "output_bytes", "activation_bytes", "parameter_bytes")


def html(noun: Tabular) -> str:
    """Returns HTML; a picture or a table that is too long is shortened, and says so."""
    line = repr(noun).removeprefix("<").removesuffix(">")
    rows = [] if isinstance(noun, Timeline | Program) else noun.rows()
    if isinstance(noun, Profile):
        rows = [{name: row[name] for name in _OF_LAYERS} for row in rows]
    return f'<div class="pipedream"><p>{escape(line)}</p>{picture(noun)}{_write_table(rows)}</div>'


@singledispatch
def picture(noun: Tabular) -> str:
    """Returns the picture of a noun as SVG; '' if it has none."""
    return ""


@picture.register
def _(noun: Timeline) -> str:
    if len(noun.spans) <= _MAX_SPANS:
        return timeline_svg(noun)
    window = start_window(noun, _MAX_MICROBATCHES)
    if window is None:
        return ""
    title = f"the first {window.last - window.first} of {noun.microbatches} microbatches"
    return timeline_svg(noun, title=title, start_s=window.start_s, end_s=window.end_s)


@picture.register
def _(noun: Program) -> str:
    if noun.placement.workers > _MAX_WORKERS:
        return ""
    m = noun.microbatches
    total = m * max(1, min(12, _MAX_MICROBATCHES) // m)
    return timeline_svg(simulate(noun, costs(noun.plan, split=m), total), title=f"{noun.name}, simulated")


@picture.register
def _(noun: Plan) -> str:
    if noun.workers > _MAX_WORKERS:
        return ""
    with suppress(PipelineError):  # a plan for a method of another layout, or one that names a file of code
        schedules.refuse_code(noun.schedule, "the plan")
        return picture(lower(schedules.build(noun.method()[0], noun, noun.method()[1])))
    return ""


@picture.register
def _(noun: Comparison) -> str:
    return picture(noun.plan)


picture.register(Profile, profile_svg)
picture.register(Sweep, sweep_svg)

_WRITTEN: tuple[tuple[str, Callable[[Any], str]], ...] = (
    ("bytes_per_s", lambda value: f"{format_bytes(value)}/s"),
    ("_s", format_seconds),
    ("_bytes", format_bytes),
)


def _write_table(rows: list[dict[str, Any]]) -> str:
    if not rows:
        return ""
    columns = [name for name in rows[0] if any(row[name] not in (None, "") for row in rows)]
    cells = fold([_write_cell(name, row[name]) for name in columns] for row in rows)
    more = f"<p>{len(cells) - _MAX_ROWS} more rows: to_frame()</p>" if len(cells) > _MAX_ROWS else ""
    heads = [name.removesuffix("_s").removesuffix("_bytes").replace("_", " ") for name in columns]
    return table("", heads, cells[:_MAX_ROWS], show_caption=False) + more


def _write_cell(name: str, value: Any) -> str:
    if isinstance(value, int | float) and not isinstance(value, bool) and not name.endswith(("per_s", "samples_s")):
        write = next((write for suffix, write in _WRITTEN if name.endswith(suffix)), None)
        if write is not None:
            return write(value)
    return amount(value)
