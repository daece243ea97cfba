"""The part of a layer's seconds that a smaller batch does not save, measured by also running a part of the sample.

With t(n) = fixed + n k for n samples, measuring h of them gives fixed = (n t(h) - h t(n)) / (n - h). It is negative
where a large batch takes longer per sample, because its activations do not fit into the caches.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import torch
from torch.utils._pytree import tree_map

from pipedream.core.errors import ProfileError


def part_of(sample: tuple[Any, ...], batch: int, size: int) -> tuple[Any, ...]:
    """Returns a sample with the first rows of each tensor that has the batch along dimension 0."""

    def cut(leaf: Any) -> Any:
        has_batch = isinstance(leaf, torch.Tensor) and leaf.dim() > 0 and leaf.shape[0] == batch
        return leaf[:size] if has_batch else leaf

    part: tuple[Any, ...] = tree_map(cut, sample)
    return part


def fixed_s(
    run: Callable[[Any], Sequence[float]],
    sample: Any,
    batch: int,
    whole: Sequence[tuple[float, float]],
    *,
    warmup: int,
    runs: int,
    parts: int = 2,
    part_of: Callable[[Any, int, int], Any] = part_of,
) -> list[float]:
    """Returns the fixed seconds of each lap; all 0 if the layers cannot run a part of the sample.

    What is not greater than the spread counts as 0.

    Args:
        run: runs a sample and returns its laps.
        whole: median and spread of each lap of the whole batch.
        parts: the smaller batch has 1 / parts of the samples.
        part_of: (sample, its number of samples, fewer) -> the first of them.
    """
    size = batch // parts
    if not size:
        return [0.0] * len(whole)
    small = part_of(sample, batch, size)
    try:
        laps = [run(small) for _ in range(warmup + runs)][warmup:]
    except ProfileError:  # a layer works with this batch size only
        return [0.0] * len(whole)
    fixed_seconds = []
    for column, (seconds, spread_s) in zip(zip(*laps, strict=True), whole, strict=True):
        fixed = (batch * median(column) - size * seconds) / (batch - size)
        fixed_seconds.append(min(fixed, seconds) if abs(fixed) > spread_s else 0.0)
    return fixed_seconds
