"""Normalizations on parts, with the statistics of the whole tensor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Shard
from torch.nn import functional as F

from pipedream.core.errors import PlanError
from pipedream.sharding.functions import sum_partials
from pipedream.sharding.rules.compute import apply_by_channel, complete_sums, is_sharded


def apply_batch_norm(
    input: DTensor,
    running_mean: torch.Tensor | None,
    running_var: torch.Tensor | None,
    weight: Any = None,
    bias: Any = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Any:
    """Takes the statistics of the whole batch, in float32 at least.

    Raises:
        ValueError: a channel has one value, in training.
    """
    mean: Any
    variance: Any
    shape, over = [1, -1, *[1] * (input.dim() - 2)], [0, *range(2, input.dim())]
    x: Any = sum_partials(input).to(torch.promote_types(input.dtype, torch.float32))
    if not training and running_mean is not None and running_var is not None:
        mean = running_mean.view(shape)
        variance = running_var.view(shape)
    else:
        F._verify_batch_size(list(x.shape))  # type: ignore[attr-defined]
        count = x.numel() // x.shape[1]
        mean = sum_partials(x.sum(over, keepdim=True)) / count
        variance = sum_partials((x - mean).square().sum(over, keepdim=True)) / count
        if running_mean is not None and running_var is not None:
            with torch.no_grad():
                seen = (mean, running_mean), (variance * (count / (count - 1)), running_var)
                for statistic, running in seen:
                    running.lerp_(statistic.full_tensor().flatten().to(running.dtype), momentum)
    return _scale_and_shift_channels((x - mean) * (variance + eps).rsqrt(), weight, bias).to(input.dtype)


def apply_layer_norm(
    input: Any, normalized_shape: Sequence[int], weight: Any = None, bias: Any = None, eps: float = 1e-5
) -> Any:
    """Takes the statistics over all ranks where a normalized dimension is sharded."""
    x, over = complete_sums(input), list(range(-len(normalized_shape), 0))
    if is_sharded(x, over):
        x = x - sum_partials(x.mean(over, keepdim=True))
        return _scale_and_shift(x * (sum_partials(x.square().mean(over, keepdim=True)) + eps).rsqrt(), weight, bias)
    if is_sharded(weight) or is_sharded(bias):
        return _scale_and_shift(F.layer_norm(x, normalized_shape, eps=eps), weight, bias)
    return F.layer_norm(x, normalized_shape, weight, bias, eps)


def apply_rms_norm(input: Any, normalized_shape: Sequence[int], weight: Any = None, eps: float | None = None) -> Any:
    """Takes the mean square over all ranks where a normalized dimension is sharded."""
    x, over = complete_sums(input), list(range(-len(normalized_shape), 0))
    if is_sharded(x, over):
        eps = torch.finfo(x.dtype).eps if eps is None else eps
        return _scale_and_shift(x * (sum_partials(x.square().mean(over, keepdim=True)) + eps).rsqrt(), weight, None)
    if is_sharded(weight):
        return _scale_and_shift(F.rms_norm(x, normalized_shape, eps=eps), weight, None)
    return F.rms_norm(x, normalized_shape, weight, eps)


def _scale_and_shift(x: Any, weight: Any, bias: Any) -> Any:
    x = x if weight is None else x * weight
    return x if bias is None else x + bias


def _scale_and_shift_channels(x: Any, weight: Any, bias: Any) -> Any:
    shape = [1, -1, *[1] * (x.dim() - 2)]
    return _scale_and_shift(x, *(None if parameter is None else parameter.view(shape) for parameter in (weight, bias)))


def apply_group_norm(input: DTensor, num_groups: int, weight: Any = None, bias: Any = None, eps: float = 1e-5) -> Any:
    """Takes the statistics of each sample's groups, of which each rank has whole ones."""
    x = sum_partials(input)
    if any(placed == Shard(1) and num_groups % x.device_mesh.size(at) for at, placed in enumerate(x.placements)):
        raise PlanError(
            f"group_norm with {num_groups} groups was asked for on a tensor of {tuple(x.shape)} whose channels are "
            f"sharded ({x.placements}), so that a group would be on several ranks; choose a number of groups that the "
            "ranks divide, or do not shard the channels"
        )
    channels = x.shape[1] // num_groups
    normalised = apply_by_channel(lambda part: F.group_norm(part, part.shape[1] // channels, eps=eps), None, x)
    return _scale_and_shift_channels(normalised, weight, bias)


def apply_instance_norm(
    input: DTensor,
    running_mean: torch.Tensor | None = None,
    running_var: torch.Tensor | None = None,
    weight: Any = None,
    bias: Any = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Any:
    """Normalizes each channel of each sample, as groups of one channel."""
    if running_mean is not None:
        raise PlanError(
            f"instance_norm with running statistics was asked for on a mesh, for a tensor of {tuple(input.shape)}; use "
            "track_running_stats=False"
        )
    return apply_group_norm(input, input.shape[1], weight, bias, eps)
