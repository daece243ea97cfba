"""Starts several processes of one function, joined by gloo, and brings home what each returned or raised.

The processes come from a fork server that has imported torch once, with torch._dynamo, which the first optimizer of a
process imports (six tenths of a second); and meet in a store that this process holds,
as the workers of torchrun meet in that of their agent.
"""

from __future__ import annotations

import multiprocessing
import pickle
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist

__all__ = ["End", "launch", "results"]


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


def launch(function: Callable[..., Any], workers: int, *args: Any, timeout_s: float = 60.0) -> list[End]:
    """Runs ``function(*args)`` in as many processes as there are workers; never raises what they raise."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch._dynamo", "torch.distributed", "pipedream.pipeline"])
    store = dist.TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=timeout_s), wait_for_workers=False)
    pipes, processes = [], []
    for rank in range(workers):
        here, there = context.Pipe(duplex=False)
        process = context.Process(target=_work, args=(there, rank, workers, store.port, function, args), daemon=True)
        process.start()
        there.close()
        pipes.append(here)
        processes.append(process)
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


def results(function: Callable[..., Any], workers: int, *args: Any, timeout_s: float = 60.0) -> list[Any]:
    """Returns what the function returned in each process; raises the first exception of any."""
    ends = launch(function, workers, *args, timeout_s=timeout_s)
    for rank, end in enumerate(ends):
        if end.error is not None:
            raise end.error
        assert end.exit_code == 0, f"rank {rank} ended with {end.exit_code}"
    return [end.value for end in ends]


def _work(pipe: Connection, rank: int, workers: int, port: int, function: Callable[..., Any], args: Any) -> None:
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, None, False, timedelta(seconds=60))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=workers)
    pipe.send_bytes(b"met")
    try:
        answer = pickle.dumps((function(*args), None))
        code = 0
    except BaseException as error:
        code = 1
        try:
            answer = pickle.dumps((None, error))
            pickle.loads(answer)
        except Exception:  # an exception that cannot travel
            answer = pickle.dumps((None, RuntimeError(f"{type(error).__name__}: {error}")))
    pipe.send_bytes(answer)
    pipe.close()
    if code:
        raise SystemExit(code)
    dist.barrier()
    dist.destroy_process_group()
