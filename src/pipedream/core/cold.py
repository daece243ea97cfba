"""Cold caches: what is timed in a loop of its own runs faster than between the passes of a model."""

from __future__ import annotations

import time
from itertools import cycle

import numpy as np

_PASS_S = 3e-4
_PIECES = cycle(np.zeros((64, 1 << 17), dtype=np.uint8))  # 8 MiB in all: more than a core's own caches


def compute_for(seconds: float = _PASS_S) -> None:
    """Keeps a core busy as layers do: with other memory, and with other threads at liberty to run Python."""
    end_s = time.perf_counter() + seconds
    while time.perf_counter() < end_s:
        piece = next(_PIECES)
        np.add(piece, 1, out=piece)
