"""Starts several processes of one function, joined by gloo, and brings home what each returned or raised."""

import multiprocessing
import pickle
from collections.abc import Callable, Mapping
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore  # torch.distributed re-exports it privately


def start(
    processes: int, function: Callable[..., Any], keywords: Mapping[str, Any], timeout_s: float = 120.0
) -> list[Any]:
    """Returns what ``function(**keywords)`` returned in each process; raises the first exception of any."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch.distributed", "pipedream.pipeline"])
    store = TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=timeout_s), wait_for_workers=False)
    pipes, started = [], []
    for rank in range(processes):
        receiver, sender = context.Pipe(duplex=False)
        arguments = sender, rank, processes, store.port, function, keywords
        started.append(context.Process(target=_work, args=arguments, daemon=True))
        started[-1].start()
        sender.close()
        pipes.append(receiver)
    try:
        return [_receive(pipe, rank, timeout_s) for rank, pipe in enumerate(pipes)]
    finally:
        for process in started:
            process.join(timeout=1.0)
            process.kill()


def _receive(pipe: Connection, rank: int, timeout_s: float) -> Any:
    if not pipe.poll(timeout_s):
        raise TimeoutError(f"process {rank} did not end within {timeout_s:g} s")
    value, error = pickle.loads(pipe.recv_bytes())
    if error is not None:
        raise error
    return value


def _work(
    pipe: Connection, rank: int, processes: int, port: int, function: Callable[..., Any], keywords: Mapping[str, Any]
) -> None:
    torch.set_num_threads(1)
    store = TCPStore("127.0.0.1", port, None, False, timedelta(seconds=60))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=processes)
    try:
        answer = pickle.dumps((function(**keywords), None))
    except BaseException as error:
        answer = pickle.dumps((None, error))
    pipe.send_bytes(answer)
    pipe.close()
    dist.destroy_process_group()
