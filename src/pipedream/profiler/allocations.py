"""Live bytes over time, from the allocator, in sections.

On a CPU, freeing a tensor that existed before is not seen: keep references to everything that the work does not own.
On a GPU the caching allocator counts blocks of 512 bytes.
"""

from __future__ import annotations

import gc
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import torch
from torch.autograd.profiler import record_function

_MARK = "pipedream: a section begins"


@dataclass(frozen=True)
class Section:
    """Live bytes in addition to those when the watch began."""

    start_bytes: int
    peak_bytes: int
    end_bytes: int

    @property
    def rise_bytes(self) -> int:
        return self.peak_bytes - self.start_bytes


class Allocations:
    """Watches the allocations of this thread; `mark` begins the next section. `sections` is complete after the context.

    Only one watch, or profiler of torch, can run at a time.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._collects = False
        self.sections: list[Section] = []

    @staticmethod
    def is_free() -> bool:
        return not torch._C._autograd._profiler_enabled()

    def __enter__(self) -> Self:
        gc.collect()
        self._collects = gc.isenabled()
        gc.disable()  # so that only the work itself frees memory in a section
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
            torch.cuda.reset_peak_memory_stats(self._device)
            self._first = self._start = torch.cuda.memory_allocated(self._device)
        else:
            parts = torch._C._profiler
            config = parts.ProfilerConfig(
                parts.ProfilerState.CPU, False, True, False, False, False, parts._ExperimentalConfig()
            )
            torch._C._autograd._enable_profiler_legacy(config)
        return self

    def mark(self) -> None:
        if self._device.type == "cuda":
            self._close()
        else:
            with record_function(_MARK):
                pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._device.type == "cuda":
            self._close()
        else:
            self.sections = _split_sections(torch._C._autograd._disable_profiler_legacy())
        if self._collects:
            gc.enable()

    def _close(self) -> None:
        torch.cuda.synchronize(self._device)
        peak, now = torch.cuda.max_memory_allocated(self._device), torch.cuda.memory_allocated(self._device)
        self.sections.append(Section(self._start - self._first, peak - self._first, now - self._first))
        torch.cuda.reset_peak_memory_stats(self._device)
        self._start = now


def _split_sections(threads: Any) -> list[Section]:
    sections, start, peak, live = [], 0, 0, 0
    for event in (event for events in threads for event in events):
        if event.kind() == "memory_alloc":
            live += event.cpu_memory_usage()
            peak = max(peak, live)
        elif event.kind() == "push" and event.name() == _MARK:
            sections.append(Section(start, peak, live))
            start = peak = live
    return [*sections, Section(start, peak, live)]
