"""Runs a function in several processes, joined by gloo."""

import multiprocessing
import pickle
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import start_processes

_TIMEOUT = timedelta(seconds=120)


def run_in_processes(count: int, function: Callable[..., Any], keywords: Mapping[str, Any]) -> list[Any]:
    """Returns what ``function(**keywords)`` returns in each process.

    Raises:
        torch.multiprocessing.ProcessRaisedException: with the traceback of the first process that raises.
    """
    # The processes are forked from one that has imported these.
    multiprocessing.get_context("forkserver").set_forkserver_preload(["torch.distributed", "pipedream.pipeline"])
    with TemporaryDirectory() as folder:
        arguments = count, Path(folder), function, keywords
        start_processes(_run, arguments, count, start_method="forkserver")  # type: ignore[no-untyped-call]
        return [pickle.loads((Path(folder) / f"result{rank}").read_bytes()) for rank in range(count)]


def _run(rank: int, count: int, folder: Path, function: Callable[..., Any], keywords: Mapping[str, Any]) -> None:
    torch.set_num_threads(1)
    meeting_place = f"file://{folder / 'store'}"
    dist.init_process_group("gloo", init_method=meeting_place, rank=rank, world_size=count, timeout=_TIMEOUT)
    (folder / f"result{rank}").write_bytes(pickle.dumps(function(**keywords)))
    dist.destroy_process_group()
