"""What a worker did and when."""

from __future__ import annotations

import resource
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import torch

from pipedream.core.schedule.timeline import WORK, GradientVersions, Span

__all__ = ["OpTimer", "Recorder", "peak_bytes"]

_MOST_KEPT = 200_000
"""Spans, and gradient versions; the oldest are dropped first, so that a long run needs no more memory."""


Moment = float | torch.cuda.Event
"""Seconds of `time.perf_counter`, or an event in the GPU's stream, whose time is known only later."""


class Recorder:
    """Records one worker's spans and gradient versions.

    `peaks`: phase -> (most versions that a stage held, `peak_bytes`).
    """

    def __init__(self, rank: int, device: torch.device) -> None:
        self._rank = rank
        self._device = device
        self._watch = OpTimer(device)
        self._spans: deque[tuple[int, str, int, int, Moment, Moment]] = deque(maxlen=_MOST_KEPT)
        self._busy_since: Moment | None = None
        self._gradient_versions: deque[tuple[int, GradientVersions]] = deque(maxlen=_MOST_KEPT)
        self.phase = 0
        self.peaks: dict[int, tuple[int, int]] = {}

    def switch_to(self, phase: int) -> None:
        if phase != self.phase and self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
        self.phase = phase

    def note_peak(self, versions: int) -> None:
        """Called at the end of a stream."""
        self.peaks[self.phase] = versions, peak_bytes(self._device)

    def mark(self) -> Moment:
        return self._watch.mark()

    def note(self, kind: str, stage: int, index: int, start: Moment) -> None:
        self._spans.append((self.phase, kind, stage, index, start, self._watch.mark()))

    def note_gradient_versions(self, row: GradientVersions) -> None:
        self._gradient_versions.append((self.phase, row))

    @property
    def began_s(self) -> float | None:
        """By this machine's clock; None without spans."""
        return self._watch.resolve()(self._spans[0][4]) if self._spans else None

    def spans(self, phase: int) -> list[Span]:
        """In seconds of this machine's clock; waits for a GPU."""
        resolve = self._watch.resolve()
        return [Span(self._rank, k, s, i, resolve(a), resolve(b)) for p, k, s, i, a, b in self._spans if p == phase]

    def gradient_versions(self, phase: int) -> list[GradientVersions]:
        return [row for p, row in self._gradient_versions if p == phase]

    def busy_share(self) -> float:
        """Returns the computing share of the time since the last call."""
        since, self._busy_since = self._busy_since, self._watch.mark()
        if since is None:
            return 0.0
        resolve = self._watch.resolve()
        begin, end = resolve(since), resolve(self._busy_since)
        busy = 0.0
        for _, kind, _, _, start, stop in reversed(self._spans):
            if resolve(stop) < begin:
                break
            if kind in WORK:
                busy += resolve(stop) - max(resolve(start), begin)
        return busy / (end - begin) if end > begin else 0.0


class OpTimer:
    """Marks moments without waiting for the device."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._origin: Any = None
        self._origin_s = 0.0

    def mark(self) -> Moment:
        if not self._cuda:
            return time.perf_counter()
        event: torch.cuda.Event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        if self._origin is None:
            event.synchronize()
            self._origin = event
            self._origin_s = time.perf_counter()
        return event

    def resolve(self) -> Callable[[Any], float]:
        """Returns the function from a moment to seconds; waits for the GPU."""
        if not self._cuda:
            return float
        torch.cuda.synchronize()
        return lambda event: self._origin_s + self._origin.elapsed_time(event) / 1e3


def peak_bytes(device: torch.device) -> int:
    """Returns the peak on the GPU since the phase began, else resident since the process began."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
