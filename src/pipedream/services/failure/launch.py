"""Starts the workers of a local run, restarts them after failures, and prints one message for each failure.

Workers connect to a store that listens on 127.0.0.1 only; torch's own listens on all interfaces, without a password.

This module does not import torch, which reads some environment variables as it is imported: `import_for_workers` sets
them first.
"""

import os
import re
import shutil
import signal
import sys
import tempfile
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

from pipedream._version import hash_sources
from pipedream.core.errors import BAD_CALL
from pipedream.runtime.activity import Terminated
from pipedream.services.failure.agent import Agent, Worker, count_threads
from pipedream.services.failure.processes import (
    LOST_CONNECTION,
    RankProcess,
    read_doing,
    read_error,
    read_verdict,
    write_lost,
)

_INTERRUPTED = (128 + signal.SIGINT, Terminated.STATUS)
_PRINTED = "pipedream: the message above"


def set_threads(processes: int) -> None:
    """Gives each of several local processes its share of the cores."""
    local = int(os.environ.get("LOCAL_WORLD_SIZE", processes))
    if local > 1:
        import torch  # only workers come here

        # Slurm and taskset may allow this process fewer cores.
        torch.set_num_threads(max(1, min((os.cpu_count() or 1) // local, len(os.sched_getaffinity(0)))))


@dataclass(frozen=True)
class _Failure:
    """The message to print, the exit status, and the ranks that the run could continue without."""

    text: str
    status: int
    lost: tuple[int, ...]


def import_for_workers(modules: Sequence[str], workers: int) -> None:
    """Imports what workers need before `launch` forks them, under the workers' environment variables."""
    threads = os.environ.get("OMP_NUM_THREADS")
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # errors are printed here, once
    os.environ["OMP_NUM_THREADS"] = count_threads(workers)
    for module in modules:
        import_module(module)
    hash_sources()  # now, before another version may be installed
    if threads is None:
        del os.environ["OMP_NUM_THREADS"]


def launch(
    workers: int,
    arguments: Sequence[str],
    *,
    silent: bool = False,
    max_restarts: int = 0,
    fewest: int | None = None,
    forks: bool = False,
) -> int:
    """Runs ``python ARGUMENTS`` in `workers` local processes.

    All of them end with this process, and a stopped one is killed.

    Args:
        arguments: given to each process; with fewer workers, ``--workers N`` is added.
        silent: hides what they print.
        max_restarts: after failures (TORCHELASTIC_RESTART_COUNT counts them); not after exit status 2, bad input.
        fewest: after the restarts, continue without lost workers, down to this number (`write_lost`).
        forks: where possible, workers are forks of this process, which has computed nothing (`import_for_workers`).

    Returns the exit status: 0; 130 after Ctrl-C, 143 after SIGTERM; otherwise that of the worker that failed first.
    """
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # unless the user has chosen another interface
    _remove_abandoned_folders()
    folders = [_make_folder()]
    try:
        with Agent(silent=silent, forks=forks) as agent:
            return _run_attempts(workers, arguments, agent, folders, max_restarts, fewest)
    finally:
        for folder in folders:
            shutil.rmtree(folder, ignore_errors=True)


def _run_attempts(
    workers: int, arguments: Sequence[str], agent: Agent, folders: list[Path], max_restarts: int, fewest: int | None
) -> int:
    def make_attempt_folder() -> Path:
        if not folders[-1].exists():  # a cleaner of temporary files may have removed it, with the earlier attempts
            folders.append(_make_folder())
        attempt_folder = folders[-1] / str(attempt)
        attempt_folder.mkdir(exist_ok=True)
        return attempt_folder

    restarts = attempt = 0
    extra_arguments: list[str] = []
    while True:
        attempt_folder = make_attempt_folder()
        ended = agent.run(workers, attempt, [*arguments, *extra_arguments], attempt_folder)
        if agent.signals:
            return 128 + agent.signals[0]
        failures = [worker for worker in ended if worker.status]
        if not failures or failures[0].status in _INTERRUPTED:
            return failures[0].status if failures else 0
        failure = _judge(failures, attempt_folder)
        reason = "after: " + failure.text.removeprefix("pipedream: ")
        may_continue = failure.status != BAD_CALL
        if may_continue and restarts < max_restarts:
            restarts += 1
            print(f"pipedream: restart {restarts} of {max_restarts} {reason}", file=sys.stderr, flush=True)
        elif may_continue and fewest is not None and workers > fewest:
            lost = failure.lost[: workers - fewest]
            write_lost(make_attempt_folder(), lost)
            workers -= len(lost)
            extra_arguments = ["--workers", str(workers)]
            lost_text = "one worker" if len(lost) == 1 else f"{len(lost)} workers"
            print(f"pipedream: continuing with {lost_text} fewer, {workers}, {reason}", file=sys.stderr, flush=True)
        else:
            if failure.text != _PRINTED:
                print(failure.text, file=sys.stderr, flush=True)
            return failure.status
        attempt += 1


def _judge(failures: Sequence[Worker], folder: Path) -> _Failure:
    """Returns why a run failed; `failures` are its failed workers, in the order in which they ended."""
    first = failures[0]
    status = BAD_CALL if any(failure.status == BAD_CALL for failure in failures) else 1
    text = read_verdict(folder)
    if text is None and (killed := [failure.rank for failure in failures if failure.was_stopped]):
        text = _describe_stopped(killed, folder)
    text = text or read_error(first.error_file)
    if text is None and first.status >= 0:  # perhaps because of another worker, which ended a little later
        text = next(filter(None, (read_error(failure.error_file) for failure in failures)), None)
        if text is None and any(failure.error_file.exists() for failure in failures):
            text = _PRINTED  # by the worker itself, which had no space to leave it
    if text is not None and LOST_CONNECTION in text:  # the other worker's end is the cause
        without_message = [failure for failure in failures if not read_error(failure.error_file)]
        for failure in [failure for failure in without_message if failure.was_lost or failure.status > 1][:1]:
            first, text = failure, None
    lost = tuple(failure.rank for failure in failures if failure.was_lost) or (first.rank,)
    return _Failure(text or _describe_silent_end(first, read_doing(folder, first.rank)), status, lost)


def _make_folder() -> Path:
    # Not a TemporaryDirectory: forks would have it too, and the first that ends would remove the folder.
    return Path(tempfile.mkdtemp(prefix=_make_folder_prefix(RankProcess.this())))


def _make_folder_prefix(launcher: RankProcess) -> str:
    return f"pipedream-{zlib.crc32(launcher.host.encode()):08x}-{launcher.pid}-{launcher.started}-"


def _remove_abandoned_folders() -> None:
    """Removes the temporary folders of this machine's killed launchers whose process ids are visible here."""
    for folder in Path(tempfile.gettempdir()).glob("pipedream-*"):
        if name := re.match(r"(pipedream-\w+-)(\d+)-\d+-", folder.name):
            current_prefix = _make_folder_prefix(RankProcess.of(int(name[2])))
            if current_prefix.startswith(name[1]) and not folder.name.startswith(current_prefix):
                shutil.rmtree(folder, ignore_errors=True)


def _describe_stopped(ranks: Sequence[int], folder: Path) -> str:
    places = "; ".join(f"rank {rank} {_describe_last(read_doing(folder, rank))}" for rank in sorted(ranks))
    return f"pipedream: a worker was stopped (SIGSTOP, Ctrl-Z, a frozen container) and was killed: {places}"


def _describe_last(doing: str | None) -> str:
    return "had not built its pipeline" if doing is None else f"was last in {doing}"


def _describe_silent_end(worker: Worker, doing: str | None) -> str:
    rank, last = worker.rank, f"it {_describe_last(doing)}"
    if worker.status >= 0:
        return f"pipedream: rank {rank} ended with exit status {worker.status} and left no message; {last}"
    number = signal.Signals(-worker.status)
    advice = "\nnot by another worker: often the system does so when it is out of memory (see dmesg)"
    return f"pipedream: rank {rank} was ended by {number.name}; {last}{advice if number is signal.SIGKILL else ''}"
