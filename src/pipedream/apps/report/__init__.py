"""Reports: text for the terminal, SVG pictures, trace files and the page of a run."""

from pipedream.apps.report.charts import curve_svg
from pipedream.apps.report.html import page, save_page
from pipedream.apps.report.svg import save_picture, timeline_svg
from pipedream.apps.report.text import grid, grid_rich
from pipedream.apps.report.trace import save_trace, trace

__all__ = ["curve_svg", "grid", "grid_rich", "page", "save_page", "save_picture", "save_trace", "timeline_svg", "trace"]
