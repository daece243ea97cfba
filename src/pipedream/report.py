"""Text for the terminal, SVG pictures, trace files and the page of a run, under a short name."""

from pipedream.apps.report import (
    curve_svg as curve_svg,
    grid as grid,
    grid_rich as grid_rich,
    page as page,
    save_page as save_page,
    save_picture as save_picture,
    save_trace as save_trace,
    timeline_svg as timeline_svg,
    trace as trace,
)
