"""The arithmetic of a space's tables: exact sums over the layers before each place."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from itertools import accumulate, islice
from math import prod

from pipedream.core.model.profile import Profile

__all__ = ["by_size", "exact", "input_bytes", "sums"]


def by_size(found: int) -> tuple[int, int]:
    """Returns the rank of a set of bits: those of fewer members first."""
    return found.bit_count(), found


def exact(ratios: Iterable[tuple[int, int]], scale: int) -> list[int]:
    """Returns fractions, whose denominators divide a scale, as whole numbers over it."""
    return [above * (scale // below) for above, below in ratios]


def sums(values: list[int], steps: Sequence[tuple[list[int], list[int]]]) -> list[int]:
    """Returns the sums over the layers before each index, and over those of the other downsets, step by step."""
    changes = (sum(values[i] for i in more) - sum(values[i] for i in less) for more, less in steps)
    return [0, *accumulate(values), *islice(accumulate(changes, initial=0), 1, None)]


def input_bytes(profile: Profile) -> int:
    """Returns the bytes of the model's input.

    The profile tells shapes and the compute dtype; inputs of another dtype are counted as of this one.
    """
    bits = re.search(r"\d+", profile.dtype)
    return sum(prod(shape) for shape in profile.input_shapes) * (int(bits[0]) // 8 if bits else 4)
