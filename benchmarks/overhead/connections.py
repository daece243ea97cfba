"""A worker that sends a large message over one or several of gloo's connections; see README.md."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.append(str(Path(__file__).parents[1]))
from worker_processes import answer_lines

MAX_CONNECTIONS = 4
GROUPS: list[dist.ProcessGroup] = []
"""Each has its own connection between the two workers."""


def measure(case: dict[str, Any]) -> float:
    """Returns the bytes that arrive per second in each direction that is used, over `connections`, `repeats` times."""
    if not GROUPS:
        dist.init_process_group("gloo")
        GROUPS.extend(dist.new_group([0, 1]) for _ in range(MAX_CONNECTIONS))
    message, arrived = torch.ones(2, case["bytes"] // 4)
    rank, both = dist.get_rank(), case["both"]
    dist.barrier()
    start_s = time.perf_counter()
    for _ in range(case["repeats"]):
        parts = list(zip(message.chunk(case["connections"]), arrived.chunk(case["connections"]), GROUPS, strict=False))
        works = [dist.irecv(part, 1 - rank, group=group) for _, part, group in parts if both or rank == 1]
        works += [dist.isend(part, 1 - rank, group=group) for part, _, group in parts if both or rank == 0]
        for work in works:
            work.wait()  # type: ignore[union-attr]
    dist.barrier()
    return float(case["repeats"] * case["bytes"] / (time.perf_counter() - start_s))


if __name__ == "__main__":
    answer_lines(measure)
