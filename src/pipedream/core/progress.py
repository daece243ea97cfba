"""Progress on standard error: a bar in a terminal or a notebook, and in a log lines about what takes long."""

from __future__ import annotations

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
"""What takes less than this leaves nothing in a log."""

LONGEST_GAP_S = 60.0

_is_open = ContextVar("is_open", default=False)
"""Progress is shown; what is within it is not."""


def is_live(console: Any) -> bool:
    """Returns whether a rich Console can draw over what it has drawn: a terminal, or a notebook that has ipywidgets."""
    return bool(console.is_terminal or (console.is_jupyter and find_spec("ipywidgets") is not None))


class LogTimes:
    """When a log gets a line: after `QUIET_S`, then each time twice as long after the start, in the end each minute."""

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


def spell_left(done: int, total: int, seconds: float) -> str:
    """Returns ``, about 3.00 s left``, if so many steps have taken so many seconds."""
    return f", about {format_seconds(seconds * (total - done) / done)} left" if 0 < done < total else ""


@contextmanager
def progress(what: str, total: int | None = None) -> Iterator[Callable[[], None]]:
    """Shows progress, and gives the function that advances it by one step.

    Args:
        total: steps; None if unknown.
    """
    from rich.console import Console

    console = Console(stderr=True)
    # Of several processes the first one shows what it does.
    if _is_open.get() or os.environ.get("RANK", "0") != "0" or (console.is_jupyter and not is_live(console)):
        yield lambda: None
        return
    token = _is_open.set(True)
    try:
        with _show_bar(console, what, total) if is_live(console) else _print_lines(what, total) as advance:
            yield advance
    finally:
        _is_open.reset(token)


@contextmanager
def _show_bar(console: Any, what: str, total: int | None) -> Iterator[Callable[[], None]]:
    from rich.progress import Progress as Bar

    # A bar with steps is drawn by `advance` alone: a thread would disturb what is measured between them.
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
            left = spell_left(done, total or 0, times.elapsed_s)
            print(f"{what}: {done}{f' of {total}' if total else ''}{left}", file=sys.stderr, flush=True)

    # The first step may be long.
    timer = threading.Timer(QUIET_S, print, (f"{what} ...",), {"file": sys.stderr, "flush": True})
    timer.daemon = True
    timer.start()
    try:
        yield advance
    finally:
        timer.cancel()
