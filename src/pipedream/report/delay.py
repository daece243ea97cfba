"""A comparison of methods with stale gradients as one page: the verdict, the losses, a table."""

from __future__ import annotations

from html import escape

from pipedream.core.delay import DelayComparison
from pipedream.report.charts import curve_svg
from pipedream.report.html_tables import document, scroll, table


def delay_page(comparison: DelayComparison) -> str:
    """Returns the page, with the losses against updates and against predicted seconds."""
    rows = [[escape(cell) for cell in row] for row in comparison.cells()]
    figures = table("Methods", comparison.heads, rows, show_caption=False)
    notes = "".join(f"<p>{escape(reason)}</p>" for reason in comparison.reasons())
    pictures = _draw_losses(comparison, "updates") + _draw_losses(comparison, "predicted seconds")
    heading = f"{comparison.recipe} in {comparison.stages} stages, over {comparison.link}"
    body = f"<section>{scroll('Losses', pictures, 'fits')}</section>\n<section>{figures}{notes}</section>\n"
    return document(heading, comparison.verdict, body)


def _draw_losses(comparison: DelayComparison, against: str) -> str:
    curves = {}
    for run in comparison.runs:
        update_s = 1.0 if against == "updates" else comparison.predict_s(run, 1)
        curves[run.method] = [(update_s * (i + 1), loss) for i, loss in enumerate(run.losses)]
    return curve_svg(
        curves,
        title=f"Training loss against {against}",
        width_px=1180,
        height_px=300,
        x_label=against,
        standalone=False,
    )
