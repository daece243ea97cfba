"""Cold caches for measurements: code in a tight loop runs faster than between the passes of a model."""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import cache
from itertools import cycle
from typing import Any

import numpy as np

_LAYER_PASS_S = 3e-4


@cache
def _cycle_memory_blocks() -> Iterator[Any]:
    return cycle(np.zeros((64, 1 << 17), dtype=np.uint8))  # 8 MiB: more than a core's caches


def busy_wait_cold_cache(seconds: float = _LAYER_PASS_S) -> None:
    """Keeps a core busy as layers do: replaces its caches, and leaves the GIL to other threads."""
    blocks, end_s = _cycle_memory_blocks(), time.perf_counter() + seconds
    while time.perf_counter() < end_s:
        block = next(blocks)
        np.add(block, 1, out=block)
