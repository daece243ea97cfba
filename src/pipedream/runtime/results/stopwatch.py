"""When an op began and ended: by the CPU's clock, or by events in the GPU's stream."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

__all__ = ["Moment", "OpTimer"]

Moment = float | torch.cuda.Event
"""Seconds of `time.perf_counter`, or an event in the GPU's stream, whose time is known only later."""


class OpTimer:
    """Marks moments without waiting for the device."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._origin: Any = None
        self._origin_s = 0.0

    def mark(self) -> Moment:
        """Returns the present moment."""
        if not self._cuda:
            return time.perf_counter()
        event: torch.cuda.Event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        if self._origin is None:
            event.synchronize()
            self._origin, self._origin_s = event, time.perf_counter()
        return event

    def resolve(self) -> Callable[[Any], float]:
        """Returns the function from a moment to seconds; waits for the GPU."""
        if not self._cuda:
            return float
        torch.cuda.synchronize()
        return lambda event: self._origin_s + self._origin.elapsed_time(event) / 1e3
