"""The ops of a worker with their times."""

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import numpy as np
import torch

from pipedream.core.schedule.timeline import WORK, GradientVersions, Span
from pipedream.runtime.recorder import Moment, Recorder
from pipedream.services.results.memory import MemoryMeter, Peak

_TABLE_ROWS = 1 << 16
"""Most spans, and most gradient versions, that are kept; the oldest are dropped first."""

_BUFFER_ROWS = 512
"""Rows are added to their table so many at a time, which is cheaper."""

_KINDS = (*WORK, "recompute", "wait", "send", "step")
_CODES = {kind: code for code, kind in enumerate(_KINDS)}
_SPAN = np.dtype([(n, "i4") for n in ("phase", "kind", "stage", "index")] + [("start_s", "f8"), ("end_s", "f8")])
_VERSIONS = np.dtype([(name, "i4") for name in ("phase", *GradientVersions._fields)])

_MAX_PENDING = 256
"""How many GPU events may be pending before completed ones are read."""

_ORIGIN_S = 10.0
"""How far apart two events may be timed against each other: CUDA's float32 milliseconds then have steps of 1 us."""

_SAME_MOMENT_S = 20e-6
"""An op that begins this soon after the last one ended shares its event."""


@dataclass(slots=True, eq=False)
class GpuMoment:
    """A point in the GPU's stream. `seconds`, of `time.perf_counter`, is nan until known; then `event` is None."""

    event: torch.cuda.Event | None
    seconds: float = float("nan")


class SpanRecorder(Recorder):
    """Records one worker's spans and gradient versions, in memory that does not grow.

    Attributes:
        peaks: phase -> (most versions of a stage, memory).
        trained: phase -> (begin, end) in minibatches.
    """

    def __init__(self, rank: int, device: torch.device) -> None:
        super().__init__(rank, device)
        self._rank = rank
        self.memory = MemoryMeter(device)
        self._gpu = GpuTimer(device) if device.type == "cuda" else None
        self._end = self.mark
        if self._gpu is not None:
            self.mark, self._end = self._gpu.begin, self._gpu.mark
        self._buffered_spans: deque[tuple[int, int, int, int, Any, Any]] = deque()  # phase, kind, stage, index, moments
        self._spans = _NewestRows(_SPAN)
        self._buffered_versions: list[tuple[int, ...]] = []
        self._versions = _NewestRows(_VERSIONS)
        self._busy: dict[str, tuple[float, float]] = {}
        self._start_s = time.perf_counter()
        self._phase = 0
        self.peaks: dict[int, tuple[int, Peak]] = {}
        self.trained: dict[int, tuple[int, int]] = {}

    def begin_phase(self, phase: int) -> None:
        self.memory.reset()
        self._phase = phase

    def end_stream(self, begin: int, end: int, versions: int) -> None:
        if end > begin:
            self.trained[self._phase] = self.trained.get(self._phase, (begin, end))[0], end
        if self._gpu is not None:
            self._gpu.reset()
        self.peaks[self._phase] = versions, self.memory.measure_peak()

    def note(self, kind: str, stage: int, index: int, start: Moment) -> None:
        code = _CODES[kind]
        end = self._end()
        self._buffered_spans.append((self._phase, code, stage, index, start, end))
        if code < len(WORK):
            self.memory.sample(kind == "F")
        if self._gpu is not None and kind == "F" and isinstance(end, GpuMoment):
            self._gpu.limit(end, self.max_queued)
        if len(self._buffered_spans) >= _BUFFER_ROWS:
            self._flush_spans(wait=len(self._buffered_spans) >= _TABLE_ROWS)

    def note_step(self, stage: int, index: int, start_s: float, end_s: float) -> None:
        self._buffered_spans.append((self._phase, _CODES["step"], stage, index, start_s, end_s))

    def sample_memory(self) -> None:
        self.memory.read_heap()

    def oldest_mark(self) -> object:
        return None if self._gpu is None else self._gpu.oldest()

    def note_gradient_versions(
        self, stage: int, microbatch: int, forward_version: int, backward_version: int, applied_to: int
    ) -> None:
        row = self._phase, stage, microbatch, forward_version, backward_version, applied_to
        self._buffered_versions.append(row)
        if len(self._buffered_versions) >= _BUFFER_ROWS:
            self._flush_versions()

    @property
    def began_s(self) -> float | None:
        """Start of the first span, by this machine's clock."""
        self._flush_spans(wait=True)
        rows = self._spans.rows()
        return float(rows["start_s"][0]) if len(rows) else None

    def spans(self, phase: int) -> list[Span]:
        """Returns spans by their start, in seconds of this machine's clock; on a GPU, waits for the last op."""
        self._flush_spans(wait=True)
        rows = self._spans.rows()
        phase_rows = rows[rows["phase"] == phase].tolist()
        spans, recompute_s = [], 0.0
        for _, code, stage, index, start_s, end_s in phase_rows:
            kind = _KINDS[code]
            if kind == "recompute":
                recompute_s = end_s - start_s
                continue
            # The repeated forward counts as part of the backward; the wait between them moves before both.
            if kind == "wait":
                start_s, end_s = start_s - recompute_s, end_s - recompute_s
            elif kind in WORK:
                start_s, recompute_s = start_s - recompute_s, 0.0
            spans.append(Span(self._rank, kind, stage, index, start_s, end_s))
        return sorted(spans, key=attrgetter("start_s"))  # a step is noted after ops that ran meanwhile

    def gradient_versions(self, phase: int) -> list[GradientVersions]:
        self._flush_versions()
        rows = self._versions.rows()
        return [GradientVersions(*row[1:]) for row in rows[rows["phase"] == phase].tolist()]

    def busy_share(self, reader: str = "") -> float:
        """Returns the computing share of the time since this reader's last call.

        On a GPU the time ends with the last completed op.
        """
        begin, last_share = self._busy.get(reader, (self._start_s, 0.0))
        end = self._flush_spans(wait=False)
        if end <= begin:
            return last_share  # all this time a GPU has run a single op
        rows = self._spans.rows()
        rows = rows[(rows["kind"] <= _CODES["recompute"]) & (rows["end_s"] >= begin)]
        busy_s = float((rows["end_s"] - np.maximum(rows["start_s"], begin)).sum())
        self._busy[reader] = end, busy_s / (end - begin)
        return self._busy[reader][1]

    def _flush_spans(self, wait: bool) -> float:
        """Adds the buffered spans that are completed, or all, to the table.

        Returns the present moment in seconds; on a GPU that of the last completed mark.
        """
        if self._gpu is None:
            self._spans.add(list(self._buffered_spans))
            self._buffered_spans.clear()
            return time.perf_counter()
        now_s = self._gpu.settle(wait)
        completed = []
        while self._buffered_spans and (end_s := self._buffered_spans[0][5].seconds) == end_s:
            *numbers, start, _ = self._buffered_spans.popleft()
            completed.append((*numbers, start.seconds, end_s))
        self._spans.add(completed)
        return now_s

    def _flush_versions(self) -> None:
        self._versions.add(self._buffered_versions)
        self._buffered_versions.clear()


