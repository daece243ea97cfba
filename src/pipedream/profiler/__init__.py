"""Measures the seconds and bytes of each layer of a model, or predicts them, as a Profile."""

from __future__ import annotations

from pipedream.profiler.device import device_of, dtype_of, here, measure_device
from pipedream.profiler.environment import release_cache
from pipedream.profiler.estimate import estimate
from pipedream.profiler.measure import measure
from pipedream.profiler.stopwatch import Stopwatch

__all__ = ["Stopwatch", "device_of", "dtype_of", "estimate", "here", "measure", "measure_device", "release_cache"]
