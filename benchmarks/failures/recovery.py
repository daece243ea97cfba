"""The run whose workers are killed: its recipe (this file), its plan and launcher, and when it has recovered."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from functools import cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import nn

import pipedream as pd
from pipedream.callbacks import Callback

MINIBATCHES, EVERY, KILLED_AFTER = 400, 20, 90
OFTEN = 5
SAVES_OFTEN = ("--checkpoint-every", str(OFTEN))
MINIBATCH_S = 0.02
SOURCE = Path(__file__).parents[2] / "src"


class _Batches:
    def __len__(self) -> int:
        return MINIBATCHES

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for number in range(MINIBATCHES):
            draw = torch.Generator().manual_seed(number)
            yield torch.rand(16, 64, generator=draw).double(), torch.randint(10, (16,), generator=draw)


class _Clock(Callback):
    def on_minibatch(self, pipeline: Any, done: Any) -> None:
        """Notes when a minibatch has ended, before and after the restart."""
        if pipeline.rank == 0 and "FINISHED" in os.environ:
            with Path(os.environ["FINISHED"]).open("a") as file:
                file.write(f"{os.environ['TORCHELASTIC_RESTART_COUNT']} {done.number} {time.time()} {os.getpid()}\n")
            time.sleep(MINIBATCH_S)  # not in the loader, which a restart asks for all minibatches of the epoch again

    def on_worker_lost(self, pipeline: Any, ranks: Any) -> None:
        """Keeps the plan that the run continues with."""
        if pipeline.rank == 0:
            pipeline.plan.save(
                f"{os.environ['FINISHED']}.{os.environ['TORCHELASTIC_RESTART_COUNT']}.{pipeline.drain()}"
            )


def recipe(seed: int = 0) -> pd.Recipe:
    torch.manual_seed(seed)
    layers = nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10)
    optimizer = partial(torch.optim.AdamW, lr=1e-3)
    loss, callbacks = nn.functional.cross_entropy, [_Clock()]
    return pd.Recipe(nn.Sequential(*layers).double(), loss, optimizer, _Batches(), epochs=1, callbacks=callbacks)


@cache
def make_plan(shape: tuple[int, ...]) -> pd.Plan:
    """Plans these replicas for the recipe, which is measured."""
    fresh = recipe()
    return pd.plan(pd.profile(fresh.model, fresh.first_batch()[0]), pd.Cluster.flat(sum(shape)), shape=shape)


def start(
    folder: Path,
    source: Path,
    workers: int,
    restarts: int,
    *more: str,
    by_torchrun: bool = False,
    errors: Any = subprocess.DEVNULL,
) -> subprocess.Popen[bytes]:
    """Starts the run, in which each finished minibatch adds a line to the file ``finished``."""
    launch, counts = [sys.executable, "-m"], ["--workers", str(workers), "--max-restarts", str(restarts)]
    if by_torchrun:
        counts[0] = "--nproc-per-node"
        launch += ["torch.distributed.run", "--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0"]
        launch, counts = [*launch, "--local-addr", "127.0.0.1", *counts, "-m"], []
    options = [*counts, "--out", str(folder / "run"), "--checkpoint-every", str(EVERY), *more]
    command = [*launch, "pipedream", "train", __file__, *options]
    variables = {"PYTHONPATH": str(source), "FINISHED": str(folder / "finished")}
    return subprocess.Popen(command, env=os.environ | variables, stdout=subprocess.DEVNULL, stderr=errors)


def time_recovery(source: Path, workers: int, restarts: int, victim: int, *more: str) -> tuple[float, int]:
    """Trains and kills the worker of a rank.

    Returns the seconds until the run has finished a minibatch again, and the minibatches that it repeats.
    """
    with TemporaryDirectory() as folder:
        finished = Path(folder, "finished")
        with start(Path(folder), source, workers, restarts, *more) as launcher:
            wait_until(lambda: len(read_finished(finished)) >= KILLED_AFTER, launcher)
            killed_s = time.time()
            os.kill(list_workers(launcher, workers)[victim], signal.SIGKILL)
            result = wait_for_restart(finished, killed_s, launcher)
            launcher.send_signal(signal.SIGTERM)
        return result


def wait_for_restart(finished: Path, killed_s: float, launcher: subprocess.Popen[bytes]) -> tuple[float, int]:
    """Returns the seconds until another process has finished a minibatch, and how many it repeats."""
    before = read_finished(finished)[0][3]
    wait_until(lambda: read_finished(finished)[-1][3] != before, launcher)
    rows = read_finished(finished)
    first = next(row for row in rows if row[3] != before)
    return first[2] - killed_s, max(int(row[1]) for row in rows if row[3] == before) - int(first[1]) + 1


def list_children(launcher: subprocess.Popen[bytes]) -> list[int]:
    """Returns the launcher's processes: the workers."""
    children = Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children")
    return [int(pid) for pid in children.read_text().split()] if children.exists() else []


def list_processes(variable: str) -> list[int]:
    """Returns the processes that were started with a variable, `NAME=VALUE`, and their forks."""
    pids = []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if variable.encode() in (process / "environ").read_bytes().split(b"\0"):
                pids.append(int(process.name))
    return pids


def read_finished(file: Path) -> list[list[float]]:
    """Returns (attempt, number, time, process of rank 0) of each minibatch."""
    return [[float(word) for word in line.split()] for line in file.read_text().splitlines()] if file.exists() else []


def list_workers(launcher: subprocess.Popen[bytes], workers: int) -> list[int]:
    """Returns the process ids of the workers, by rank."""
    return list_children(launcher)[-workers:]


def wait_until(is_reached: Any, launcher: subprocess.Popen[bytes], within_s: float = 120.0) -> None:
    end_s = time.monotonic() + within_s
    while not is_reached():
        if time.monotonic() > end_s:
            raise RuntimeError(f"the run has not come so far within {within_s:g} s")
        if launcher.poll() is not None:
            raise RuntimeError(f"the run has ended with exit status {launcher.returncode}")
        time.sleep(0.01)
