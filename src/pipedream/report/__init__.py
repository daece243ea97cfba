"""Reports: text for the terminal, SVG pictures, trace files, the page of a run, and the gallery of schedules."""

from pipedream.report.curve import curve_svg
from pipedream.report.files import save_picture
from pipedream.report.gallery import GalleryEntry, gallery
from pipedream.report.html import page, save_page
from pipedream.report.scatter import Pair, scatter_svg
from pipedream.report.svg import timeline_svg
from pipedream.report.text import grid, grid_rich
from pipedream.report.trace import save_trace, trace

__all__ = [
    "GalleryEntry",
    "Pair",
    "curve_svg",
    "gallery",
    "grid",
    "grid_rich",
    "page",
    "save_page",
    "save_picture",
    "save_trace",
    "scatter_svg",
    "timeline_svg",
    "trace",
]
