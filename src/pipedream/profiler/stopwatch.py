"""Times work, with one code path for all devices."""

import time
from typing import Any, Protocol

import torch

_FILLER_CYCLES = 4_000_000
"""About 2 ms of a GPU: longer than the host needs to launch a layer."""


_HOST_LAPS = 17
"""Laps of the host between two waits for the GPU, whose queue holds about a thousand launches."""


class Watch(Protocol):
    """Something that takes laps: a stopwatch, or an estimate from counted operations."""

    def start(self) -> None:
        """Begins a lap."""

    def stop(self) -> None:
        """Ends the lap."""

    def laps_s(self) -> list[float]:
        """Returns the seconds of the laps since the last call, and forgets them."""


class Stopwatch:
    """Takes laps. On CUDA they are events, read in `laps_s`.

    Args:
        without_launches: a GPU is kept busy until the host has launched the lap, whose seconds are then those of its
            kernels alone. Otherwise a lap of small kernels takes as long as their launches.
    """

    def __init__(self, device: torch.device, *, without_launches: bool = False) -> None:
        self._device = device
        self._cuda = device.type == "cuda"
        self._fills = self._cuda and without_launches
        self._marks: list[Any] = []

    def start(self) -> None:
        if self._fills:
            if self._marks:
                self._marks[-1].synchronize()  # a queue that is full would stop the host in the middle of a lap
            with torch.cuda.device(self._device):
                torch.cuda._sleep(_FILLER_CYCLES)  # type: ignore[no-untyped-call]
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


class HostStopwatch(Stopwatch):
    """Takes laps of the host, which end when it has launched everything.

    As in training, it does not wait for the GPU between them: a host that has just waited is slower. It does so once in
    `_HOST_LAPS`, so that the queue is never full; in another lap of each run, so that the medians are of the others.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__(torch.device("cpu"))
        self._launches_on = device
        self._runs = 0

    def start(self) -> None:
        if self._launches_on.type == "cuda" and (len(self._marks) // 2 + self._runs) % _HOST_LAPS == 0:
            torch.cuda.synchronize(self._launches_on)
        super().start()

    def laps_s(self) -> list[float]:
        self._runs += 1
        return super().laps_s()
