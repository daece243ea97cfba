"""Seconds of work on a device, by one code path for all devices."""

from __future__ import annotations

import time
from typing import Any, Protocol

import torch

__all__ = ["Stopwatch", "Watch"]


class Watch(Protocol):
    """What takes laps: a stopwatch, or one that counts operations."""

    def start(self) -> None:
        """Begins a lap."""

    def stop(self) -> None:
        """Ends the lap."""

    def laps_s(self) -> list[float]:
        """Returns the seconds of the laps since the last reading, and forgets them."""


class Stopwatch:
    """Takes laps: the time of the work between `start` and `stop`.

    On the CPU the clock is read; on CUDA events are put into the current stream and read in `laps_s`, which
    waits for the device once, so that the work is not slowed down by being watched.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._cuda = device.type == "cuda"
        self._marks: list[Any] = []

    def start(self) -> None:
        """Begins a lap."""
        self._mark()

    def stop(self) -> None:
        """Ends the lap."""
        self._mark()

    def laps_s(self) -> list[float]:
        """Returns the seconds of the laps since the last reading, and forgets them."""
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
