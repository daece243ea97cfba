"""Runs a model's forward for a trace: with other tensors, by simple operators, or to see which layer calls one.

Some operators are described as several simpler ones: by torch's own decompositions, and by some that torch lacks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from math import prod
from typing import Any, cast

import torch
from torch import nn
from torch._decomp import core_aten_decompositions, get_decompositions
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

from pipedream.extensions.meshes.layouts.tracing.registry import REGISTRY

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


class Callers(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Finds the innermost layer of a model that calls an operator."""

    def __init__(self, model: nn.Module, function: Any) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.innermost: str | None = None
        self._model, self._function = model, function
        self._inside: list[str] = []
        self._hooks: list[Any] = []

    def __enter__(self) -> Callers:
        for name, module in self._model.named_modules():
            self._hooks.append(module.register_forward_pre_hook(lambda *_, name=name: self._inside.append(name)))
            self._hooks.append(module.register_forward_hook(lambda *_: self._inside.pop() and None))
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *reason: Any) -> None:
        super().__exit__(*reason)  # type: ignore[no-untyped-call]
        for hook in self._hooks:
            hook.remove()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if _read_name(func) == _read_name(self._function) and self.innermost is None and self._inside:
            self.innermost = self._inside[-1]
        return func(*args, **(kwargs or {}))


@contextmanager
def swap_tensors(model: nn.Module, tensors: Mapping[str, torch.Tensor]) -> Iterator[None]:
    """Context in which a model has other parameters and buffers, also one that does not register its modules."""
    name_of = {id(tensor): name for name, tensor in (*model.named_parameters(), *model.named_buffers())}
    slots = [
        (cast(dict[str, Any], module_slots), key, tensor)
        for module in dict.fromkeys(model.modules())
        for module_slots in (module._parameters, module._buffers)
        for key, tensor in module_slots.items()
        if tensor is not None and name_of.get(id(tensor)) in tensors
    ]
    try:
        for module_slots, key, tensor in slots:
            dict.__setitem__(module_slots, key, tensors[name_of[id(tensor)]])
        yield
    finally:
        for module_slots, key, tensor in slots:
            dict.__setitem__(module_slots, key, tensor)


@contextmanager
def disable_fused_operators() -> Iterator[None]:
    """Context in which attention and recurrent layers call simple operators."""
    mkldnn: Any = torch.backends.mkldnn  # its own context warns where TF32 is not available
    before = mkldnn.set_flags(False, _fp32_precision=None)
    try:
        with sdpa_kernel(SDPBackend.MATH), torch.backends.cudnn.flags(enabled=False):
            yield
    finally:
        mkldnn.set_flags(before[0], _fp32_precision=None)


def _read_name(function: Any) -> str:
    """Returns an operator's name, that of its in-place form too."""
    return str(function._schema.name).rstrip("_")


def list_decompositions() -> dict[Any, Callable[..., Any]]:
    """Returns operator -> what it does, by simpler ones."""
    by_hand: dict[Any, Callable[..., Any]] = {
        A.var_mean.correction: _compute_var_mean,
        A.convolution.default: _add_bias,
        A.mean.dim: _compute_mean,
        A.mean.default: _compute_mean,
        A.var.correction: lambda *args, **named: _compute_var_mean(*args, **named)[0],
        A.std.correction: lambda *args, **named: _compute_var_mean(*args, **named)[0].sqrt(),
        A.max.default: lambda x: x.amax(list(range(x.dim()))),
        A.min.default: lambda x: x.amin(list(range(x.dim()))),
        A.index_select.default: lambda x, dim, index: x[(slice(None),) * (dim % x.dim()) + (index,)],
        A.repeat.default: _repeat,
        A.as_strided.default: _reshape_like_strides,
        A.cat.default: _join_without_empty,
        A._trilinear.default: _multiply_three,
    }
    torchs = _load_torch_decompositions().items()
    table: dict[Any, Callable[..., Any]] = {
        **{operator: simpler for operator, simpler in torchs if not REGISTRY.is_described(operator)},
        **get_decompositions(_TORCHS),
        **by_hand,
    }
    return {operator: simpler for operator, simpler in table.items() if not REGISTRY.is_added(operator)}


@cache
def _load_torch_decompositions() -> dict[Any, Callable[..., Any]]:
    table: dict[Any, Callable[..., Any]] = dict(core_aten_decompositions())
    return {op: simpler for op, simpler in table.items() if torch.Tag.nondeterministic_seeded not in op.tags}


def _compute_mean(
    x: torch.Tensor, dim: Sequence[int] | None = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> torch.Tensor:
    dims = list(range(x.dim())) if not dim else list(dim)
    return x.sum(dims, keepdim, dtype=dtype) / prod(x.shape[at] for at in dims)


def _compute_var_mean(
    x: torch.Tensor, dim: Sequence[int] | None = None, *, correction: float | None = None, keepdim: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    dims = list(range(x.dim())) if dim is None else list(dim)
    count = prod(x.shape[at] for at in dims)
    mean = x.sum(dims, True) / count
    apart = x - mean
    variance = (apart * apart).sum(dims, True) / (count - (1 if correction is None else correction))
    return (variance, mean) if keepdim else (variance.squeeze(dims), mean.squeeze(dims))


def _repeat(x: torch.Tensor, repeats: Sequence[int]) -> torch.Tensor:
    shape = (*[1] * (len(repeats) - x.dim()), *x.shape)
    apart = [size for pair in zip(repeats, shape, strict=True) for size in pair]
    interleaved = [size for length in shape for size in (1, length)]
    return x.reshape(interleaved).expand(apart).reshape([a * b for a, b in zip(repeats, shape, strict=True)])


def _join_without_empty(tensors: Sequence[torch.Tensor], dim: int = 0) -> Any:
    """Nothing is joined with nothing, as in the first step of a cache."""
    filled = [tensor for tensor in tensors if tensor.numel()] or tensors[:1]
    if len(filled) == len(tensors):
        return NotImplemented
    return A.cat(filled, dim)


def _reshape_like_strides(
    x: torch.Tensor, size: Sequence[int], stride: Sequence[int], offset: int | None = None
) -> Any:
    """Autograd asks for some views by their strides."""
    strides = torch.empty(list(size), device="meta").stride()
    if offset or not x.is_contiguous() or tuple(stride) != strides or prod(size) != x.numel():
        return NotImplemented
    return x.reshape(size)


def _multiply_three(
    first: torch.Tensor, second: torch.Tensor, third: torch.Tensor, *dims: Sequence[int], unroll_dim: int = 1
) -> torch.Tensor:
    """Multiplies three tensors, each with some dimensions added, and sums over dimensions."""
    *expanded, summed = dims
    product: Any = 1
    for x, added in zip((first, second, third), expanded, strict=True):
        for dim in sorted(added):
            x = x.unsqueeze(dim)
        product = product * x
    return product.sum(list(summed)) if summed else product  # type: ignore[no-any-return]


def _add_bias(
    input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *options: Any
) -> torch.Tensor | Any:
    """The bias is added once, not by each rank that has a part of the sum."""
    if bias is None:
        return NotImplemented
    return A.convolution(input, weight, None, *options) + bias.view(1, -1, *[1] * (input.dim() - 2))
