"""Progress bars on standard error, in a terminal or a notebook; elsewhere nothing is shown."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from importlib.util import find_spec
from typing import Any

_is_open = ContextVar("is_open", default=False)
"""A bar is shown; a bar inside another one is not."""


def is_live(console: Any) -> bool:
    """Returns whether a rich Console can draw over what it has drawn: a terminal, or a notebook that has ipywidgets."""
    return bool(console.is_terminal or (console.is_jupyter and find_spec("ipywidgets") is not None))


@contextmanager
def progress(what: str, total: int | None = None) -> Iterator[Callable[[], None]]:
    """Shows a bar, and gives the function that advances it by one step.

    Args:
        total: steps; None if unknown.
    """
    from rich.console import Console
    from rich.progress import Progress as Bar

    console = Console(stderr=True)
    # Of several processes the first one shows what it does.
    if _is_open.get() or not is_live(console) or os.environ.get("RANK", "0") != "0":
        yield lambda: None
        return
    token = _is_open.set(True)
    try:
        # A bar with steps is drawn by `advance` alone: a thread would disturb what is measured between them.
        with Bar(console=console, transient=True, auto_refresh=total is None) as bar:
            task = bar.add_task(what, total=total)
            bar.refresh()

            def advance() -> None:
                bar.update(task, advance=1, refresh=True)

            yield advance
    finally:
        _is_open.reset(token)
