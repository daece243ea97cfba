"""Starting the workers of a local run: torch's elastic launcher, with one message when it fails."""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import tempfile
import time
import uuid
from collections.abc import Sequence
from pathlib import Path

import torch
from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs, SignalException, Std
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

__all__ = ["launch", "leave_word", "set_threads"]


def set_threads(processes: int) -> None:
    """Gives each of several local processes its share of the cores; leaves a lone process as it is."""
    local = int(os.environ.get("LOCAL_WORLD_SIZE", processes))
    if local > 1:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // local))


def launch(workers: int, arguments: Sequence[str], *, silent: bool = False) -> int:
    """Runs ``python ARGUMENTS`` in so many local processes under torch's elastic agent.

    With `silent` the workers' standard output is dropped.

    Returns the exit status: 0; 130 after Ctrl-C; otherwise that of the worker that failed first, whose message
    is printed on standard error, once.
    """
    # Each of its modules has a logger with a level of its own; what goes wrong is said below, once.
    for name in [name for name in logging.root.manager.loggerDict if name.startswith("torch.distributed")]:
        logging.getLogger(name).setLevel(logging.CRITICAL)
    # Only loopback: a local run is nobody else's business.
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=workers,
        run_id=f"pipedream-{uuid.uuid4().hex}",
        rdzv_backend="c10d",
        rdzv_endpoint="127.0.0.1:0",
        local_addr="127.0.0.1",
        max_restarts=0,
        monitor_interval=0.1,
        logs_specs=_silence() if silent else DefaultLogsSpecs(),
    )
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // workers)))
    try:
        elastic_launch(config, sys.executable)(*arguments)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        print(_words(rank, failure.exitcode, failure.error_file), file=sys.stderr, flush=True)
        return failure.exitcode if failure.exitcode in (1, 2) else 1
    except (SignalException, KeyboardInterrupt) as error:
        number = getattr(error, "sigval", signal.SIGINT)
        return 128 + int(number)
    return 0


def _silence() -> DefaultLogsSpecs:
    return DefaultLogsSpecs(log_dir=tempfile.mkdtemp(prefix="pipedream-"), redirects=Std.OUT)


def leave_word(message: str) -> bool:
    """Leaves a failing worker's message where its elastic agent looks for it; tells whether there is one."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not path:
        return False
    body = {"message": message, "extraInfo": {"py_callstack": "", "timestamp": str(int(time.time()))}}
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text(json.dumps({"message": body}), encoding="utf-8")
    return True


def _words(rank: int, exitcode: int, error_file: str) -> str:
    try:
        return str(json.loads(Path(error_file).read_text(encoding="utf-8"))["message"]["message"])
    except (OSError, ValueError, KeyError, TypeError):
        pass
    if exitcode < 0:
        return f"rank {rank} was ended by {signal.Signals(-exitcode).name}; the other workers were stopped"
    return f"rank {rank} ended with exit status {exitcode} and left no message; the other workers were stopped"
