"""Starts several processes of one function, joined by gloo, and brings home what each returned or raised.

The processes come from a fork server that has imported torch once, and meet in a store that this process holds, as the
workers of torchrun meet in that of their agent.
"""

from __future__ import annotations

import multiprocessing
import pickle
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class End:
    """How a process ended.

    Attributes:
        value: what the function returned.
        error: the exception that it raised; None where it returned, or where the process died.
        exit_code: 0, 1 after an exception, or what the process gave itself; None where it had to be killed.
        seconds: from when all had met to its end.
    """

    value: Any
    error: BaseException | None
    exit_code: int | None
    seconds: float


def launch(function: Callable[..., Any], workers: int, *args: Any, timeout_s: float = 120.0) -> list[End]:
    """Runs ``function(*args)`` in as many processes as there are workers; never raises what they raise."""
    _store, pipes, processes = _start(_work, workers, timeout_s, function, args)
    for pipe in pipes:
        pipe.poll(timeout_s)
        with suppress(EOFError, ConnectionResetError):
            pipe.recv_bytes()
    start = time.monotonic()
    ends: dict[int, tuple[Any, BaseException | None]] = {}
    at: dict[int, float] = {}
    while len(at) < workers and time.monotonic() < start + timeout_s:
        open_ = [pipe for rank, pipe in enumerate(pipes) if rank not in at]
        for pipe in wait(open_, timeout=0.2):
            rank = pipes.index(pipe)
            at[rank] = time.monotonic() - start
            try:
                ends[rank] = pickle.loads(pipe.recv_bytes())
            except (EOFError, ConnectionResetError):
                ends[rank] = (None, None)
    for rank, process in enumerate(processes):
        process.join(timeout=10.0 if rank in at else 0.0)
        if process.is_alive():
            process.kill()
            process.join()
            at.setdefault(rank, time.monotonic() - start)
            ends.setdefault(rank, (None, TimeoutError(f"rank {rank} did not end within {timeout_s} s")))
        pipes[rank].close()
    codes = [None if process.exitcode == -9 else process.exitcode for process in processes]
    return [End(*ends[rank], codes[rank], at[rank]) for rank in range(workers)]


def results(function: Callable[..., Any], workers: int, *args: Any, timeout_s: float = 120.0) -> list[Any]:
    """Returns what the function returned in each process; raises the first exception of any."""
    ends = launch(function, workers, *args, timeout_s=timeout_s)
    for rank, end in enumerate(ends):
        assert end.error is not None or end.exit_code == 0, f"rank {rank} ended with {end.exit_code}"
    return values(ends)


def values(ends: Sequence[End]) -> list[Any]:
    for end in sorted(ends, key=lambda end: end.exit_code is not None):  # a process that died says less
        if end.error is not None:
            raise end.error
    return [end.value for end in ends]


def _start(target: Callable[..., None], workers: int, timeout_s: float, *args: Any) -> tuple[Any, list[Any], list[Any]]:
    """Starts processes of a function of a pipe, a rank, the workers and a port; returns their store, pipes and them."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch.distributed", "pipedream.pipeline", "hypothesis", "pytest"])
    store = dist.TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=timeout_s), wait_for_workers=False)
    pipes, processes = [], []
    for rank in range(workers):
        parent_end, child_end = context.Pipe()
        process = context.Process(target=target, args=(child_end, rank, workers, store.port, *args), daemon=True)
        process.start()
        child_end.close()
        pipes.append(parent_end)
        processes.append(process)
    return store, pipes, processes


def _meet(rank: int, workers: int, port: int) -> None:
    torch.set_num_threads(1)
    # Loaders start processes as a user's would. By the fork server, whose child this is, each imports torch: 2 s.
    multiprocessing.set_start_method(None, force=True)
    store = dist.TCPStore("127.0.0.1", port, None, False, timedelta(seconds=60))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=workers)


def _work(pipe: Connection, rank: int, workers: int, port: int, function: Callable[..., Any], args: Any) -> None:
    _meet(rank, workers, port)
    pipe.send_bytes(b"met")
    answer = _answer(function, args)
    pipe.send_bytes(answer)
    pipe.close()
    if pickle.loads(answer)[1] is not None:
        raise SystemExit(1)
    dist.barrier()
    dist.destroy_process_group()


def _answer(function: Callable[..., Any], args: Any) -> bytes:
    """Returns what a function returned and what it raised."""
    try:
        return pickle.dumps((function(*args), None))
    except BaseException as error:
        try:
            answer = pickle.dumps((None, error))
            pickle.loads(answer)
            return answer
        except Exception:  # an exception that cannot travel
            return pickle.dumps((None, RuntimeError(f"{type(error).__name__}: {error}")))


@cache
def team(workers: int) -> Team:
    """Returns processes that stay for the tests of a session: four take two seconds to start.

    For what leaves them as it found them, and does not measure them; `results` starts others.
    """
    return Team(workers)


class Team:
    """Processes that stay for many calls; after an exception, or past the time, others take their place."""

    def __init__(self, workers: int) -> None:
        self.workers = workers
        self._processes: list[Any] = []
        self._pipes: list[Connection] = []

    def results(self, function: Callable[..., Any], *args: Any, timeout_s: float = 120.0) -> list[Any]:
        """Returns what the function returned in each process; raises the first exception of any."""
        return values(self.launch(function, *args, timeout_s=timeout_s))

    def launch(self, function: Callable[..., Any], *args: Any, timeout_s: float = 120.0) -> list[End]:
        """Runs ``function(*args)`` in all of them; never raises what they raise."""
        if not self._processes:
            self._store, self._pipes, self._processes = _start(_serve, self.workers, 60.0)
        for pipe in self._pipes:
            pipe.send((function, args))
        start = time.monotonic()
        ends = []
        for rank, (pipe, process) in enumerate(zip(self._pipes, self._processes, strict=True)):
            value: Any = None
            error: BaseException | None = TimeoutError(f"rank {rank} did not end within {timeout_s} s")
            if pipe.poll(max(0.0, start + timeout_s - time.monotonic())):
                try:
                    value, error = pickle.loads(pipe.recv_bytes())
                except (EOFError, ConnectionResetError):
                    process.join(timeout=10.0)
                    error = RuntimeError(f"rank {rank} died with {process.exitcode}")
            ends.append(End(value, error, process.exitcode, time.monotonic() - start))
        if any(end.error is not None for end in ends):
            self.close()
        return ends

    def close(self) -> None:
        for pipe, process in zip(self._pipes, self._processes, strict=True):
            pipe.close()
            process.kill()
            process.join()
        self._pipes, self._processes = [], []


def _serve(pipe: Connection, rank: int, workers: int, port: int) -> None:
    _meet(rank, workers, port)
    while True:
        try:
            function, args = pipe.recv()
        except EOFError:
            return
        pipe.send_bytes(_answer(function, args))
