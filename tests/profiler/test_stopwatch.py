"""Laps on a made-up GPU, which runs kernels in order while a made-up host launches the next."""

from __future__ import annotations

import time
from collections import Counter
from contextlib import nullcontext
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch

from pipedream.profiler.passes import measure_launch_seconds
from pipedream.profiler.stopwatch import HostStopwatch, Stopwatch

LAUNCH_S, KERNEL_S, KERNELS = 10e-6, 1e-6, 10


class Gpu:
    """Keeps the time of both in `host_s` and `free_s`, when the GPU has done all that it was given."""

    host_s = free_s = 0.0

    def launch(self, seconds: float) -> None:
        self.host_s += LAUNCH_S
        self.free_s = max(self.free_s, self.host_s) + seconds

    def synchronize(self, device: Any = None) -> None:
        self.host_s = max(self.host_s, self.free_s)

    def event(self, enable_timing: bool) -> Event:
        assert enable_timing
        return Event(self)


class Event:
    """Known when the GPU gets there."""

    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu

    def record(self, stream: Any = None) -> None:
        self.at_s = max(self._gpu.free_s, self._gpu.host_s)

    def synchronize(self) -> None:
        self._gpu.host_s = max(self._gpu.host_s, self.at_s)

    def elapsed_time(self, end: Event) -> float:
        return (end.at_s - self.at_s) * 1e3


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    gpu = Gpu()
    monkeypatch.setattr(torch.cuda, "Event", gpu.event)
    monkeypatch.setattr(torch.cuda, "synchronize", gpu.synchronize)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    monkeypatch.setattr(torch.cuda, "device", nullcontext)
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: gpu.launch(cycles / 2e9))
    monkeypatch.setattr(time, "perf_counter", lambda: gpu.host_s)
    return gpu


@pytest.mark.parametrize(
    ("make", "lap_s"),
    [
        (Stopwatch, KERNELS * LAUNCH_S),  # small kernels take as long as their launches
        (partial(Stopwatch, without_launches=True), KERNELS * KERNEL_S),  # which do not count while the GPU is busy
        (HostStopwatch, KERNELS * LAUNCH_S),  # which the host counts alone
    ],
)
def test_laps_are_of_kernels_or_of_their_launches(gpu: Gpu, make: Any, lap_s: float) -> None:
    gpu.launch(1.0 if make is HostStopwatch else 0.0)
    watch = make(torch.device("cuda"))
    for _ in range(3):
        watch.start()
        for _ in range(KERNELS):
            gpu.launch(KERNEL_S)
        watch.stop()
    assert watch.laps_s() == pytest.approx([lap_s] * 3, rel=0.02)
    # Never more than a lap ahead: a GPU's queue has room for a thousand kernels.
    assert make is HostStopwatch or gpu.free_s - gpu.host_s < 3e-3


@pytest.mark.parametrize("laps", [3, 16, 17, 34, 40])
def test_the_host_waits_for_the_gpu_rarely_and_in_other_laps_of_each_run(gpu: Gpu, laps: int) -> None:
    """A host that has just waited is slower than in training; a queue that is full would stop it."""
    watch, waits = HostStopwatch(torch.device("cuda")), Counter[int]()
    for _ in range(5):
        for lap in range(laps):
            with mock.patch.object(torch.cuda, "synchronize") as synchronize:
                watch.start()
            watch.stop()
            waits[lap] += synchronize.call_count
        watch.laps_s()
    assert abs(waits.total() - 5 * laps / 17) <= 4
    assert max(waits.values()) == 1, "medians are of laps without a wait"


class Scripted:
    """Gives the laps of three runs of two layers, of which the first is slower, by layer and as a chain."""

    def __init__(self, fits: bool) -> None:
        self._runs = iter([[9.0] * 4, [3.0, 4.0, 2.0, 1.0], [3.0, 4.0, 2.0, 1.0]])
        self._chains = iter([[9.0] * 3, [2.5, 1.5, 2.0], [2.5, 1.5, 2.0]])
        self._fits = fits

    def time_run(self, sample: Any) -> list[float]:
        return next(self._runs)

    def time_chain(self, sample: Any) -> list[float]:
        if not self._fits:
            raise torch.OutOfMemoryError
        return next(self._chains)


@pytest.mark.parametrize("fits", [True, False])
def test_launches_are_those_of_one_backward_through_all_layers(fits: bool) -> None:
    passes: Any = Scripted(fits)
    assert measure_launch_seconds(passes, (), 2) == ([2.5, 1.6, 1.5, 0.4] if fits else [3.0, 4.0, 2.0, 1.0])
