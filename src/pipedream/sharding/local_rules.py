"""Operators that DTensor does not cut as a layout promises, and a check that none gathers what a layout cuts.

Each rule computes with the ranks' own parts. Its table says, for one dimension of the mesh, which placements of the
operands are possible, how the result is placed then, and how the gradients of the operands are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from pipedream.core.errors import PlanError

__all__ = ["LocalRules", "NoHiddenGathers"]

_WHOLE, _SUM = Replicate(), Partial()

_Table = Mapping[tuple[Placement, ...], tuple[Placement, tuple[Placement, ...]]]
"""Placements of the operands -> that of the result, and those of the operands' gradients."""


def _computed(name: str, table: _Table, function: Callable[..., torch.Tensor], operands: Sequence[DTensor]) -> DTensor:
    """Applies a function to the parts.

    Raises:
        PlanError: the table has no row for the operands' placements.
    """
    mesh, result = operands[0].device_mesh, []
    gradients: list[list[Placement]] = [[] for _ in operands]
    for at in range(mesh.ndim):
        placed = tuple(operand.placements[at] for operand in operands)
        if placed not in table:
            over = (mesh.mesh_dim_names or ())[at]
            raise PlanError(
                f"{name} of tensors of the sizes {', '.join(str(tuple(one.shape)) for one in operands)} cannot be "
                f"computed where the dimension {over!r} of the mesh cuts them as {placed}; change their names in the "
                "layout, or a rule"
            )
        found, own = table[placed]
        result.append(found)
        for row, placement in zip(gradients, own, strict=True):
            row.append(placement)
    parts = [one.to_local(grad_placements=row) for one, row in zip(operands, gradients, strict=True)]
    return DTensor.from_local(function(*parts), mesh, result, run_check=False)


def _dropout(x: DTensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
    """Draws the mask of the whole tensor on every rank, so that the numbers are those of one process."""
    if not training or p == 0.0:
        return x
    x = _summed(x)
    mask = F.dropout(torch.ones(x.shape, dtype=x.dtype, device=x.device), p)
    cut = distribute_tensor(mask, x.device_mesh, x.placements, src_data_rank=None)
    return x.mul_(cut) if inplace else x * cut


# Whole weights see a cut batch; output channels, or input channels, may be cut.
_CONVOLUTION: _Table = {
    (_WHOLE, _WHOLE): (_WHOLE, (_WHOLE, _WHOLE)),
    (Shard(0), _WHOLE): (Shard(0), (Shard(0), _SUM)),
    (_WHOLE, Shard(0)): (Shard(1), (_SUM, Shard(0))),
    (Shard(1), Shard(1)): (_SUM, (Shard(1), Shard(1))),
}


def _convolution(function: Callable[..., torch.Tensor], x: Any, weight: Any, bias: Any = None, *rest: Any) -> Any:
    x, weight = _distributed(x, weight)
    placed = [
        have if cut != Shard(1) or have != _WHOLE else Shard(1)  # a slice
        for have, cut in zip(_summed(x).placements, weight.placements, strict=True)
    ]
    operands = _summed(x).redistribute(placements=placed), weight
    found = _computed(function.__name__, _CONVOLUTION, lambda x, w: function(x, w, None, *rest), operands)
    return found if bias is None else found + bias.view(1, -1, *[1] * (found.dim() - 2))


_ATTENTION: _Table = {(at,) * 3: (at, (at,) * 3) for at in (_WHOLE, Shard(0), Shard(1))}


def _attention(
    query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: float = 0.0, *rest: Any, **options: Any
) -> Any:
    """Cut by batch or by heads."""
    operands = [_summed(one) for one in _distributed(query, key, value)]
    if dropout_p:
        _check_whole("attention with dropout", operands)
    return _computed(
        "attention",
        _ATTENTION,
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, attn_mask, dropout_p, *rest, **options),
        operands,
    )


