"""Shows results in a notebook: first line, picture and table."""

from contextlib import suppress
from functools import singledispatch
from html import escape
from typing import Any

from pipedream import schedules
from pipedream.apps.report.charts import profile_svg
from pipedream.apps.report.html_tables import PROFILES, table, write_cells
from pipedream.apps.report.lanes import start_window
from pipedream.apps.report.svg import timeline_svg
from pipedream.core.errors import PipelineError
from pipedream.core.model.profile import Profile
from pipedream.core.plan.plan import Plan
from pipedream.core.schedule.lowering import lower
from pipedream.core.schedule.program import Program
from pipedream.core.schedule.timeline import Timeline
from pipedream.core.tabular import Tabular
from pipedream.planner import Comparison
from pipedream.simulator import costs, simulate

__all__ = ["html", "picture", "timeline_svg"]

_MAX_ROWS = 60
_MAX_SPANS = 1500
_MAX_WORKERS = 32
_MAX_MICROBATCHES = 40


def html(result: Tabular) -> str:
    """Returns HTML; a picture or a table that is too long is shortened, and says so."""
    line = repr(result).removeprefix("<").removesuffix(">")
    rows = [] if isinstance(result, Timeline | Program) else result.rows()
    if isinstance(result, Profile):
        rows = [{name: row[name] for name in PROFILES} for row in rows]
    return f'<div class="pipedream"><p>{escape(line)}</p>{picture(result)}{_write_table(rows)}</div>'


@singledispatch
def picture(result: Tabular) -> str:
    """Returns the picture of a result as SVG; '' if it has none."""
    return ""


@picture.register
def _(result: Timeline) -> str:
    if len(result.spans) <= _MAX_SPANS:
        return timeline_svg(result)
    window = start_window(result, _MAX_MICROBATCHES)
    if window is None:
        return ""
    title = f"the first {window.last - window.first} of {result.microbatches} microbatches"
    return timeline_svg(result, title=title, start_s=window.start_s, end_s=window.end_s)


@picture.register
def _(result: Program) -> str:
    if result.placement.workers > _MAX_WORKERS:
        return ""
    m = result.microbatches
    timeline = simulate(result, costs(result.plan, split=m), m * max(1, 12 // m))
    return timeline_svg(timeline, title=f"{result.name}, simulated")


@picture.register
def _(result: Plan) -> str:
    if result.workers > _MAX_WORKERS:
        return ""
    with suppress(PipelineError):  # a plan for a method of another layout, or one that names a file of code
        schedules.refuse_code(result.schedule, "the plan")
        name, microbatches = result.method()
        return picture(lower(schedules.build(name, result, microbatches)))
    return ""


picture.register(Comparison, lambda result: picture(result.plan))
picture.register(Profile, profile_svg)


def _write_table(rows: list[dict[str, Any]]) -> str:
    if not rows:
        return ""
    columns = [name for name in rows[0] if any(row[name] not in (None, "") for row in rows)]
    cells = write_cells(rows, columns)
    more = f"<p>{len(cells) - _MAX_ROWS} more rows: to_frame()</p>" if len(cells) > _MAX_ROWS else ""
    heads = [name.removesuffix("_s").removesuffix("_bytes").replace("_", " ") for name in columns]
    return table("", heads, cells[:_MAX_ROWS], show_caption=False) + more
