"""Starting a command's local worker processes, and whether this process is one."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import NoReturn

import typer

__all__ = ["is_rank_0", "is_worker", "start_workers"]


def is_worker() -> bool:
    """Whether this process was started as a worker, by torchrun or by `start_workers`."""
    return "TORCHELASTIC_RUN_ID" in os.environ or "WORLD_SIZE" in os.environ


def is_rank_0() -> bool:
    """Whether this process prints and writes; a process alone does."""
    return os.environ.get("RANK", "0") == "0"


def start_workers(
    count: int, *, more: Sequence[str] = (), max_restarts: int = 0, fewest: int | None = None
) -> NoReturn:
    """Runs this command line in `count` local processes, and exits with their status.

    Args:
        more: arguments to add.
        max_restarts, fewest: see `runtime.failure.launch.launch`.
    """
    from pipedream.runtime.failure.launch import launch  # loads torch

    arguments = ["-m", "pipedream", *sys.argv[1:], *more]
    raise typer.Exit(launch(count, arguments, max_restarts=max_restarts, fewest=fewest))
