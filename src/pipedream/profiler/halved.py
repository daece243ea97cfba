"""What of a layer's seconds a smaller batch does not save: measured by running half of the sample too.

With t(n) = fixed + n k for n samples, a half of h of them gives fixed = (n t(h) - h t(n)) / (n - h). Kernels are
launched and Python runs for each microbatch of a split minibatch anew: this bounds how finely it is worth splitting.
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
    """Returns the first half of a sample: of each tensor that has the batch along dimension 0."""

    def halved(leaf: Any) -> Any:
        has_batch = isinstance(leaf, torch.Tensor) and leaf.dim() > 0 and leaf.shape[0] == batch
        return leaf[: batch // 2] if has_batch else leaf

    half: tuple[Any, ...] = tree_map(halved, sample)
    return half


def fixed_s(
    run: Callable[[tuple[Any, ...]], Sequence[float]],
    sample: tuple[Any, ...],
    batch: int,
    whole: Sequence[tuple[float, float]],
    *,
    warmup: int,
    runs: int,
) -> list[float]:
    """Returns the fixed part of each lap; all 0 where half of the sample does not run.

    A part that is not above what the laps scatter is none.

    Args:
        run: takes the laps of one run on a sample.
        sample: of the whole batch.
        batch: its samples.
        whole: of each lap of the whole batch, its median and its spread in seconds.
        warmup, runs: runs that are not counted, and runs behind each median.
    """
    half = batch // 2
    if not half:
        return [0.0] * len(whole)
    small = half_of(sample, batch)
    try:
        laps = [run(small) for _ in range(warmup + runs)][warmup:]
    except ProfileError:  # a layer that knows its batch
        return [0.0] * len(whole)
    found = []
    for column, (seconds, spread_s) in zip(zip(*laps, strict=True), whole, strict=True):
        fixed = (batch * median(column) - half * seconds) / (batch - half)
        found.append(min(fixed, seconds) if fixed > spread_s else 0.0)
    return found
