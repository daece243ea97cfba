"""What a worker did and when."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

import torch

from pipedream.core.schedule.timeline import WORK, GradientVersions, Span
from pipedream.runtime.results.memory import MemoryMeter, Peak

__all__ = ["GpuMoment", "GpuTimer", "Moment", "Recorder"]

_MOST_KEPT = 200_000
"""Spans, and gradient versions; the oldest are dropped first, so that a long run needs no more memory."""

_MOST_PENDING = 256
"""Events of the GPU whose time is not read yet, before those that are over are read."""

_ORIGIN_S = 10.0
"""How far an event may lie from the one it is timed against: CUDA's float32 milliseconds then have steps of 1 us."""

_SAME_MOMENT_S = 20e-6
"""An op that begins this soon after the last one ended shares its event."""


class GpuMoment:
    """A point in the GPU's stream. Of `time.perf_counter`, `seconds` is nan until it is known; then `event` is None."""

    __slots__ = ("event", "seconds")

    def __init__(self, event: torch.cuda.Event) -> None:
        self.event: torch.cuda.Event | None = event
        self.seconds = float("nan")


Moment = float | GpuMoment
"""Seconds of `time.perf_counter`, or a point in the GPU's stream."""


class Recorder:
    """Records one worker's spans and gradient versions.

    `mark` returns the present moment, to be given to `note`. `peaks`: phase -> (most versions of a stage, memory).
    """

    def __init__(self, rank: int, device: torch.device) -> None:
        self._rank = rank
        self.memory = MemoryMeter(device)
        self._gpu = GpuTimer() if device.type == "cuda" else None
        self.mark: Callable[[], Moment] = time.perf_counter if self._gpu is None else self._gpu.begin
        self._end: Callable[[], Moment] = time.perf_counter if self._gpu is None else self._gpu.mark
        self._spans: deque[tuple[int, str, int, int, Moment, Moment]] = deque(maxlen=_MOST_KEPT)
        self._busy_since_s, self._busy_share = time.perf_counter(), 0.0
        self._gradient_versions: deque[tuple[int, GradientVersions]] = deque(maxlen=_MOST_KEPT)
        self.phase = 0
        self.peaks: dict[int, tuple[int, Peak]] = {}

    def switch_to(self, phase: int) -> None:
        if phase != self.phase:
            self.memory.reset()
        self.phase = phase

    def note_peak(self, versions: int) -> None:
        """Called at the end of a stream."""
        if self._gpu is not None:
            self._gpu.reset()
        self.peaks[self.phase] = versions, self.memory.at_drain()

    def note(self, kind: str, stage: int, index: int, start: Moment) -> None:
        """Records an op that began at `start` and ends now."""
        self._spans.append((self.phase, kind, stage, index, start, self._end()))
        if kind in WORK:
            self.memory.sample()

    def note_gradient_versions(self, row: GradientVersions) -> None:
        self._gradient_versions.append((self.phase, row))

    @property
    def began_s(self) -> float | None:
        """By this machine's clock; None without spans."""
        self._settle(wait=True)
        return _seconds(self._spans[0][4]) if self._spans else None

    def spans(self, phase: int) -> list[Span]:
        """In seconds of this machine's clock; on a GPU, waits for the last op."""
        self._settle(wait=True)
        return [
            Span(self._rank, kind, stage, index, _seconds(start), _seconds(end))
            for at, kind, stage, index, start, end in self._spans
            if at == phase
        ]

    def gradient_versions(self, phase: int) -> list[GradientVersions]:
        return [row for p, row in self._gradient_versions if p == phase]

    def busy_share(self) -> float:
        """Returns the computing share of the time since the last call, on a GPU up to the last op that is over."""
        begin, end = self._busy_since_s, self._settle(wait=False)
        if end <= begin:
            return self._busy_share  # all this time a GPU has run a single op
        busy = 0.0
        for _, kind, _, _, start, stop in reversed(self._spans):
            stop_s = _seconds(stop)
            if stop_s < begin:
                break
            if kind in WORK and stop_s <= end:  # nan, of an op that is not over, is not
                busy += stop_s - max(_seconds(start), begin)
        self._busy_since_s, self._busy_share = end, busy / (end - begin)
        return self._busy_share

    def _settle(self, wait: bool) -> float:
        """Returns the present moment in seconds; on a GPU that of the last mark that is over."""
        return time.perf_counter() if self._gpu is None else self._gpu.settle(wait)


class GpuTimer:
    """Marks moments in the GPU's stream, which is not waited for.

    The events that are over are timed and used again as soon as `_MOST_PENDING` are not.
    """

    def __init__(self) -> None:
        self._pending: deque[GpuMoment] = deque()
        self._free: list[torch.cuda.Event] = []
        self._origin: torch.cuda.Event | None = None
        self._origin_s = 0.0
        self._last: GpuMoment | None = None
        self._last_marked_s = 0.0
        self._settled_s = time.perf_counter()

    def mark(self) -> GpuMoment:
        event = self._record()
        if self._origin is None:
            event.synchronize()
            self._origin, self._origin_s = event, time.perf_counter()
            event = self._record()
        moment = GpuMoment(event)
        self._pending.append(moment)
        if len(self._pending) > _MOST_PENDING:
            self.settle()
        self._last, self._last_marked_s = moment, time.perf_counter()
        return moment

    def begin(self) -> GpuMoment:
        """Returns the last mark if it was made just now, else a new one."""
        if self._last is not None and time.perf_counter() - self._last_marked_s < _SAME_MOMENT_S:
            return self._last
        return self.mark()

    def settle(self, wait: bool = False) -> float:
        """Times the marks that are over, or all; returns the seconds of the last one."""
        if wait and self._pending and (last := self._pending[-1].event):
            last.synchronize()  # no wider wait: a receive on another stream may need what this host does next
        while self._pending and (event := self._pending[0].event) and event.query():  # type: ignore[no-untyped-call]
            self._settled_s = self._time(self._pending.popleft(), event)
        return self._settled_s

    def reset(self) -> None:
        """Waits for the last mark; the next one is timed by the host's clock again, from which the GPU's drifts."""
        self.settle(wait=True)
        if self._origin is not None:
            self._free.append(self._origin)
        self._origin = self._last = None

    def _record(self) -> torch.cuda.Event:
        event: torch.cuda.Event = self._free.pop() if self._free else torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def _time(self, moment: GpuMoment, event: torch.cuda.Event) -> float:
        assert self._origin is not None
        since_s = self._origin.elapsed_time(event) / 1e3
        moment.seconds, moment.event = self._origin_s + since_s, None
        if since_s >= _ORIGIN_S:
            self._origin, self._origin_s, event = event, moment.seconds, self._origin
        self._free.append(event)
        return moment.seconds


def _seconds(moment: Moment) -> float:
    return moment.seconds if isinstance(moment, GpuMoment) else moment
