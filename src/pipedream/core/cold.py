"""Cold caches: what is timed in a loop of its own runs faster than between the passes of a model."""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import cache
from itertools import cycle
from typing import Any

import numpy as np

_PASS_S = 3e-4


@cache
def _pieces_of_memory() -> Iterator[Any]:
    return cycle(np.zeros((64, 1 << 17), dtype=np.uint8))  # 8 MiB in all: more than a core's own caches


def busy_wait_cold_cache(seconds: float = _PASS_S) -> None:
    """Keeps a core busy as layers do: with other memory, and with other threads at liberty to run Python."""
    pieces, end_s = _pieces_of_memory(), time.perf_counter() + seconds
    while time.perf_counter() < end_s:
        piece = next(pieces)
        np.add(piece, 1, out=piece)
