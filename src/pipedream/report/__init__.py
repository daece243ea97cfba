"""Numbers and spans to ink: text for the terminal, SVG, trace files, the page of a run, the gallery of schedules."""

from .curve import curve_svg
from .gallery import Entry, gallery
from .html import page, save_page
from .scatter import Pair, scatter_svg
from .svg import timeline_svg
from .text import grid, grid_rich
from .trace import save_trace, trace

__all__ = [
    "Entry",
    "Pair",
    "curve_svg",
    "gallery",
    "grid",
    "grid_rich",
    "page",
    "save_page",
    "save_trace",
    "scatter_svg",
    "timeline_svg",
    "trace",
]
