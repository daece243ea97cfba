"""Measures the seconds and bytes of each layer of a model, or predicts them, as a Profile."""

from __future__ import annotations

from pipedream.profiler.device import choose_device_type, device_of, dtype_of, measure_device, release_cache
from pipedream.profiler.estimate import estimate
from pipedream.profiler.measure import measure
from pipedream.profiler.ranks import OneRank, one_rank
from pipedream.profiler.stopwatch import Stopwatch
from pipedream.profiler.update import all_parameters

__all__ = [
    "OneRank",
    "Stopwatch",
    "all_parameters",
    "choose_device_type",
    "device_of",
    "dtype_of",
    "estimate",
    "measure",
    "measure_device",
    "one_rank",
    "release_cache",
]
