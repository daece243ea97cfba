"""Operators that DTensor does not shard as a layout promises, and a check that none gathers what a layout shards."""

from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from types import FunctionType
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from pipedream.core.errors import PlanError
from pipedream.extensions.meshes.sharding import layers
from pipedream.extensions.meshes.sharding.functions import apply_by_channel, check_whole, complete_sums
from pipedream.extensions.meshes.sharding.layers import attention

_DROPOUTS = F.dropout, F.dropout1d, F.dropout2d, F.dropout3d
_CONVOLUTIONS = F.conv1d, F.conv2d, F.conv3d, F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d
_RECURRENT = torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu
_POOLS = {
    1: (F.avg_pool1d, F.max_pool1d, torch.max_pool1d, F.adaptive_avg_pool1d),
    2: (F.avg_pool2d, F.max_pool2d, torch.max_pool2d, F.adaptive_avg_pool2d),
    3: (F.avg_pool3d, F.max_pool3d, torch.max_pool3d, F.adaptive_avg_pool3d),
}

_RULES: dict[Callable[..., Any], Callable[..., Any]] = {
    F.batch_norm: layers.apply_batch_norm,
    F.layer_norm: layers.apply_layer_norm,
    F.rms_norm: layers.apply_rms_norm,
    F.group_norm: layers.apply_group_norm,
    F.instance_norm: layers.apply_instance_norm,
    F.embedding: layers.apply_embedding,
    F.scaled_dot_product_attention: attention,
    F.interpolate: partial(apply_by_channel, F.interpolate, None),
    **{dropout: partial(layers.apply_dropout, dropout) for dropout in _DROPOUTS},
    **{convolution: partial(layers.apply_convolution, convolution) for convolution in _CONVOLUTIONS},
    **{recurrent: partial(layers.run_recurrent, recurrent) for recurrent in _RECURRENT},
    **{pool: partial(apply_by_channel, pool, spatial) for spatial, pools in _POOLS.items() for pool in pools},
}
"""Function of torch -> what computes it on DTensors."""

_RESHAPING = "view", "reshape", "flatten", "transpose", "permute", "unsqueeze", "squeeze"
_KEEP_SUMS = {getattr(torch.Tensor, name) for name in ("dim", "size", "numel", *_RESHAPING)}
_KEEP_SUMS |= {torch.flatten, torch.reshape, torch.transpose, torch.permute}
"""Functions of a partial sum that are the sum of this function of its parts."""

_ADD = {torch.add, torch.Tensor.add, torch.Tensor.__add__, torch.sub, torch.Tensor.sub, torch.Tensor.__sub__}


def _may_keep_sums(func: Callable[..., Any], args: Sequence[Any]) -> bool:
    """Whether a function may be applied to partial sums, one by one."""
    if func in _KEEP_SUMS or getattr(func, "__name__", "") == "__get__":
        return True
    placed = [arg.placements for arg in args if isinstance(arg, DTensor)]
    return func in _ADD and len(placed) == 2 and placed[0] == placed[1]


@cache
def _open_to_modes(function: Any) -> Any:
    """Returns torch's function so that modes see the functions that it calls."""
    none = {name: lambda *operands: False for name in function.__globals__ if name.startswith("has_torch_function")}
    opened = FunctionType(
        function.__code__, function.__globals__ | none, function.__name__, function.__defaults__, function.__closure__
    )
    opened.__kwdefaults__ = function.__kwdefaults__
    return opened


class LocalRules(TorchFunctionMode):
    """Replaces torch's functions on DTensors by those of this file; others get partial sums only as they can use."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if isinstance(func, torch._ops.OpOverload):  # a dispatch mode passes on what torch's functions call
            return func(*args, **(kwargs or {}))
        named, rule = kwargs or {}, _RULES.get(func)
        if rule is not None and any(isinstance(arg, DTensor) for arg in (*args, *named.values())):
            return rule(*args, **named)
        if func is F.multi_head_attention_forward:
            with self:
                return _open_to_modes(func)(*args, **named)
        if not _may_keep_sums(func, args):
            args, named = complete_sums(args), {name: complete_sums(value) for name, value in named.items()}
        try:
            return func(*args, **named)
        except RuntimeError as error:
            if "Please redistribute the tensor" not in str(error):
                raise
            cut = next(arg for arg in args if isinstance(arg, DTensor))
            raise PlanError(
                f"{func.__name__} was asked for of a tensor of {tuple(cut.shape)} placed as {cut.placements}, whose "
                f"parts cannot stay apart ({str(error).partition('.')[0]}); choose sizes that the ranks divide, such "
                "as a number of heads, or remove a rule"
            ) from error


_GATHERS = {
    torch.ops._c10d_functional.all_gather_into_tensor.default,
    torch.ops._c10d_functional.all_to_all_single.default,
    torch.ops._dtensor.shard_dim_alltoall.default,  # DTensor's own from one cut to another, on GPUs
}


class NoHiddenGathers(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Raises a `PlanError` where an operator would have to gather a tensor that the layout shards.

    Gathers that the code asks for (redistribute, replicate, full_tensor) are allowed. Operators that draw random
    numbers for a tensor that is sharded are refused as well: they would be other numbers than those of one process, or
    the same on several ranks. Both are seen only where this mode is active, which is in the first passes of a stage.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._operator: tuple[Any, list[DTensor]] | None = None  # that runs now

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if self._operator is not None and func in _GATHERS:
            operator, operands = self._operator
            sizes = ", ".join(f"{tuple(operand.shape)} placed as {operand.placements}" for operand in operands)
            raise PlanError(
                f"{operator} would have to gather tensors that the layout shards: {sizes}; name the dimensions of the "
                "weights so that it does not have to, or remove a rule"
            )
        operands = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, DTensor)]  # also in lists
        if not operands:
            return func(*args, **(kwargs or {}))
        if _is_random(func, args, kwargs or {}):
            check_whole(func._schema.name.removeprefix("aten::"), operands)
        if self._operator is not None:
            return NotImplemented  # DTensor computes it, by operators on parts that come here again
        self._operator = func, operands
        try:
            with self:
                return func(*args, **(kwargs or {}))
        finally:
            self._operator = None


def bind_arguments(operator: Any, args: Sequence[Any], named: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the arguments of a call of one of torch's operators by name, defaults too."""
    schema = operator._schema.arguments
    bound = {argument.name: argument.default_value for argument in schema if argument.has_default_value()}
    return bound | {argument.name: value for argument, value in zip(schema, args, strict=False)} | dict(named)


def _is_random(func: Any, args: Sequence[Any], named: Mapping[str, Any]) -> bool:
    """Whether an operator draws random numbers, with these arguments."""
    if torch.Tag.nondeterministic_seeded not in func.tags:
        return False
    values = bind_arguments(func, args, named)
    return values.get("training", True) is not False and values.get("dropout_p") != 0.0
