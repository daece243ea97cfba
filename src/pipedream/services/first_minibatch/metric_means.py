"""Checks on a minibatch that the mean of a metric's values for its parts is its value for the whole."""

from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from math import isfinite
from typing import Any

import torch

from pipedream.runtime.comm.values import map_tensors, tensors_in
from pipedream.services.losses.losses import Metric, metric_scores

Row = tuple[Any, Any, int]
"""Output, targets and number of samples."""


def explain_mean(metric: Metric, whole: Row, parts: Sequence[Row], tolerance: float) -> str:
    """Returns how the value for the whole differs from the mean of its parts', or "".

    Other outputs are tried too, because roots and ratios of zeros are equal.
    """
    changes: list[Any] = [_keep, *(partial(_change, seed=seed) for seed in range(6))]
    for change in changes:
        output = map_tensors(whole[0], change)
        outputs = _cut_like(output, [part[0] for part in parts])
        rows = [(part, targets, samples) for part, (_, targets, samples) in zip(outputs, parts, strict=True)]
        with suppress(Exception):  # which training raises itself, or other outputs only
            (single, precision), (again, _) = (_measure(metric, [(output, whole[1], whole[2])]) for _ in range(2))
            mean, _ = _measure(metric, rows)
            limit = precision + max(tolerance, 20 * precision) * max(abs(single), abs(mean))
            is_known = isfinite(single) and single == again and (change is _keep or isfinite(mean))
            if is_known and not abs(single - mean) <= limit:
                text = f"{single:.7g}, but the mean of its {len(parts)} microbatches is {mean:.7g}"
                return text if change is _keep else f"{text}, if its outputs are exchanged"
    return ""


def _measure(metric: Metric, rows: Sequence[Row]) -> tuple[float, float]:
    """Returns the mean over rows, and the precision of its numbers."""
    total, weights, precision = 0.0, 0.0, torch.finfo(torch.float32).eps
    for output, targets, samples in rows:
        copies: tuple[Any, Any] = map_tensors((output, targets), lambda tensor: tensor.detach().clone())
        (value, factor), (weight, _) = metric_scores({"": metric}, *copies, samples)
        total, weights = total + float(value) * factor, weights + float(weight)
        floats = [t for t in tensors_in((value, output)) if t.is_floating_point()]
        precision = max([precision, *(torch.finfo(t.dtype).eps for t in floats)])
    return total / weights if weights else float("nan"), precision


def _keep(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _change(tensor: torch.Tensor, seed: int) -> torch.Tensor:
    """Returns a tensor with its numbers in another order, and every second time around 0."""
    if seed % 2 and tensor.ndim and tensor.is_floating_point():
        tensor = tensor - tensor.mean()
    order = torch.randperm(tensor.numel(), generator=torch.Generator().manual_seed(seed))
    return tensor.flatten()[order.to(tensor.device)].view(tensor.shape)


def _cut_like(whole: Any, parts: Sequence[Any]) -> list[Any]:
    """Returns the parts, with the numbers of the whole where a tensor is one of its slices."""
    replaced: list[dict[int, Any]] = [{} for _ in parts]
    for tensor, *pieces in zip(tensors_in(whole), *map(tensors_in, parts), strict=True):
        for dim in range(tensor.ndim):
            sizes = [piece.shape[dim] if piece.ndim == tensor.ndim else 0 for piece in pieces]
            if sum(sizes) == tensor.shape[dim]:
                for change, piece, piece_of_whole in zip(replaced, pieces, tensor.split(sizes, dim), strict=True):
                    change[id(piece)] = piece_of_whole
                break
    return [map_tensors(part, _keep, replaced=change) for part, change in zip(parts, replaced, strict=True)]
