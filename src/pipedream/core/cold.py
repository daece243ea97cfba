"""Caches in measurements: a fresh process is slow at first, and code in a tight loop is faster than in a model."""

import time
from collections.abc import Iterator
from functools import cache
from itertools import cycle
from typing import Any

import numpy as np

WARM_UP = 12
"""Minibatches of a worker while its buffers grow and its caches fill: a fresh process takes ten to settle."""

_LAYER_PASS_S = 3e-4


def count_warm_up(minibatches: int | None) -> int:
    """Returns how many of a worker's first minibatches no throughput counts: half of them if there are few."""
    return WARM_UP if minibatches is None else min(WARM_UP, minibatches // 2)


@cache
def _cycle_memory_blocks() -> Iterator[Any]:
    return cycle(np.zeros((64, 1 << 17), dtype=np.uint8))  # 8 MiB: more than a core's caches


def busy_wait_cold_cache(seconds: float = _LAYER_PASS_S) -> None:
    """Keeps a core busy as layers do: replaces its caches, and leaves the GIL to other threads."""
    blocks, end_s = _cycle_memory_blocks(), time.perf_counter() + seconds
    while time.perf_counter() < end_s:
        block = next(blocks)
        np.add(block, 1, out=block)
