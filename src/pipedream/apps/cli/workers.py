"""A command's local worker processes."""

import os
import sys
from collections.abc import Sequence
from typing import NoReturn

import typer

from pipedream.core.garbage import pause_collection
from pipedream.services.joining.launcher import read_launcher

_MANY = 8  # workers on a core


def is_worker() -> bool:
    """Returns whether torchrun, srun, mpirun or `start_workers` started this process."""
    read_launcher()
    return "TORCHELASTIC_RUN_ID" in os.environ or "WORLD_SIZE" in os.environ


def is_rank_0() -> bool:
    """Returns whether this process prints and writes."""
    read_launcher()
    return os.environ.get("RANK", "0") == "0"


def start_workers(
    count: int, *modules: str, more: Sequence[str] = (), max_restarts: int = 0, fewest: int | None = None
) -> NoReturn:
    """Runs this command line, with `more` arguments, in `count` local processes, and exits with their status.

    Args:
        modules: what the processes need is imported here, once for all of them.
        max_restarts, fewest: see `launch`.
    """
    from pipedream.services.failure.launch import import_for_workers, launch

    cores = len(os.sched_getaffinity(0))
    if count > _MANY * cores:
        text = f"pipedream: {count} workers take turns on {cores} core{'s' * (cores > 1)}, each with memory for torch"
        print(f"{text}; give fewer, or use several machines", file=sys.stderr, flush=True)
    with pause_collection(freeze="torch" not in sys.modules):  # what is there now may be a caller's
        import_for_workers(modules, count)
    arguments = ["-m", "pipedream", *sys.argv[1:], *more]
    status = launch(count, arguments, max_restarts=max_restarts, fewest=fewest, forks=True)
    raise typer.Exit(status)
