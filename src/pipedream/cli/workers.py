"""A command's local worker processes."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import NoReturn

import typer

from pipedream.runtime.comm.launcher import read_launcher

__all__ = ["is_rank_0", "is_worker", "start_workers"]


def is_worker() -> bool:
    """Whether torchrun, srun, mpirun or `start_workers` started this process."""
    read_launcher()
    return "TORCHELASTIC_RUN_ID" in os.environ or "WORLD_SIZE" in os.environ


def is_rank_0() -> bool:
    """Whether this process prints and writes."""
    read_launcher()
    return os.environ.get("RANK", "0") == "0"


def start_workers(
    count: int, *, more: Sequence[str] = (), max_restarts: int = 0, fewest: int | None = None
) -> NoReturn:
    """Runs this command line, with `more` arguments, in `count` local processes, and exits with their status."""
    from pipedream.runtime.failure.launch import launch  # loads torch

    arguments = ["-m", "pipedream", *sys.argv[1:], *more]
    raise typer.Exit(launch(count, arguments, max_restarts=max_restarts, fewest=fewest))
