"""Fingerprints of tensors: a few sums, by which to compare tensors that no longer exist."""

from collections.abc import Mapping
from typing import NamedTuple

Fingerprint = tuple[float, ...]
"""Sum, weighted sum, and the sum of absolute values, which is the scale of the others."""

Fingerprints = Mapping[str, Fingerprint | None]
"""By the names of tensors; None for a gradient that does not exist."""


class Difference(NamedTuple):
    """A tensor that differs."""

    name: str
    expected: Fingerprint | None
    actual: Fingerprint | None

    def describe(self, actual: str, expected: str) -> str:
        """Returns both fingerprints as text, and where they are from."""
        return f"{_format(self.actual)} {actual}, {_format(self.expected)} {expected}"


def find_difference(
    expected: Fingerprints, actual: Fingerprints, tolerance: float, floors: Mapping[str, float] | None = None
) -> Difference | None:
    """Returns the first tensor whose fingerprints are not equal up to rounding; a missing one is None.

    Args:
        tolerance: largest difference of the sums, relative to the sum of absolute values.
        floors: added to that sum, for values that cancel.
    """
    for name in dict.fromkeys([*expected, *actual]):
        pair = expected.get(name), actual.get(name)
        if not _is_close(*pair, tolerance, (floors or {}).get(name, 0.0)):
            return Difference(name, *pair)
    return None


def _is_close(expected: Fingerprint | None, actual: Fingerprint | None, tolerance: float, floor: float) -> bool:
    if expected is None or actual is None:
        return expected is actual
    limit = tolerance * (max(expected[2], actual[2]) + floor)
    return all(a == b or abs(a - b) <= limit or (a != a and b != b) for a, b in zip(expected, actual, strict=True))


def _format(fingerprint: Fingerprint | None) -> str:
    return "none" if fingerprint is None else f"sum {fingerprint[0]:.6g}, of sizes {fingerprint[2]:.6g}"
