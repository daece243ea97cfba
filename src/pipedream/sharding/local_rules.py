"""Operators that DTensor does not cut as a layout promises, and a check that none gathers what a layout cuts.

Each rule computes with the ranks' own parts. Its table says, for one dimension of the mesh, which placements of the
operands are possible, how the result is placed then, and how the gradients of the operands are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, partial
from math import prod
from types import FunctionType
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from pipedream.core.errors import PlanError
from pipedream.sharding.functions import all_to_all, part_sizes, sum_partials

_WHOLE, _SUM = Replicate(), Partial()

Placed = Placement | tuple[Placement, ...]
_Table = Mapping[tuple[Placement, ...], tuple[Placed, tuple[Placement, ...]]]
"""Placements of the operands -> that of the result, or of several, and those of the operands' gradients."""


def compute_on_parts(
    name: str,
    table: _Table,
    function: Callable[..., Any],
    operands: Sequence[DTensor],
    shape: Sequence[int] | None = None,
) -> Any:
    """Applies a function to the parts; returns a DTensor, or a tuple of them.

    Args:
        name: in words, for errors.
        shape: of the result, whose parts may then be of different sizes.

    Raises:
        PlanError: the table has no row for the operands' placements, or parts are of different sizes.
    """
    mesh, rows = operands[0].device_mesh, []
    for at, over in enumerate(mesh.mesh_dim_names or ()):
        placed = tuple(operand.placements[at] for operand in operands)
        sizes = ", ".join(str(tuple(operand.shape)) for operand in operands)
        if placed not in table:
            raise PlanError(
                f"{name} of tensors of the sizes {sizes} cannot be computed where the dimension {over!r} of the mesh "
                f"cuts them as {placed}; change their names in the layout, or a rule"
            )
        cuts = zip(operands, placed, strict=True)
        if shape is None and any(
            isinstance(cut, Shard) and operand.shape[cut.dim] % mesh.size(at) for operand, cut in cuts
        ):
            raise PlanError(
                f"{name} of tensors of the sizes {sizes} was asked for, but the dimension {over!r} of the mesh, of "
                f"{mesh.size(at)} ranks, does not divide what it cuts, {placed}; choose other sizes, or do not cut it"
            )
        rows.append(table[placed])
    results: Any = [result for result, _ in rows]
    gradients = zip(*(placements for _, placements in rows), strict=True)
    parts = [operand.to_local(grad_placements=row) for operand, row in zip(operands, gradients, strict=True)]
    computed = function(*parts)
    if isinstance(computed, torch.Tensor):
        whole = None if shape is None else torch.Size(shape)
        stride = None if shape is None else torch.empty(shape, device="meta").stride()
        return DTensor.from_local(computed, mesh, results, run_check=False, shape=whole, stride=stride)
    several = zip(computed, *results, strict=True)
    return tuple(DTensor.from_local(part, mesh, placed, run_check=False) for part, *placed in several)


