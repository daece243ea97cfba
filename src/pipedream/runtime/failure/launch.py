"""Starting the workers of a local run: torch's elastic launcher, with one message when it fails."""

from __future__ import annotations

import logging
import os
import signal
import sys
import tempfile
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs, SignalException, Std
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from pipedream.core.errors import BAD_CALL
from pipedream.runtime.failure import loopback, notes

__all__ = ["launch", "set_threads"]


def set_threads(processes: int) -> None:
    """Gives each of several local processes its share of the cores; leaves a lone process as it is."""
    local = int(os.environ.get("LOCAL_WORLD_SIZE", processes))
    if local > 1:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // local))


@dataclass(frozen=True)
class _Failure:
    """How an attempt failed: what to say, and with which exit status to end."""

    text: str
    status: int


def launch(
    workers: int,
    arguments: Sequence[str],
    *,
    silent: bool = False,
    max_restarts: int = 0,
    fewest: int | None = None,
) -> int:
    """Runs ``python ARGUMENTS`` in so many local processes under torch's elastic agent.

    Args:
        workers: processes.
        arguments: of each; after a failure with fewer workers, ``--workers N`` is added to them.
        silent: drop the workers' standard output.
        max_restarts: after so many failures all are started again (TORCHELASTIC_RESTART_COUNT tells them how often);
            not after a wrong call or bad input (exit status 2), which would only fail again.
        fewest: when restarts are used up, start with one worker fewer, down to so many; None does not.

    Returns the exit status: 0; 130 after Ctrl-C; otherwise that of the worker that failed first. Its message is
    printed on standard error, once; so is each restart.
    """
    _quiet_torch()
    loopback.register()
    loopback.restrict_gloo_to_loopback()
    restarts = attempt = 0
    extra: list[str] = []
    while True:
        ended = _attempt(workers, attempt, [*arguments, *extra], silent)
        if isinstance(ended, int):
            return ended
        if ended.status == BAD_CALL:
            print(ended.text, file=sys.stderr, flush=True)
            return BAD_CALL
        after = "after: " + ended.text.removeprefix("pipedream: ")
        if restarts < max_restarts:
            restarts += 1
            print(f"pipedream: restart {restarts} of {max_restarts} {after}", file=sys.stderr, flush=True)
        elif fewest is not None and workers > fewest:
            workers -= 1
            extra = ["--workers", str(workers)]
            print(f"pipedream: going on with one worker fewer, {workers}, {after}", file=sys.stderr, flush=True)
        else:
            print(ended.text, file=sys.stderr, flush=True)
            return ended.status
        attempt += 1


def _attempt(workers: int, attempt: int, arguments: Sequence[str], silent: bool) -> int | _Failure:
    """Runs the workers once; returns the exit status where they succeeded or a signal ended them."""
    with tempfile.TemporaryDirectory(prefix="pipedream-") as folder:
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=workers,
            run_id=f"{notes.RUN_ID_PREFIX}{uuid.uuid4().hex}",
            rdzv_backend=loopback.BACKEND,
            rdzv_endpoint=f"{loopback.ADDRESS}:0",
            local_addr=loopback.ADDRESS,
            max_restarts=0,  # one launch an attempt: the agent would start a wrong call again too
            monitor_interval=0.1,
            logs_specs=DefaultLogsSpecs(log_dir=folder, redirects=Std.OUT if silent else Std.NONE),
        )
        threads = os.environ.get("OMP_NUM_THREADS", max(1, (os.cpu_count() or 1) // workers))
        # What the agent sets for its workers wins over this process's variables, so env sets the count after it.
        variables = (f"OMP_NUM_THREADS={threads}", f"TORCHELASTIC_RESTART_COUNT={attempt}")
        try:
            elastic_launch(config, "env")(*variables, sys.executable, *arguments)
        except ChildFailedError as error:
            rank, first = error.get_first_failure()
            status = first.exitcode if first.exitcode in (1, BAD_CALL) else 1
            text = notes.read_verdict(Path(folder)) or notes.read_error(first.error_file)
            return _Failure(text or _silent_end(rank, first.exitcode, notes.read_place(Path(folder), rank)), status)
        except (SignalException, KeyboardInterrupt) as error:
            number = getattr(error, "sigval", signal.SIGINT)
            return 128 + int(number)
    return 0


def _quiet_torch() -> None:
    """What goes wrong is said here, once: torch's own loggers and the warnings of its stores are silent."""
    for name in [name for name in logging.root.manager.loggerDict if name.startswith("torch.distributed")]:
        logging.getLogger(name).setLevel(logging.CRITICAL)
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")


def _silent_end(rank: int, exitcode: int, place: str | None) -> str:
    """Returns what there is to say of a worker that left no word."""
    last = "it had not built its pipeline" if place is None else f"it was last in {place}"
    if exitcode >= 0:
        return f"pipedream: rank {rank} ended with exit status {exitcode} and left no message; {last}"
    number = signal.Signals(-exitcode)
    advice = "\nno worker did that: often it is the system, for want of memory (dmesg tells)"
    return f"pipedream: rank {rank} was ended by {number.name}; {last}{advice if number is signal.SIGKILL else ''}"
