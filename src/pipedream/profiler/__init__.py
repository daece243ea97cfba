"""Measures the layers of a model: seconds and bytes of each, as a Profile."""

from __future__ import annotations

from .measure import measure
from .stopwatch import Stopwatch

__all__ = ["Stopwatch", "measure"]