def _apply_dropout(
    function: Callable[..., torch.Tensor], input: DTensor, p: float = 0.5, training: bool = True, inplace: bool = False
) -> Any:
    """Draws the mask of the whole tensor on every rank, so that the numbers are those of one process."""
    if not training or p == 0.0:
        return input
    x = sum_partials(input)
    # The strides decide which element gets which number.
    ones = torch.ones_like(torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta"), device=x.device)
    mask = function(ones, p)
    cut = distribute_tensor(mask, x.device_mesh, x.placements, src_data_rank=None)
    return x.mul_(cut) if inplace else x * cut


# Whole weights see a cut batch; output channels, or input channels, may be cut.
_CONVOLUTION: _Table = {
    (_WHOLE, _WHOLE): (_WHOLE, (_WHOLE, _WHOLE)),
    (Shard(0), _WHOLE): (Shard(0), (Shard(0), _SUM)),
    (_WHOLE, Shard(0)): (Shard(1), (_SUM, Shard(0))),
    (Shard(1), Shard(1)): (_SUM, (Shard(1), Shard(1))),
}
_TRANSPOSED: _Table = {  # whose weights are [input channels, output channels, ...]
    (_WHOLE, _WHOLE): (_WHOLE, (_WHOLE, _WHOLE)),
    (Shard(0), _WHOLE): (Shard(0), (Shard(0), _SUM)),
    (_WHOLE, Shard(1)): (Shard(1), (_SUM, Shard(1))),
    (Shard(1), Shard(0)): (_SUM, (Shard(1), Shard(0))),
}
_GROUPED: _Table = {  # of either; where the weights are cut, each rank has whole groups
    (_WHOLE, _WHOLE): (_WHOLE, (_WHOLE, _WHOLE)),
    (Shard(0), _WHOLE): (Shard(0), (Shard(0), _SUM)),
    (Shard(1), Shard(0)): (Shard(1), (Shard(1), Shard(0))),
}


def _apply_convolution(
    function: Callable[..., torch.Tensor],
    input: Any,
    weight: Any,
    bias: Any = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Any:
    options = {"stride": stride, "padding": padding, "dilation": dilation}
    return _convolve(function, _CONVOLUTION, input, weight, bias, groups, options)


def _apply_transposed_convolution(
    function: Callable[..., torch.Tensor],
    input: Any,
    weight: Any,
    bias: Any = None,
    stride: Any = 1,
    padding: Any = 0,
    output_padding: Any = 0,
    groups: int = 1,
    dilation: Any = 1,
) -> Any:
    options = {"stride": stride, "padding": padding, "output_padding": output_padding, "dilation": dilation}
    return _convolve(function, _TRANSPOSED, input, weight, bias, groups, options)


def _convolve(
    function: Callable[..., torch.Tensor],
    table: _Table,
    x: Any,
    weight: Any,
    bias: Any,
    groups: int,
    options: Mapping[str, Any],
) -> Any:
    x, weight = make_dtensors(x, weight)
    if x.dim() == weight.dim() - 1:  # a sample without a batch
        return _convolve(function, table, x.unsqueeze(0), weight, bias, groups, options).squeeze(0)
    name, mesh, table = function.__name__, weight.device_mesh, table if groups == 1 else _GROUPED
    ranks = prod(mesh.size(at) for at, cut in enumerate(weight.placements) if cut == Shard(0)) if groups > 1 else 1
    if groups % ranks:
        raise PlanError(
            f"{name} with {groups} groups was asked for, but {ranks} ranks cut the channels of its weight of "
            f"{tuple(weight.shape)}, so that a group would be on several ranks; choose a number of groups that the "
            "ranks divide, or do not cut these channels"
        )
    x = sum_partials(x)
    placed = [
        Shard(1) if have == _WHOLE and (have, cut) not in table else have  # a slice
        for have, cut in zip(x.placements, weight.placements, strict=True)
    ]
    output = compute_on_parts(
        name if groups == 1 else f"{name} with {groups} groups",
        table,
        lambda x, w: function(x, w, None, groups=groups // ranks, **options),
        (x.redistribute(placements=placed), weight),
    )
    return output if bias is None else output + bias.to(output.dtype).view(1, -1, *[1] * (output.dim() - 2))


def _apply_by_channel(
    function: Callable[..., torch.Tensor], spatial: int | None, input: DTensor, *rest: Any, **options: Any
) -> Any:
    """A function of each channel of each sample.

    Args:
        spatial: dimensions after the channels, before which a batch may lack; None: all after the first two.
    """
    name = getattr(function, "__name__", "a normalization")
    apart = input.dim() - spatial if spatial is not None else 2
    table: _Table = {(at,): (at, (at,)) for at in (_WHOLE, *map(Shard, range(apart)))}
    return compute_on_parts(name, table, lambda part: function(part, *rest, **options), [sum_partials(input)])


def attention(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    """Returns `F.scaled_dot_product_attention` of tensors [batch, heads, length, d].

    It is computed as they are cut: by batch, or by heads. Where the length is cut, an all-to-all cuts the heads
    instead, and another one afterwards the length again (DeepSpeed-Ulysses, Jacobs et al. 2023, 3).

    Raises:
        PlanError: the ranks that cut the length, or the heads, do not divide the heads of queries, keys or values.
    """
    options: dict[str, Any] = {"is_causal": is_causal, "scale": scale, "enable_gqa": enable_gqa}
    if not any(isinstance(tensor, DTensor) for tensor in (query, key, value)):
        return F.scaled_dot_product_attention(query, key, value, attn_mask, dropout_p, **options)
    query, key, value = (sum_partials(tensor) for tensor in make_dtensors(query, key, value))
    mesh, length, heads = query.device_mesh, query.dim() - 2, query.dim() - 3
    for at in range(mesh.ndim):  # slices, where only some are cut
        cut = next((tensor.placements[at] for tensor in (query, key, value) if tensor.placements[at] != _WHOLE), _WHOLE)
        query, key, value = (
            tensor
            if tensor.placements[at] != _WHOLE
            else tensor.redistribute(placements=_replace_placement(tensor.placements, at, cut))
            for tensor in (query, key, value)
        )
    _check_heads(query, key, value, heads, enable_gqa)
    over = [at for at, placed in enumerate(query.placements) if placed == Shard(length)]
    mask = None if attn_mask is None else _mask_part(attn_mask, query, over)
    noise = None
    if dropout_p:  # every rank draws for all heads, as one process does
        sizes = (*query.shape[:-1], key.shape[length])
        noise = _mask_part(F.dropout(torch.ones(sizes, dtype=query.dtype, device=query.device), dropout_p), query, over)
    groups = [mesh.get_group(at) for at in over]

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        for group in groups:
            if uneven := [tensor.shape[heads] for tensor in (q, k, v) if tensor.shape[heads] % group.size()]:
                raise PlanError(
                    f"attention was asked for where {group.size()} ranks cut the length, which then cut the heads "
                    f"instead, but there are {uneven[0]} heads; choose a number of heads that they divide, or cut "
                    "'heads' or 'batch' instead of the length"
                )
            q, k, v = (
                all_to_all(part, group, length, heads, whole.shape[length])
                for part, whole in ((q, query), (k, key), (v, value))
            )
        if noise is None:
            attended = F.scaled_dot_product_attention(q, k, v, mask, **options)
        else:
            attended = _attend_with_noise(noise, q, k, v, mask, **options)
        for group in groups:
            attended = all_to_all(attended, group, heads, length, attended.shape[heads] * group.size())
        return attended

    table: _Table = {(placed,) * 3: (placed, (placed,) * 3) for placed in (_WHOLE, *map(Shard, range(length + 1)))}
    return compute_on_parts("attention", table, attend, (query, key, value), (*query.shape[:-1], value.shape[-1]))


def _check_heads(query: DTensor, key: DTensor, value: DTensor, heads: int, enable_gqa: bool) -> None:
    """Raises a `PlanError` where a rank would have queries whose keys and values are on another."""
    if query.dim() == 3 and not enable_gqa:
        return  # these are samples, which may be cut unevenly
    ranks = prod(query.device_mesh.size(at) for at, cut in enumerate(query.placements) if cut == Shard(heads))
    counts = tuple(tensor.shape[heads] for tensor in (query, key, value))
    if any(count % ranks for count in counts):
        raise PlanError(
            f"attention was asked for where {ranks} ranks cut the heads, but there are {counts[0]} heads of queries, "
            f"{counts[1]} of keys and {counts[2]} of values; choose numbers of heads that they divide, or cut 'batch' "
            "instead of 'heads'"
        )


def _attend_with_noise(
    noise: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    *,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> torch.Tensor:
    """Returns `F.scaled_dot_product_attention` whose probabilities are multiplied by noise."""
    if enable_gqa:
        key, value = (tensor.repeat_interleave(query.shape[-3] // tensor.shape[-3], -3) for tensor in (key, value))
    scores = query @ key.mT * (query.shape[-1] ** -0.5 if scale is None else scale)
    if is_causal:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else scores + mask
    nothing = scores.isneginf().all(-1, keepdim=True)  # a position that sees none gets zeros
    return scores.masked_fill(nothing, 0.0).softmax(-1).masked_fill(nothing, 0.0) * noise @ value


def _mask_part(mask: Any, query: DTensor, over: Sequence[int]) -> torch.Tensor:
    """Returns what a rank's part of the attention needs of the mask.

    Args:
        over: dimensions of the mesh that cut the length, and meanwhile the heads.
    """
    mesh, missing = query.device_mesh, query.dim() - mask.dim()
    if not isinstance(mask, DTensor):
        mask = DTensor.from_local(mask, mesh, [_WHOLE] * mesh.ndim, run_check=False)
    slices: list[tuple[int, int]] = []
    placed: list[Placement] = [_WHOLE] * mesh.ndim
    gradients: list[Placement] = [_WHOLE] * mesh.ndim
    for at in [*(at for at in range(mesh.ndim) if at not in over), *over]:
        cut = query.placements[at]
        if not isinstance(cut, Shard):
            continue
        gradients[at], dim = _SUM, (query.dim() - 3 if at in over else cut.dim) - missing
        if dim < 0 or mask.shape[dim] == 1:
            continue
        if at not in over and mask.placements[at] == Shard(dim):
            placed[at] = gradients[at] = Shard(dim)
        else:
            slices.append((at, dim))
    part: torch.Tensor = mask.redistribute(placements=placed).to_local(grad_placements=gradients)
    for at, dim in slices:
        sizes = part_sizes(part.shape[dim], mesh.size(at))
        part = part.split(sizes, dim)[mesh.get_local_rank(at)]  # type: ignore[no-untyped-call]
    return part


def _replace_placement(placements: Sequence[Placement], at: int, placed: Placement) -> list[Placement]:
    return [*placements[:at], placed, *placements[at + 1 :]]


def _run_recurrent(function: Callable[..., Any], x: Any, *args: Any) -> Any:
    """Cut by batch; of the weights every rank has all."""
    if not isinstance(args[2], bool):
        raise PlanError(
            f"{function.__name__} of a packed sequence was asked for on a mesh, which does not cut packed sequences; "
            "give a padded tensor"
        )
    state, weights, *options = args
    states = state if isinstance(state, (tuple, list)) else (state,)
    x, *others = make_dtensors(x, *states, *weights)
    x, batch = sum_partials(x), Shard(0 if options[-1] else 1)
    if options[2] and options[3]:
        _check_whole(f"the dropout of {function.__name__}", (x,))
    placed: list[Placement] = [Shard(1) if placement == batch else _WHOLE for placement in x.placements]
    others[: len(states)] = [tensor.redistribute(placements=placed) for tensor in others[: len(states)]]  # slices
    table: _Table = {
        (cut, *[cut_state] * len(states), *[_WHOLE] * len(weights)): (
            (cut, *[cut_state] * len(states)),
            (cut, *[cut_state] * len(states), *[gradient] * len(weights)),
        )
        for cut, cut_state, gradient in ((_WHOLE, _WHOLE, _WHOLE), (batch, Shard(1), _SUM))
    }

    def run(x: torch.Tensor, *parts: torch.Tensor) -> Any:
        state_parts = parts[: len(states)]
        return function(x, state_parts[0] if state is not states else state_parts, list(parts[len(states) :]), *options)

    return compute_on_parts(function.__name__, table, run, (x, *others))


def _apply_batch_norm(
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


def _apply_layer_norm(
    input: Any, normalized_shape: Sequence[int], weight: Any = None, bias: Any = None, eps: float = 1e-5
) -> Any:
    x, over = _complete_sums(input), list(range(-len(normalized_shape), 0))
    if _is_sharded(x, over):
        x = x - sum_partials(x.mean(over, keepdim=True))
        return _scale_and_shift(x * (sum_partials(x.square().mean(over, keepdim=True)) + eps).rsqrt(), weight, bias)
    if _is_sharded(weight) or _is_sharded(bias):
        return _scale_and_shift(F.layer_norm(x, normalized_shape, eps=eps), weight, bias)
    return F.layer_norm(x, normalized_shape, weight, bias, eps)


def _apply_rms_norm(input: Any, normalized_shape: Sequence[int], weight: Any = None, eps: float | None = None) -> Any:
    x, over = _complete_sums(input), list(range(-len(normalized_shape), 0))
    if _is_sharded(x, over):
        eps = torch.finfo(x.dtype).eps if eps is None else eps
        return _scale_and_shift(x * (sum_partials(x.square().mean(over, keepdim=True)) + eps).rsqrt(), weight, None)
    if _is_sharded(weight):
        return _scale_and_shift(F.rms_norm(x, normalized_shape, eps=eps), weight, None)
    return F.rms_norm(x, normalized_shape, weight, eps)


def _scale_and_shift(x: Any, weight: Any, bias: Any) -> Any:
    x = x if weight is None else x * weight
    return x if bias is None else x + bias


def _scale_and_shift_channels(x: Any, weight: Any, bias: Any) -> Any:
    shape = [1, -1, *[1] * (x.dim() - 2)]
    return _scale_and_shift(x, *(None if parameter is None else parameter.view(shape) for parameter in (weight, bias)))


def _is_sharded(x: Any, dims: Sequence[int] | None = None) -> bool:
    """Whether one of the dimensions, counted from the end, is cut; None: whether any is."""
    return isinstance(x, DTensor) and any(
        isinstance(placement, Shard) and (dims is None or placement.dim - x.dim() in dims) for placement in x.placements
    )


def _apply_group_norm(input: DTensor, num_groups: int, weight: Any = None, bias: Any = None, eps: float = 1e-5) -> Any:
    """Takes the statistics of each sample's groups, of which each rank has whole ones."""
    x = sum_partials(input)
    if any(placed == Shard(1) and num_groups % x.device_mesh.size(at) for at, placed in enumerate(x.placements)):
        raise PlanError(
            f"group_norm with {num_groups} groups was asked for on a tensor of {tuple(x.shape)} whose channels are "
            f"cut ({x.placements}), so that a group would be on several ranks; choose a number of groups that the "
            "ranks divide, or do not cut the channels"
        )
    channels = x.shape[1] // num_groups
    normalised = _apply_by_channel(lambda part: F.group_norm(part, part.shape[1] // channels, eps=eps), None, x)
    return _scale_and_shift_channels(normalised, weight, bias)


def _apply_instance_norm(
    input: DTensor,
    running_mean: torch.Tensor | None = None,
    running_var: torch.Tensor | None = None,
    weight: Any = None,
    bias: Any = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Any:
    if running_mean is not None:
        raise PlanError(
            f"instance_norm with running statistics was asked for on a mesh, for a tensor of {tuple(input.shape)}; use "
            "track_running_stats=False"
        )
    return _apply_group_norm(input, input.shape[1], weight, bias, eps)


def _apply_embedding(
    input: Any,
    weight: Any,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Any:
    """Each rank looks up the words whose rows it has; the others give zeros to the sum.

    Raises:
        PlanError: words or weight are cut, and an option needs all of them.
    """
    x, weight = make_dtensors(input, weight)
    x, (words, width) = sum_partials(x), weight.shape
    options = {"max_norm": max_norm is not None, "scale_grad_by_freq": scale_grad_by_freq, "sparse": sparse}
    needs_all = [name for name, is_asked in options.items() if is_asked]
    if needs_all and any(isinstance(placement, Shard) for placement in (*x.placements, *weight.placements)):
        raise PlanError(
            f"an embedding with {needs_all[0]} was asked for, but the layout cuts its words, placed as {x.placements}, "
            f"or its weight of {tuple(weight.shape)}, placed as {weight.placements}; leave the option out, or a rule"
        )
    padding = padding_idx + words if padding_idx is not None and padding_idx < 0 else padding_idx
    mesh, first = weight.device_mesh, 0
    for at, placed in enumerate(weight.placements):
        if placed == Shard(0):
            first = sum(part_sizes(words, mesh.size(at))[: mesh.get_local_rank(at)])

    def look_up(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        count = len(weight)
        if count == words:
            return F.embedding(x, weight, padding, max_norm, norm_type, scale_grad_by_freq, sparse)
        row = x - first
        # A word that no rank has stays out of range, and is an error as in one process.
        elsewhere = ((row < 0) | (row >= count)) & (x >= 0) & (x < words)
        pad = None if padding is None or not 0 <= padding - first < count else padding - first
        return F.embedding(row.masked_fill(elsewhere, 0), weight, pad).masked_fill(elsewhere[..., None], 0)

    table: _Table = {
        (_WHOLE, _WHOLE): (_WHOLE, (_WHOLE, _WHOLE)),
        (_WHOLE, Shard(0)): (_SUM, (_WHOLE, Shard(0))),
        (_WHOLE, Shard(1)): (Shard(x.dim()), (_WHOLE, Shard(1))),
        **{(Shard(dim), _WHOLE): (Shard(dim), (Shard(dim), _SUM)) for dim in range(x.dim())},
    }
    return compute_on_parts("an embedding", table, look_up, (x, weight), (*x.shape, width))


def make_dtensors(*operands: Any) -> list[DTensor]:
    """Makes plain tensors, which every rank has whole, DTensors."""
    mesh = next(operand.device_mesh for operand in operands if isinstance(operand, DTensor))
    return [
        operand
        if isinstance(operand, DTensor)
        else DTensor.from_local(operand, mesh, [_WHOLE] * mesh.ndim, run_check=False)
        for operand in operands
    ]


_RULES: dict[Callable[..., Any], Callable[..., Any]] = {
    F.batch_norm: _apply_batch_norm,
    F.layer_norm: _apply_layer_norm,
    F.rms_norm: _apply_rms_norm,
    F.group_norm: _apply_group_norm,
    F.instance_norm: _apply_instance_norm,
    F.embedding: _apply_embedding,
    F.scaled_dot_product_attention: attention,
    **{function: partial(_apply_dropout, function) for function in (F.dropout, F.dropout1d, F.dropout2d, F.dropout3d)},
    **{function: partial(_apply_convolution, function) for function in (F.conv1d, F.conv2d, F.conv3d)},
    **{
        function: partial(_apply_transposed_convolution, function)
        for function in (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)
    },
    **{
        function: partial(_run_recurrent, function)
        for function in (torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu)
    },
    F.interpolate: partial(_apply_by_channel, F.interpolate, None),
    **{
        function: partial(_apply_by_channel, function, spatial)
        for spatial, functions in (
            (1, (F.avg_pool1d, F.max_pool1d, torch.max_pool1d, F.adaptive_avg_pool1d)),
            (2, (F.avg_pool2d, F.max_pool2d, torch.max_pool2d, F.adaptive_avg_pool2d)),
            (3, (F.avg_pool3d, F.max_pool3d, torch.max_pool3d, F.adaptive_avg_pool3d)),
        )
        for function in functions
    },
}


def _check_whole(name: str, operands: Iterable[Any]) -> None:
    """Raises a `PlanError` if an operand is cut."""
    for operand in operands:
        if isinstance(operand, DTensor) and any(isinstance(placed, Shard) for placed in operand.placements):
            raise PlanError(
                f"{name} draws random numbers for a tensor of {tuple(operand.shape)} that the layout cuts "
                f"({operand.placements}), where they would not be those of one process; use nn.Dropout, or a layout "
                "that does not cut it"
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


def _may_keep_sums(func: Callable[..., Any], args: Sequence[Any]) -> bool:
    """Whether a function may be applied to partial sums, one by one."""
    if func in _KEEP_SUMS or getattr(func, "__name__", "") == "__get__":
        return True
    placed = [arg.placements for arg in args if isinstance(arg, DTensor)]
    return func in _ADD and len(placed) == 2 and placed[0] == placed[1]


def _complete_sums(value: Any) -> Any:
    """Adds up partial sums in an argument.

    DTensor itself may scatter such a sum over another dimension, and gather it later.
    """
    if type(value) in (tuple, list):
        return type(value)(map(_complete_sums, value))
    return sum_partials(value) if isinstance(value, DTensor) else value


@cache
def _open_to_modes(function: Any) -> Any:
    """Returns torch's function so that modes see the functions that it calls."""
    seen = {name: lambda *operands: False for name in function.__globals__ if name.startswith("has_torch_function")}
    opened = FunctionType(
        function.__code__, function.__globals__ | seen, function.__name__, function.__defaults__, function.__closure__
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
            args, named = _complete_sums(args), {name: _complete_sums(value) for name, value in named.items()}
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
    """Raises a `PlanError` where an operator would have to gather a tensor that the layout cuts.

    Gathers that the code asks for (redistribute, replicate, full_tensor) are allowed. Operators that draw random
    numbers for a tensor that is cut are refused as well: they would be other numbers than those of one process, or the
    same on several ranks. Both are seen only where this mode is active, which is in the first passes of a stage.
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
                f"{operator} would have to gather tensors that the layout cuts: {sizes}; name the dimensions of the "
                "weights so that it does not have to, or remove a rule"
            )
        operands = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, DTensor)]  # also in lists
        if not operands:
            return func(*args, **(kwargs or {}))
        if _is_random(func, args, kwargs or {}):
            _check_whole(func._schema.name.removeprefix("aten::"), operands)
        if self._operator is not None:
            return NotImplemented  # DTensor computes it, by operators on parts that come here again
        self._operator = func, operands
        try:
            with self:
                return func(*args, **(kwargs or {}))
        finally:
            self._operator = None


def _is_random(func: Any, args: Sequence[Any], named: Mapping[str, Any]) -> bool:
    """Whether an operator draws random numbers, with these arguments."""
    if torch.Tag.nondeterministic_seeded not in func.tags:
        return False
    arguments = func._schema.arguments
    values = {argument.name: argument.default_value for argument in arguments}
    values |= {argument.name: value for argument, value in zip(arguments, args, strict=False)} | dict(named)
    return values.get("training", True) is not False and values.get("dropout_p") != 0.0
