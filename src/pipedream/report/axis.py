"""Axes: round ticks, units of time, short numbers."""

from __future__ import annotations

import math


def ticks(low: float, high: float, most: int) -> tuple[float, ...]:
    """Returns at most `most` round numbers (1, 2 or 5 times a power of ten apart) between low and high.

    >>> ticks(0, 9.3, 6)
    (0.0, 2.0, 4.0, 6.0, 8.0)
    """
    if not (math.isfinite(low) and math.isfinite(high)) or high <= low or most < 1:
        return (low,)
    power = 10.0 ** math.floor(math.log10((high - low) / most))
    step = next(size * power for size in (1, 2, 5, 10, 20, 50) if _count(low, high, size * power) <= most or size == 50)
    first = math.ceil(low / step - 1e-9)
    return tuple((first + i) * step for i in range(_count(low, high, step)))


def log_ticks(low: float, high: float) -> tuple[float, ...]:
    """Returns the powers of ten between low and high, both above 0; also 2 and 5 times them if there are few.

    >>> log_ticks(0.9, 1200)
    (1.0, 10.0, 100.0, 1000.0)
    >>> log_ticks(3, 30)
    (5.0, 10.0, 20.0)
    """
    powers = [10.0**power for power in range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)]
    steps = (1, 2, 5) if high / low < 100 else (1,)
    candidates = (size * power for power in powers for size in steps)
    return tuple(value for value in candidates if low * (1 - 1e-9) <= value <= high * (1 + 1e-9))


def _count(low: float, high: float, step: float) -> int:
    return math.floor(high / step + 1e-9) - math.ceil(low / step - 1e-9) + 1


def time_unit(seconds: float) -> tuple[str, float]:
    """Returns a suitable unit and its seconds.

    >>> time_unit(0.25)
    ('ms', 0.001)
    """
    for name, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= 3 * size:
            return name, size
    return "us", 1e-6


def length(value: float) -> str:
    """Formats a length in pixels.

    >>> length(3.04), length(12.0)
    ('3', '12')
    """
    return f"{value:.1f}".rstrip("0").rstrip(".") or "0"
