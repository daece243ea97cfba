"""Times work, with one code path for all devices."""

from __future__ import annotations

import time
from typing import Any, Protocol

import torch

__all__ = ["Stopwatch", "Watch"]


class Watch(Protocol):
    """Something that takes laps: a stopwatch, or an estimate from counted operations."""

    def start(self) -> None:
        """Begins a lap."""

    def stop(self) -> None:
        """Ends the lap."""

    def laps_s(self) -> list[float]:
        """Returns the seconds of the laps since the last call, and forgets them."""


class Stopwatch:
    """Takes laps. On CUDA they are events, read in `laps_s`, so that timing synchronises with the device only once."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._cuda = device.type == "cuda"
        self._marks: list[Any] = []

    def start(self) -> None:
        self._mark()

    def stop(self) -> None:
        self._mark()

    def laps_s(self) -> list[float]:
        pairs = list(zip(self._marks[::2], self._marks[1::2], strict=True))
        self._marks = []
        if self._cuda:
            torch.cuda.synchronize(self._device)
            return [begin.elapsed_time(end) * 1e-3 for begin, end in pairs]
        return [end - begin for begin, end in pairs]

    def _mark(self) -> None:
        if self._cuda:
            event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            event.record(torch.cuda.current_stream(self._device))
            self._marks.append(event)
        else:
            self._marks.append(time.perf_counter())
