"""Operators that are described as several: torch's own decompositions, and some that torch lacks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from math import prod
from typing import Any

import torch
from torch._decomp import get_decompositions

__all__ = ["decompositions"]

A = torch.ops.aten
_TORCHS = (
    A._native_batch_norm_legit, A._native_batch_norm_legit_functional, A._softmax_backward_data,
    A._log_softmax_backward_data, A._thnn_fused_gru_cell, A._thnn_fused_lstm_cell, A.addcdiv, A.addcmul, A.addmm,
    A.baddbmm, A.binary_cross_entropy, A.binary_cross_entropy_backward, A.linear_backward, A.mse_loss,
    A.mse_loss_backward, A.native_dropout, A.native_dropout_backward,
    A.native_batch_norm, A.native_batch_norm_backward, A.native_group_norm,
    A.native_group_norm_backward, A.native_layer_norm, A.native_layer_norm_backward, A.nll_loss_backward,
    A.nll_loss_forward, A.rsub, A.select_backward, A.slice_backward, A.split, A.stack, A.std, A.t, A.threshold_backward,
    A.unbind, A.unfold_backward, A.var,
)  # fmt: skip


@cache
def decompositions() -> dict[Any, Callable[..., Any]]:
    """Returns operator -> what it does, by simpler ones."""
    own: dict[Any, Callable[..., Any]] = {
        A.var_mean.correction: _var_mean,
        A.convolution.default: _with_bias,
        A.mean.dim: _mean,
        A.mean.default: _mean,
    }
    return {**get_decompositions(_TORCHS), **own}


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


def _with_bias(
    input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *options: Any
) -> torch.Tensor | Any:
    """The bias is added once, not by each rank that has a part of the sum."""
    if bias is None:
        return NotImplemented
    return A.convolution(input, weight, None, *options) + bias.view(1, -1, *[1] * (input.dim() - 2))