class _NewestRows:
    """The newest rows of a table of fixed size."""

    def __init__(self, dtype: np.dtype[Any]) -> None:
        self._table = np.empty(_TABLE_ROWS, dtype)
        self._table.fill(0)  # allocates the memory now
        self._count = 0

    def add(self, rows: Sequence[tuple[Any, ...]]) -> None:
        rows = rows[-len(self._table) :]
        indices = np.arange(self._count, self._count + len(rows)) % len(self._table)
        self._table[indices] = np.array(rows, self._table.dtype)
        self._count += len(rows)

    def rows(self) -> np.ndarray[Any, np.dtype[Any]]:
        """Returns the rows in the order in which they were added."""
        if self._count <= len(self._table):
            return self._table[: self._count]
        return np.roll(self._table, -(self._count % len(self._table)))


class GpuTimer:
    """Marks moments in the GPU's stream, without waiting for it.

    Once `_MAX_PENDING` events wait, the completed ones are timed and used again.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: tuple[int, torch.cuda.Stream | None] = 0, None
        self._pending: deque[GpuMoment] = deque()
        self._forwards: deque[GpuMoment] = deque()
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
        if len(self._pending) > _MAX_PENDING:
            self.settle()
        self._last, self._last_marked_s = moment, time.perf_counter()
        return moment

    def begin(self) -> GpuMoment:
        """Returns the last mark if it is newer than `_SAME_MOMENT_S`, else a new one."""
        if self._last is not None and time.perf_counter() - self._last_marked_s < _SAME_MOMENT_S:
            return self._last
        return self.mark()

    def limit(self, moment: GpuMoment, max_pending: int) -> None:
        """Waits until at most `max_pending` of the marks that were passed to it are not completed.

        Messages take memory as soon as the host issues them, and nothing else makes the host wait within a minibatch.
        """
        self._forwards.append(moment)
        if len(self._forwards) > max_pending and (event := self._forwards.popleft().event):
            event.synchronize()

    def oldest(self) -> GpuMoment | None:
        """Returns the oldest mark that is not completed; changes nothing."""
        for moment in self._pending.copy():
            event = moment.event  # None once the main thread has timed it
            if event is not None and not event.query():  # type: ignore[no-untyped-call]
                return moment
        return None

    def settle(self, wait: bool = False) -> float:
        """Times the completed marks, or all; returns the seconds of the last one."""
        if wait and self._pending and (last := self._pending[-1].event):
            last.synchronize()  # only this event: a receive on another stream may need what this host does next
        while self._pending and (event := self._pending[0].event) and event.query():  # type: ignore[no-untyped-call]
            self._settled_s = self._time(self._pending.popleft(), event)
        return self._settled_s

    def reset(self) -> None:
        """Waits for the last mark; times the next one by the host's clock again, because the GPU's clock drifts."""
        self.settle(wait=True)
        if self._origin is not None:
            self._free.append(self._origin)
        self._origin = self._last = None

    def _record(self) -> torch.cuda.Event:
        event: torch.cuda.Event = self._free.pop() if self._free else torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        # The raw handle shows if the stream changed: torch.cuda.current_stream takes longer than the rest of a mark.
        number = torch._C._cuda_getCurrentRawStream(self._device.index or 0)
        if self._stream[1] is None or number != self._stream[0]:
            self._stream = number, torch.cuda.current_stream(self._device)
        event.record(self._stream[1])
        return event

    def _time(self, moment: GpuMoment, event: torch.cuda.Event) -> float:
        assert self._origin is not None
        since_s = self._origin.elapsed_time(event) / 1e3
        moment.seconds, moment.event = self._origin_s + since_s, None
        if since_s >= _ORIGIN_S:
            self._origin, self._origin_s, event = event, moment.seconds, self._origin
        self._free.append(event)
        return moment.seconds
