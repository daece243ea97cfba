"""Starting the workers of a local run: torch's elastic launcher, with one message when it fails.

The workers meet at a store that listens on 127.0.0.1 only; torch's own listens on all interfaces, without a password.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
import signal
import socket
import sys
import tempfile
import uuid
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch._C._distributed_c10d import TCPStore  # torch.distributed re-exports it privately
from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs, SignalException, Std
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from pipedream.core.errors import BAD_CALL
from pipedream.runtime.failure.processes import (
    LOST_CONNECTION,
    RUN_ID_PREFIX,
    RankProcess,
    children,
    launcher_variable,
    read_error,
    read_place,
    read_verdict,
    watch_stopped,
)

_ADDRESS = "127.0.0.1"
_BACKEND = "pipedream-loopback"
_AGENTS_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
_INTERRUPTED = 128 + signal.SIGINT


def set_threads(processes: int) -> None:
    """Gives each of several local processes its share of the cores."""
    local = int(os.environ.get("LOCAL_WORLD_SIZE", processes))
    if local > 1:
        # Slurm and taskset may allow this process fewer cores.
        torch.set_num_threads(max(1, min((os.cpu_count() or 1) // local, len(os.sched_getaffinity(0)))))


@dataclass(frozen=True)
class _Failure:
    """The message to print, and the exit status."""

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
    """Runs ``python ARGUMENTS`` in `workers` local processes under torch's elastic agent.

    All of them end with this process, and a stopped one is killed.

    Args:
        arguments: given to each process; with fewer workers, ``--workers N`` is added.
        max_restarts: after failures (TORCHELASTIC_RESTART_COUNT counts them); not after exit status 2, bad input.
        fewest: after the restarts, start with one worker fewer, down to this number.

    Returns the exit status: 0; 130 after Ctrl-C; otherwise that of the worker that failed first.
    """
    _silence_torch()
    _remove_abandoned_folders()
    rendezvous_handler_registry.register(_BACKEND, _make_rendezvous)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # gloo too, or as the user has chosen
    before = {number: signal.getsignal(number) for number in _AGENTS_SIGNALS}
    try:
        return _run_attempts(workers, arguments, silent, max_restarts, fewest)
    except (SignalException, KeyboardInterrupt) as error:
        return 128 + int(getattr(error, "sigval", signal.SIGINT))
    finally:
        # The agent leaves functions there that raise.
        for number, former in before.items():
            signal.signal(number, former)


def _run_attempts(workers: int, arguments: Sequence[str], silent: bool, max_restarts: int, fewest: int | None) -> int:
    restarts = attempt = 0
    extra: list[str] = []
    while True:
        ended = _run_attempt(workers, attempt, [*arguments, *extra], silent)
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
            print(f"pipedream: continuing with one worker fewer, {workers}, {after}", file=sys.stderr, flush=True)
        else:
            print(ended.text, file=sys.stderr, flush=True)
            return ended.status
        attempt += 1


def _run_attempt(workers: int, attempt: int, arguments: Sequence[str], silent: bool) -> int | _Failure:
    """Returns the exit status after success, or after Ctrl-C that a worker was sent."""
    stopped: set[int] = set()

    def kill(pid: int) -> None:
        stopped.add(pid)
        RankProcess.of(pid).kill()

    with tempfile.TemporaryDirectory(prefix=_begin_folder_name(RankProcess.this())) as folder:
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=workers,
            run_id=f"{RUN_ID_PREFIX}{uuid.uuid4().hex}",
            rdzv_backend=_BACKEND,
            rdzv_endpoint=f"{_ADDRESS}:0",
            local_addr=_ADDRESS,
            max_restarts=0,  # the agent would restart a wrong call too
            monitor_interval=0.1,
            logs_specs=DefaultLogsSpecs(log_dir=folder, redirects=Std.OUT if silent else Std.NONE),
        )
        threads = os.environ.get("OMP_NUM_THREADS", max(1, (os.cpu_count() or 1) // workers))
        # `env` sets the count after the agent has overridden it.
        variables = (f"OMP_NUM_THREADS={threads}", f"TORCHELASTIC_RESTART_COUNT={attempt}", launcher_variable())
        end_watch = watch_stopped(children, kill)
        try:
            elastic_launch(config, "env")(*variables, sys.executable, *arguments)
        except ChildFailedError as error:
            rank, first = error.get_first_failure()
            if first.exitcode == _INTERRUPTED:
                return _INTERRUPTED
            failures = sorted(error.failures.values(), key=lambda failure: failure.timestamp)
            status = BAD_CALL if any(failure.exitcode == BAD_CALL for failure in failures) else 1
            text = read_verdict(Path(folder))
            if text is None and (killed := [r for r, failure in error.failures.items() if failure.pid in stopped]):
                text = _describe_stopped(killed, Path(folder))
            text = text or read_error(first.error_file)
            if text is None and first.exitcode >= 0:  # because of another worker, which may end a little later
                text = next(filter(None, (read_error(failure.error_file) for failure in failures)), None)
            if text is not None and LOST_CONNECTION in text:  # noticed first; how the other one ended says more
                speechless = [failure for failure in failures if not read_error(failure.error_file)]
                for failure in [failure for failure in speechless if failure.exitcode not in (1, -signal.SIGTERM)][:1]:
                    rank, first, text = failure.local_rank, failure, None
            return _Failure(text or _describe_silent_end(rank, first.exitcode, read_place(Path(folder), rank)), status)
        finally:
            end_watch()
    return 0


def _begin_folder_name(launcher: RankProcess) -> str:
    return f"pipedream-{zlib.crc32(launcher.host.encode()):08x}-{launcher.pid}-{launcher.started}-"


def _remove_abandoned_folders() -> None:
    """Removes the temporary folders of killed launchers of this machine, as far as its process ids are visible here."""
    for folder in Path(tempfile.gettempdir()).glob("pipedream-*"):
        if name := re.match(r"(pipedream-\w+-)(\d+)-\d+-", folder.name):
            in_its_place = _begin_folder_name(RankProcess.of(int(name[2])))
            if in_its_place.startswith(name[1]) and not folder.name.startswith(in_its_place):
                shutil.rmtree(folder, ignore_errors=True)


def _silence_torch() -> None:
    """Errors are printed here, once."""
    for name in [name for name in logging.root.manager.loggerDict if name.startswith("torch.distributed")]:
        logging.getLogger(name).setLevel(logging.CRITICAL)
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")


def _describe_stopped(ranks: Sequence[int], folder: Path) -> str:
    places = "; ".join(f"rank {rank} {_describe_last(read_place(folder, rank))}" for rank in sorted(ranks))
    return f"pipedream: a worker was stopped (SIGSTOP, Ctrl-Z, a frozen container) and was killed: {places}"


def _describe_last(place: str | None) -> str:
    return "had not built its pipeline" if place is None else f"was last in {place}"


def _describe_silent_end(rank: int, exitcode: int, place: str | None) -> str:
    last = f"it {_describe_last(place)}"
    if exitcode >= 0:
        return f"pipedream: rank {rank} ended with exit status {exitcode} and left no message; {last}"
    number = signal.Signals(-exitcode)
    advice = "\nnot by another worker: often the system does so when it is out of memory (see dmesg)"
    return f"pipedream: rank {rank} was ended by {number.name}; {last}{advice if number is signal.SIGKILL else ''}"


class _LoopbackRendezvous(StaticTCPRendezvous):
    def get_backend(self) -> str:
        return _BACKEND

    def next_rendezvous(self) -> RendezvousInfo:
        listening = socket.create_server((_ADDRESS, 0), backlog=4096)
        port = listening.getsockname()[1]
        # torch itself can only ask for a port of all interfaces.
        store = TCPStore(_ADDRESS, port, is_master=True, wait_for_workers=False, master_listen_fd=listening.detach())
        return RendezvousInfo(store, 0, 1, RendezvousStoreInfo(_ADDRESS, port))


def _make_rendezvous(parameters: RendezvousParameters) -> RendezvousHandler:
    return _LoopbackRendezvous(_ADDRESS, 0, 0, 1, parameters.run_id, 60)
