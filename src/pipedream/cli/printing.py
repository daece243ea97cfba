"""What the commands print of a run."""

from __future__ import annotations

import sys

from rich.console import Console

from pipedream.core.schedule.timeline import Timeline
from pipedream.report.text import grid_rich
from pipedream.schedules import Run

__all__ = ["print_grid", "print_length"]


def print_grid(timeline: Timeline) -> None:
    """Draws a timeline, cut to the width of a terminal."""
    width = Console().width if sys.stdout.isatty() else None
    console = Console(highlight=False, width=10_000 if width is None else None)
    console.print(grid_rich(timeline, width=width), soft_wrap=True)


def print_length(run: Run, microbatches: int | None, minibatches: int | None) -> None:
    """Prints the length of a run, unless it was asked for."""
    if run.microbatches != (microbatches or 1) * (minibatches or 1):
        print(run)
