"""Operators that are described as several: torch's own decompositions, and some that torch lacks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from math import prod
from typing import Any

import torch
from torch._decomp import core_aten_decompositions, get_decompositions

from pipedream.sharding.descriptions import is_added, is_described

A = torch.ops.aten
_TORCHS = (
    A._native_batch_norm_legit, A._native_batch_norm_legit_functional, A._softmax_backward_data,
    A._log_softmax_backward_data, A._thnn_fused_gru_cell, A._thnn_fused_lstm_cell, A.addcdiv, A.addcmul, A.addmm,
    A.baddbmm, A.binary_cross_entropy, A.binary_cross_entropy_backward, A.linear_backward, A.mse_loss,
    A.mse_loss_backward, A.native_dropout, A.native_dropout_backward,
    A.native_batch_norm, A.native_batch_norm_backward, A.native_group_norm, A.native_group_norm_backward,
    A.linalg_vector_norm, A.native_layer_norm, A.native_layer_norm_backward, A.nll_loss_backward, A.nll_loss_forward,
    A.rsub, A.select_backward, A.slice_backward, A.split, A.stack, A.t, A.threshold_backward,
    A.unbind, A.unfold_backward,
)  # fmt: skip


def decompositions() -> dict[Any, Callable[..., Any]]:
    """Returns operator -> what it does, by simpler ones."""
    own: dict[Any, Callable[..., Any]] = {
        A.var_mean.correction: _var_mean,
        A.convolution.default: _with_bias,
        A.mean.dim: _mean,
        A.mean.default: _mean,
        A.var.correction: lambda *given, **named: _var_mean(*given, **named)[0],
        A.std.correction: lambda *given, **named: _var_mean(*given, **named)[0].sqrt(),
        A.max.default: lambda x: x.amax(list(range(x.dim()))),
        A.min.default: lambda x: x.amin(list(range(x.dim()))),
        A.index_select.default: lambda x, dim, index: x[(slice(None),) * (dim % x.dim()) + (index,)],
        A.repeat.default: _repeat,
        A.as_strided.default: _as_view,
        A.cat.default: _without_empty,
        A._trilinear.default: _trilinear,
    }
    torchs = {one: simpler for one, simpler in _of_torch().items() if not is_described(one)}
    found: dict[Any, Callable[..., Any]] = {**torchs, **get_decompositions(_TORCHS), **own}
    return {one: simpler for one, simpler in found.items() if not is_added(one)}


@cache
def _of_torch() -> dict[Any, Callable[..., Any]]:
    found: dict[Any, Callable[..., Any]] = dict(core_aten_decompositions())
    return {one: simpler for one, simpler in found.items() if torch.Tag.nondeterministic_seeded not in one.tags}


def _mean(
    x: torch.Tensor, dim: Sequence[int] | None = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> torch.Tensor:
    dims = list(range(x.dim())) if not dim else list(dim)
    return x.sum(dims, keepdim, dtype=dtype) / prod(x.shape[one] for one in dims)


def _var_mean(
    x: torch.Tensor, dim: Sequence[int] | None = None, *, correction: float | None = None, keepdim: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    dims = list(range(x.dim())) if dim is None else list(dim)
    count = prod(x.shape[one] for one in dims)
    mean = x.sum(dims, True) / count
    apart = x - mean
    variance = (apart * apart).sum(dims, True) / (count - (1 if correction is None else correction))
    return (variance, mean) if keepdim else (variance.squeeze(dims), mean.squeeze(dims))


def _repeat(x: torch.Tensor, repeats: Sequence[int]) -> torch.Tensor:
    shape = (*[1] * (len(repeats) - x.dim()), *x.shape)
    apart = [size for pair in zip(repeats, shape, strict=True) for size in pair]
    each = [size for one in shape for size in (1, one)]
    return x.reshape(each).expand(apart).reshape([a * b for a, b in zip(repeats, shape, strict=True)])


def _without_empty(tensors: Sequence[torch.Tensor], dim: int = 0) -> Any:
    """Nothing is joined with nothing, as in the first step of a cache."""
    filled = [one for one in tensors if one.numel()] or tensors[:1]
    if len(filled) == len(tensors):
        return NotImplemented
    return A.cat(filled, dim)


def _as_view(x: torch.Tensor, size: Sequence[int], stride: Sequence[int], offset: int | None = None) -> Any:
    """Autograd asks for some views by their strides."""
    strides = torch.empty(list(size), device="meta").stride()
    if offset or not x.is_contiguous() or tuple(stride) != strides or prod(size) != x.numel():
        return NotImplemented
    return x.reshape(size)


def _trilinear(
    one: torch.Tensor,
    two: torch.Tensor,
    three: torch.Tensor,
    *dims: Sequence[int],
    unroll_dim: int = 1,
) -> torch.Tensor:
    """Multiplies three tensors, each with some dimensions added, and sums over dimensions."""
    *expanded, summed = dims
    product: Any = 1
    for x, added in zip((one, two, three), expanded, strict=True):
        for dim in sorted(added):
            x = x.unsqueeze(dim)
        product = product * x
    return product.sum(list(summed)) if summed else product  # type: ignore[no-any-return]


def _with_bias(
    input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *options: Any
) -> torch.Tensor | Any:
    """The bias is added once, not by each rank that has a part of the sum."""
    if bias is None:
        return NotImplemented
    return A.convolution(input, weight, None, *options) + bias.view(1, -1, *[1] * (input.dim() - 2))
