"""Processes that run what a benchmark asks for, one on each host of a slow network."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from scaffold import stop_processes

from pipedream import Profile
from pipedream.slow_links import Network

REAL = 2
"""Workers that compute, one core each; more wait for the profiled seconds."""


class Workers:
    """Workers that read what to do from their standard input, one JSON value a line; rank 0 answers."""

    def __init__(self, workers: list[subprocess.Popen[str]]) -> None:
        self.workers = workers

    def ask(self, case: dict[str, Any]) -> Any:
        """Returns rank 0's answer."""
        self.tell(case)
        return self.hear()

    def profile(self, model: str) -> Profile:
        """Returns a model's profile, measured on all workers at the same time."""
        return Profile.from_json(self.ask({"do": "profile", "model": model}))

    def cpu_s(self) -> float:
        """Returns the seconds of a core that the workers have used."""
        rows = [Path(f"/proc/{worker.pid}/stat").read_text().rpartition(")")[2].split() for worker in self.workers]
        return sum(int(row[11]) + int(row[12]) for row in rows) / os.sysconf("SC_CLK_TCK")

    def run_segments(self, request: dict[str, Any], limit: Callable[[], None]) -> tuple[list[float], Disturbance]:
        """Runs a plan on workers of benchmarks/prediction, which get ready without a limit of the links.

        Returns the seconds of a minibatch in each segment, and what disturbed them.
        """
        assert self.ask({"do": "run"} | request) == "ready"
        limit()
        disturbance = Disturbance(self.cpu_s)
        self.tell("go")
        return self.hear(), disturbance

    def tell(self, words: Any) -> None:
        """Sends a line to all."""
        for worker in self.workers:
            assert worker.stdin is not None
            worker.stdin.write(json.dumps(words) + "\n")
            worker.stdin.flush()

    def hear(self) -> Any:
        """Returns the next line of rank 0."""
        assert self.workers[0].stdout is not None
        line = self.workers[0].stdout.readline()
        if not line:
            raise SystemExit(f"a worker ended: {[worker.poll() for worker in self.workers]}")
        return json.loads(line)


ALLOCATOR = "glibc.malloc.hugetlb=1:glibc.malloc.mmap_threshold=4194304"
"""Of workers whose rate is measured: with huge pages, as the small ones of TIGHT_MALLOC cost a third of it."""


@contextmanager
def worker_processes(
    network: Network, count: int, *command: str, limit_bytes: int | None = None, computes: bool = True
) -> Iterator[Workers]:
    """Starts so many workers: a Python file and its arguments, on each of the first hosts.

    Args:
        computes: two workers have a core each; otherwise they go where there is room, as more do.
        limit_bytes: of a worker's memory, with Python and torch; what does not fit is refused by the kernel. Then
            glibc gives back large tensors: by itself it keeps gaps between them, up to a quarter of what is in use.
    """
    limit = () if limit_bytes is None else ("env", f"GLIBC_TUNABLES={ALLOCATOR}", "prlimit", f"--data={limit_bytes}")
    cores = sorted(os.sched_getaffinity(0))
    workers: list[subprocess.Popen[str]] = []
    try:
        for rank, host in enumerate(network.hosts[:count]):
            pinned = ("taskset", "-c", str(cores[rank])) if computes and count <= min(REAL, len(cores)) else ()
            variables = network.variables(rank, port=29500 + count) | {
                "WORLD_SIZE": str(count),
                "OMP_NUM_THREADS": "1",
                "TORCH_CPP_LOG_LEVEL": "ERROR",
            }
            run = host.inside(*limit, *pinned, sys.executable, *command)
            output = subprocess.PIPE if rank == 0 else subprocess.DEVNULL
            workers.append(
                subprocess.Popen(run, env=os.environ | variables, stdin=subprocess.PIPE, stdout=output, text=True)
            )
        yield Workers(workers)
        for worker in workers:
            assert worker.stdin is not None
            worker.stdin.close()
        for worker in workers:
            worker.wait(timeout=60)
    finally:
        stop_processes(workers)


class Disturbance:
    """What other processes take of the cores from now on.

    Args:
        own_s: returns the seconds of a core that the benchmark itself has used.
    """

    def __init__(self, own_s: Callable[[], float]) -> None:
        self._own_s = own_s
        self._busy_s, self._begin_s, self._start_s = _read_busy_s(), own_s(), time.monotonic()

    def share(self) -> float:
        """Returns the share of the cores' time that others took since this was made."""
        others_s = _read_busy_s() - self._busy_s - (self._own_s() - self._begin_s)
        return max(0.0, others_s / self._cores_s)

    def own_share(self) -> float:
        """Returns what the benchmark itself took."""
        return (self._own_s() - self._begin_s) / self._cores_s

    @property
    def _cores_s(self) -> float:
        return len(os.sched_getaffinity(0)) * (time.monotonic() - self._start_s)


def _read_busy_s() -> float:
    """Returns the seconds for which processes have used the machine's cores since it started."""
    ticks = Path("/proc/stat").read_text(encoding="ascii").split(maxsplit=4)
    return sum(map(int, ticks[1:4])) / os.sysconf("SC_CLK_TCK")


def answer_lines(answer: Callable[[dict[str, Any]], Any]) -> None:
    """Is one of `worker_processes`: answers what it reads until the input ends; rank 0 says the answers."""
    torch.set_num_threads(1)
    for line in sys.stdin:
        result = answer(json.loads(line))
        gc.collect()
        if os.environ["RANK"] == "0":
            say(result)
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


def say(value: Any) -> None:
    """Sends a line to the process that started this one."""
    print(json.dumps(value), flush=True)
