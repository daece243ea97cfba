"""Progress on standard error: a bar in a terminal or notebook, occasional lines in a log."""

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from importlib.util import find_spec
from typing import Any

from pipedream.core.units import format_seconds

QUIET_S = 2.0
"""Shorter work writes no line into a log."""

LONGEST_GAP_S = 60.0

_is_shown = ContextVar("is_shown", default=False)
"""Whether progress is being shown; nested progress is not."""


def is_live(console: Any) -> bool:
    """Returns whether a rich Console can redraw: in a terminal, or in a notebook with ipywidgets."""
    return bool(console.is_terminal or (console.is_jupyter and find_spec("ipywidgets") is not None))


class LogTimes:
    """When a log gets a line: after `QUIET_S`, then whenever the elapsed time has doubled, at least each minute."""

    def __init__(self) -> None:
        self._begin_s = time.monotonic()
        self._next_s = QUIET_S

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self._begin_s

    def is_due(self) -> bool:
        elapsed_s = self.elapsed_s
        if elapsed_s < self._next_s:
            return False
        self._next_s = elapsed_s + min(elapsed_s, LONGEST_GAP_S)
        return True


def format_time_left(done: int, total: int, seconds: float) -> str:
    """Returns ``, about 3.00 s left`` from the seconds of the steps so far; '' if there is nothing to go by."""
    return f", about {format_seconds(seconds * (total - done) / done)} left" if 0 < done < total else ""


@contextmanager
def progress(what: str, total: int | None = None) -> Iterator[Callable[[], None]]:
    """Shows progress over `total` steps, if these are known; yields the function that advances it by one."""
    from rich.console import Console

    console = Console(stderr=True)
    # Of several processes only the first one shows progress.
    if _is_shown.get() or os.environ.get("RANK", "0") != "0" or (console.is_jupyter and not is_live(console)):
        yield lambda: None
        return
    token = _is_shown.set(True)
    try:
        with _show_bar(console, what, total) if is_live(console) else _print_lines(what, total) as advance:
            yield advance
    finally:
        _is_shown.reset(token)


@contextmanager
def _show_bar(console: Any, what: str, total: int | None) -> Iterator[Callable[[], None]]:
    from rich.progress import Progress as Bar

    # `advance` alone draws a bar with steps: a thread would disturb measurements between them.
    with Bar(console=console, transient=True, auto_refresh=total is None) as bar:
        task = bar.add_task(what, total=total)
        bar.refresh()

        def advance() -> None:
            bar.update(task, advance=1, refresh=True)

        yield advance


@contextmanager
def _print_lines(what: str, total: int | None) -> Iterator[Callable[[], None]]:
    times, done = LogTimes(), 0

    def advance() -> None:
        nonlocal done
        done += 1
        if times.is_due():
            time_left = format_time_left(done, total or 0, times.elapsed_s)
            print(f"{what}: {done}{f' of {total}' if total else ''}{time_left}", file=sys.stderr, flush=True)

    # The first step may be long.
    timer = threading.Timer(QUIET_S, print, (f"{what} ...",), {"file": sys.stderr, "flush": True})
    timer.daemon = True
    timer.start()
    try:
        yield advance
    finally:
        timer.cancel()
