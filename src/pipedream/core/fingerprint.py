"""Fingerprints of tensors: a few sums, by which to compare tensors that no longer exist."""

from __future__ import annotations

Fingerprint = tuple[float, ...]
"""Sum, weighted sum, and the sum of absolute values, which is the scale of the others."""


def is_close(expected: Fingerprint | None, actual: Fingerprint | None, tolerance: float, floor: float = 0.0) -> bool:
    """Returns whether two fingerprints are equal up to rounding; None equals only None.

    Args:
        tolerance: largest difference of the sums, relative to the sum of absolute values.
        floor: added to that sum, for values that cancel.
    """
    if expected is None or actual is None:
        return expected is actual
    limit = tolerance * (max(expected[2], actual[2]) + floor)
    return all(a == b or abs(a - b) <= limit or (a != a and b != b) for a, b in zip(expected, actual, strict=True))


def format_fingerprint(fingerprint: Fingerprint | None) -> str:
    """Returns the sum and the sum of absolute values as text."""
    return "none" if fingerprint is None else f"sum {fingerprint[0]:.6g}, of sizes {fingerprint[2]:.6g}"