def _batch_norm(
    x: DTensor,
    running_mean: torch.Tensor | None,
    running_var: torch.Tensor | None,
    weight: Any = None,
    bias: Any = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Any:
    """Takes the statistics of the whole batch."""
    mean: Any
    variance: Any
    shape, over = [1, -1, *[1] * (x.dim() - 2)], [0, *range(2, x.dim())]
    if not training and running_mean is not None and running_var is not None:
        mean = running_mean.view(shape)
        variance = running_var.view(shape)
    else:
        given: Any = x
        count = x.numel() // x.shape[1]
        mean = _summed(given.sum(over, keepdim=True)) / count
        variance = _summed((given - mean).square().sum(over, keepdim=True)) / count
        if running_mean is not None and running_var is not None:
            with torch.no_grad():
                running_mean.lerp_(mean.full_tensor().flatten(), momentum)
                running_var.lerp_(variance.full_tensor().flatten() * (count / (count - 1)), momentum)
    found = (x - mean) * (variance + eps).rsqrt()
    found = found if weight is None else found * weight.view(shape)
    return found if bias is None else found + bias.view(shape)


def _distributed(*operands: Any) -> list[DTensor]:
    """Makes plain tensors, which every rank has whole, DTensors."""
    mesh = next(one.device_mesh for one in operands if isinstance(one, DTensor))
    return [
        one if isinstance(one, DTensor) else DTensor.from_local(one, mesh, [_WHOLE] * mesh.ndim, run_check=False)
        for one in operands
    ]


def _summed(x: DTensor) -> DTensor:
    """Adds up what is a partial sum still."""
    if not any(isinstance(one, Partial) for one in x.placements):
        return x
    return x.redistribute(placements=[_WHOLE if isinstance(one, Partial) else one for one in x.placements])


_RULES: dict[Callable[..., Any], Callable[..., Any]] = {
    F.dropout: _dropout,
    F.batch_norm: _batch_norm,
    F.scaled_dot_product_attention: _attention,
    **{function: partial(_convolution, function) for function in (F.conv1d, F.conv2d, F.conv3d)},
}


_RANDOM = {
    F.dropout1d,
    F.dropout2d,
    F.dropout3d,
    F.alpha_dropout,
    F.feature_alpha_dropout,
    F.rrelu,
    F.gumbel_softmax,
    torch.bernoulli,
    torch.rand_like,
    torch.randn_like,
    torch.randint_like,
    torch.Tensor.bernoulli,
    torch.Tensor.bernoulli_,
    torch.Tensor.uniform_,
    torch.Tensor.normal_,
}
"""Functions whose numbers would be other ones, or the same on several ranks, if each rank drew for its part."""


def _check_whole(name: str, operands: Iterable[Any]) -> None:
    """Raises a `PlanError` if an operand is cut."""
    for one in operands:
        if isinstance(one, DTensor) and any(isinstance(placed, Shard) for placed in one.placements):
            raise PlanError(
                f"{name} draws random numbers for a tensor of {tuple(one.shape)} that the layout cuts "
                f"({one.placements}), where they would not be those of one process; use nn.Dropout, or a layout that "
                "does not cut it"
            )


_KEEP_SUMS = {
    torch.Tensor.dim,
    torch.Tensor.size,
    torch.Tensor.numel,
    torch.Tensor.view,
    torch.Tensor.reshape,
    torch.Tensor.flatten,
    torch.Tensor.transpose,
    torch.Tensor.permute,
    torch.Tensor.unsqueeze,
    torch.Tensor.squeeze,
    torch.flatten,
    torch.reshape,
    torch.transpose,
    torch.permute,
}
"""Functions of a partial sum that are the sum of this function of its parts."""

_ADD = {torch.add, torch.Tensor.add, torch.Tensor.__add__, torch.sub, torch.Tensor.sub, torch.Tensor.__sub__}


def _keeps_sums(func: Callable[..., Any], args: Sequence[Any]) -> bool:
    """Whether a function may be applied to partial sums, one by one."""
    if func in _KEEP_SUMS or getattr(func, "__name__", "") == "__get__":
        return True
    placed = [one.placements for one in args if isinstance(one, DTensor)]
    return func in _ADD and len(placed) == 2 and placed[0] == placed[1]


def _with_sums(value: Any) -> Any:
    """Adds up partial sums in an argument.

    DTensor itself may scatter such a sum over another dimension, and gather it later.
    """
    if type(value) in (tuple, list):
        return type(value)(map(_with_sums, value))
    return _summed(value) if isinstance(value, DTensor) else value


class LocalRules(TorchFunctionMode):
    """Replaces torch's functions on DTensors by those of this file; others get partial sums only as they can use."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        named, rule = kwargs or {}, _RULES.get(func)
        if rule is not None and any(isinstance(one, DTensor) for one in (*args, *named.values())):
            return rule(*args, **named)
        if func in _RANDOM:
            _check_whole(func.__name__, (*args, *named.values()))
        if not _keeps_sums(func, args):
            args, named = _with_sums(args), {name: _with_sums(value) for name, value in named.items()}
        return func(*args, **named)


_GATHERS = {
    torch.ops._c10d_functional.all_gather_into_tensor.default,
    torch.ops._c10d_functional.all_to_all_single.default,
}


class NoHiddenGathers(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Raises a `PlanError` where an operator gathers a tensor that the layout cuts; others may."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._operator: tuple[Any, list[DTensor]] | None = None  # that runs now

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if self._operator is not None and func in _GATHERS:
            operator, operands = self._operator
            sizes = ", ".join(f"{tuple(one.shape)} placed as {one.placements}" for one in operands)
            raise PlanError(
                f"the operator {operator} would gather what the layout cuts, with operands {sizes}; name the "
                "dimensions of the weights so that it need not, or remove a rule"
            )
        operands = [one for one in args if isinstance(one, DTensor)]
        if not operands:
            return func(*args, **(kwargs or {}))
        if self._operator is not None:
            return NotImplemented  # DTensor computes it, by operators on parts that come here again
        self._operator = func, operands
        try:
            with self:
                return func(*args, **(kwargs or {}))
        finally:
            self._operator = None
