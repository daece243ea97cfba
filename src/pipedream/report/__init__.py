"""Reports: text for the terminal, SVG pictures, trace files and the page of a run."""

from pipedream.report.charts import curve_svg
from pipedream.report.html import page, save_page
from pipedream.report.svg import save_picture, timeline_svg
from pipedream.report.text import grid, grid_rich
from pipedream.report.trace import save_trace, trace

__all__ = [
    "curve_svg",
    "grid",
    "grid_rich",
    "page",
    "save_page",
    "save_picture",
    "save_trace",
    "timeline_svg",
    "trace",
]
