"""Stands for `torch.cuda` in the library's clock and memory, without a GPU.

The GPU's stream is a clock that runs ahead of the host: what is submitted takes `run` seconds, after what came before.
"""

from __future__ import annotations

import time
from typing import Any, Self

import pytest
import torch


class FakeCuda:
    """One GPU and its stream.

    Attributes:
        now_s: the host's time, which `time.perf_counter` returns.
        stream_s: when the GPU has done what was submitted so far.
        stream_lookups: how often torch looked for the current stream, which takes long.
    """

    def __init__(self) -> None:
        self.now_s = self.stream_s = 1000.0
        self.events = 0
        self.resets = self.stream_number = self.stream_lookups = 0

    def _find_stream(self, device: Any = None) -> int:
        self.stream_lookups += 1
        return self.stream_number

    def run(self, seconds: float, host_s: float = 5e-6) -> None:
        """Submits work; the host is busy with it for `host_s`."""
        self.stream_s = max(self.stream_s, self.now_s) + seconds
        self.now_s += host_s

    def install(self, monkeypatch: pytest.MonkeyPatch) -> Self:
        cuda = self

        class Event:
            """Steps as coarse as CUDA's: the difference is milliseconds in float32."""

            def __init__(self, enable_timing: bool = False) -> None:
                cuda.events += 1
                self.at_s = float("nan")

            def record(self, stream: Any = None) -> None:
                self.at_s = max(cuda.stream_s, cuda.now_s)

            def query(self) -> bool:
                return self.at_s <= cuda.now_s

            def synchronize(self) -> None:
                cuda.now_s = max(cuda.now_s, self.at_s)

            def elapsed_time(self, end: Event) -> float:
                if not (self.query() and end.query()):
                    raise RuntimeError("device not ready")
                return float(torch.tensor((end.at_s - self.at_s) * 1e3, dtype=torch.float32))

        def refuse(*args: Any) -> None:
            raise AssertionError("waits for the whole device, while a receive may be posted")

        def reset(device: Any = None) -> None:
            self.resets += 1

        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(torch.cuda, "current_stream", self._find_stream)
        monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: self.stream_number, raising=False)
        monkeypatch.setattr(torch.cuda, "synchronize", refuse)
        monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", reset)
        monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device=None: 100)
        monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda device=None: 200)
        monkeypatch.setattr(time, "perf_counter", lambda: self.now_s)
        return self
