"""Prints runs, for several commands."""

import sys

from rich.console import Console

from pipedream.apps.report.text import grid_rich
from pipedream.core.schedule.timeline import Timeline
from pipedream.core.units import format_seconds
from pipedream.schedules import Run, is_schedule_file, stage_order_of


def print_grid(timeline: Timeline) -> None:
    """Draws a timeline, at most as wide as the terminal."""
    width = Console().width if sys.stdout.isatty() else None
    console = Console(highlight=False, width=10_000 if width is None else None)
    console.print(grid_rich(timeline, width=width), soft_wrap=True)


def print_length(run: Run, microbatches: int | None, minibatches: int | None) -> None:
    """Prints the length of a run, unless it was asked for."""
    if run.microbatches != (microbatches or 1) * (minibatches or 1):
        print(run)


def print_chunks(run: Run) -> None:
    """Prints how many stages the workers have, for methods that give a worker several."""
    plan = run.schedule.plan
    if is_schedule_file(run.schedule.name) or stage_order_of(run.schedule.name) is None:
        return
    chunks = sum(plan.replicas) / plan.workers
    seconds = sorted({round(stage.forward_s + stage.backward_s, 12) for stage in plan.stages})
    words = " to ".join(map(format_seconds, dict.fromkeys((seconds[0], seconds[-1]))))
    print(f"each worker has {chunks:g} stage{'' if chunks == 1 else 's'} of {words} per microbatch")
