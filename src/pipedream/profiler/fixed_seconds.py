"""The part of a layer's seconds that a smaller batch does not save, measured by also running half of the sample.

With t(n) = fixed + n k for n samples, a half of h of them gives fixed = (n t(h) - h t(n)) / (n - h).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import torch
from torch.utils._pytree import tree_map

from pipedream.core.errors import ProfileError

__all__ = ["fixed_s", "half_of"]


def half_of(sample: tuple[Any, ...], batch: int) -> tuple[Any, ...]:
    """Returns a sample with the first half of each tensor that has the batch along dimension 0."""

    def halved(leaf: Any) -> Any:
        has_batch = isinstance(leaf, torch.Tensor) and leaf.dim() > 0 and leaf.shape[0] == batch
        return leaf[: batch // 2] if has_batch else leaf

    half: tuple[Any, ...] = tree_map(halved, sample)
    return half


def fixed_s(
    run: Callable[[Any], Sequence[float]],
    sample: Any,
    batch: int,
    whole: Sequence[tuple[float, float]],
    *,
    warmup: int,
    runs: int,
    half_of: Callable[[Any, int], Any] = half_of,
) -> list[float]:
    """Returns the fixed seconds of each lap; all 0 if the layers cannot run half of the sample.

    A fixed part that is not greater than the spread counts as 0.

    Args:
        run: runs a sample and returns its laps.
        whole: median and spread of each lap of the whole batch.
        half_of: (sample, its number of samples) -> its first half.
    """
    half = batch // 2
    if not half:
        return [0.0] * len(whole)
    small = half_of(sample, batch)
    try:
        laps = [run(small) for _ in range(warmup + runs)][warmup:]
    except ProfileError:  # a layer works with this batch size only
        return [0.0] * len(whole)
    found = []
    for column, (seconds, spread_s) in zip(zip(*laps, strict=True), whole, strict=True):
        fixed = (batch * median(column) - half * seconds) / (batch - half)
        found.append(min(fixed, seconds) if fixed > spread_s else 0.0)
    return found
