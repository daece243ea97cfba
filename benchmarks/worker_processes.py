"""The workers of the benchmark: processes that wait for cases, one in each namespace."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pipedream import Profile
from pipedream.slow_links import Network

__all__ = ["REAL", "Crew", "crew_of"]

REAL = 2
"""Workers that compute, one core each; more wait for the profiled seconds."""


class Crew:
    """Workers that wait for cases."""

    def __init__(self, network: Network, workers: list[subprocess.Popen[str]]) -> None:
        self.workers = workers
        self._network = network

    def asked(self, case: dict[str, Any]) -> Any:
        """Returns rank 0's answer."""
        self.tell(case)
        return self.heard()

    def profile(self, model: str) -> Profile:
        """Returns a model's profile, measured on all workers at the same time."""
        return Profile.from_json(self.asked({"do": "profile", "model": model}))

    def cpu_s(self) -> float:
        """Returns the seconds of a core that the workers have used."""
        rows = [Path(f"/proc/{worker.pid}/stat").read_text().rpartition(")")[2].split() for worker in self.workers]
        return sum(int(row[11]) + int(row[12]) for row in rows) / os.sysconf("SC_CLK_TCK")

    def tell(self, words: Any) -> None:
        """Sends a line to all."""
        for worker in self.workers:
            assert worker.stdin is not None
            worker.stdin.write(json.dumps(words) + "\n")
            worker.stdin.flush()

    def heard(self) -> Any:
        """Returns the next line of rank 0."""
        assert self.workers[0].stdout is not None
        line = self.workers[0].stdout.readline()
        if not line:
            raise SystemExit(f"a worker ended: {[worker.poll() for worker in self.workers]}")
        return json.loads(line)


@contextmanager
def crew_of(network: Network, count: int) -> Iterator[Crew]:
    """Starts so many workers, one in each namespace."""
    cores = sorted(os.sched_getaffinity(0))
    workers: list[subprocess.Popen[str]] = []
    try:
        for rank, host in enumerate(network.hosts[:count]):
            # Those that compute have a core each; those that wait go where there is room.
            pinned = ("taskset", "-c", str(cores[rank])) if count <= min(REAL, len(cores)) else ()
            variables = network.variables(rank, port=29500 + count) | {
                "WORLD_SIZE": str(count),
                "OMP_NUM_THREADS": "1",
                "TORCH_CPP_LOG_LEVEL": "ERROR",
            }
            command = host.inside(*pinned, sys.executable, str(Path(__file__).with_name("worker.py")))
            output = subprocess.PIPE if rank == 0 else subprocess.DEVNULL
            workers.append(
                subprocess.Popen(command, env=os.environ | variables, stdin=subprocess.PIPE, stdout=output, text=True)
            )
        yield Crew(network, workers)
        for worker in workers:
            assert worker.stdin is not None
            worker.stdin.close()
        for worker in workers:
            worker.wait(timeout=60)
    finally:
        for worker in workers:
            if worker.poll() is None:
                worker.kill()
                worker.wait()
            if worker.stdout is not None:
                worker.stdout.close()
