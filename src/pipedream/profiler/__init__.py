"""Measures the layers of a model, or computes what they would take: seconds and bytes of each, as a Profile."""

from __future__ import annotations

from .device import device_of, dtype_of, here, measure_device
from .estimate import estimate
from .measure import measure
from .stopwatch import Stopwatch

__all__ = ["Stopwatch", "device_of", "dtype_of", "estimate", "here", "measure", "measure_device"]
