"""Dropout, convolutions, recurrent layers, embeddings and normalizations (with whole statistics), on parts."""

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Placement, Shard, distribute_tensor
from torch.nn import functional as F

from pipedream.core.box import memory_order
from pipedream.core.errors import PlanError
from pipedream.extensions.meshes.sharding.functions import (
    SUM,
    WHOLE,
    Table,
    all_to_all,
    apply_by_channel,
    check_whole,
    complete_sums,
    compute_on_parts,
    find_order,
    is_sharded,
    make_dtensors,
    part_sizes,
    put_in_order,
    redistribute,
    sum_partials,
    wrap_whole,
)

# Whole weights see a sharded batch; output channels, or input channels, may be sharded.
_WHOLE_WEIGHT: Table = {
    (WHOLE, WHOLE): (WHOLE, (WHOLE, WHOLE)),
    (Shard(0), WHOLE): (Shard(0), (Shard(0), SUM)),
}
_CONVOLUTION: Table = {
    **_WHOLE_WEIGHT,
    (WHOLE, Shard(0)): (Shard(1), (SUM, Shard(0))),
    (Shard(1), Shard(1)): (SUM, (Shard(1), Shard(1))),
}
_TRANSPOSED: Table = {  # whose weights are [input channels, output channels, ...]
    **_WHOLE_WEIGHT,
    (WHOLE, Shard(1)): (Shard(1), (SUM, Shard(1))),
    (Shard(1), Shard(0)): (SUM, (Shard(1), Shard(0))),
}
# Of either; where the weights are sharded, each rank has whole groups.
_GROUPED: Table = {**_WHOLE_WEIGHT, (Shard(1), Shard(0)): (Shard(1), (Shard(1), Shard(0)))}
_ORDER = "stride", "padding", "dilation", "groups"
_TRANSPOSED_ORDER = "stride", "padding", "output_padding", "groups", "dilation"


def apply_dropout(
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


def apply_convolution(
    function: Callable[..., torch.Tensor], input: Any, weight: Any, bias: Any = None, *args: Any, **options: Any
) -> Any:
    """Applies a convolution, whose options may follow by position in torch's order."""
    is_transposed = "transpose" in function.__name__
    options |= dict(zip(_TRANSPOSED_ORDER if is_transposed else _ORDER, args, strict=False))
    x, weight = make_dtensors(input, weight)
    if x.dim() == weight.dim() - 1:  # a sample without a batch
        return apply_convolution(function, x.unsqueeze(0), weight, bias, **options).squeeze(0)
    name, groups = function.__name__, options.pop("groups", 1)
    table = _GROUPED if groups != 1 else _TRANSPOSED if is_transposed else _CONVOLUTION
    sizes = (weight.device_mesh.size(at) for at, placement in enumerate(weight.placements) if placement == Shard(0))
    ranks = prod(sizes) if groups > 1 else 1
    if groups % ranks:
        raise PlanError(
            f"{name} with {groups} groups was asked for, but {ranks} ranks shard the channels of its weight of "
            f"{tuple(weight.shape)}, so that a group would be on several ranks; choose a number of groups that the "
            "ranks divide, or do not shard these channels"
        )
    x = sum_partials(x)
    placed = [
        Shard(1) if have == WHOLE and (have, cut) not in table else have  # a slice
        for have, cut in zip(x.placements, weight.placements, strict=True)
    ]
    output = compute_on_parts(
        name if groups == 1 else f"{name} with {groups} groups",
        table,
        lambda x, w: function(x, w, None, groups=groups // ranks, **options),
        (redistribute(x, placed), weight),
    )
    return output if bias is None else output + bias.to(output.dtype).view(1, -1, *[1] * (output.dim() - 2))


def run_recurrent(function: Callable[..., Any], x: Any, *args: Any) -> Any:
    """Sharded by batch; of the weights every rank has all."""
    if not isinstance(args[2], bool):
        raise PlanError(
            f"{function.__name__} of a packed sequence was asked for on a mesh, which does not shard packed sequences; "
            "give a padded tensor"
        )
    state, weights, *options = args
    states = state if isinstance(state, (tuple, list)) else (state,)
    x, *others = make_dtensors(x, *states, *weights)
    x, batch = sum_partials(x), Shard(0 if options[-1] else 1)
    if options[2] and options[3]:
        check_whole(f"the dropout of {function.__name__}", (x,))
    placed: list[Placement] = [Shard(1) if placement == batch else WHOLE for placement in x.placements]
    others[: len(states)] = [redistribute(tensor, placed) for tensor in others[: len(states)]]  # slices
    table: Table = {
        (cut, *[cut_state] * len(states), *[WHOLE] * len(weights)): (
            (cut, *[cut_state] * len(states)),
            (cut, *[cut_state] * len(states), *[gradient] * len(weights)),
        )
        for cut, cut_state, gradient in ((WHOLE, WHOLE, WHOLE), (batch, Shard(1), SUM))
    }

    def run(x: torch.Tensor, *parts: torch.Tensor) -> Any:
        state_parts = parts[: len(states)]
        return function(x, state_parts[0] if state is not states else state_parts, list(parts[len(states) :]), *options)

    return compute_on_parts(function.__name__, table, run, (x, *others))


def apply_embedding(
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
        PlanError: words or weight are sharded, and an option needs all of them.
    """
    x, weight = make_dtensors(input, weight)
    x, (words, width) = sum_partials(x), weight.shape
    options = {"max_norm": max_norm is not None, "scale_grad_by_freq": scale_grad_by_freq, "sparse": sparse}
    needs_all = [name for name, is_asked in options.items() if is_asked]
    if needs_all and (is_sharded(x) or is_sharded(weight)):
        raise PlanError(
            f"an embedding with {needs_all[0]} was asked for, but the layout shards its words, placed as "
            f"{x.placements}, or its weight of {tuple(weight.shape)}, placed as {weight.placements}; leave the "
            "option out, or a rule"
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

    table: Table = {
        (WHOLE, WHOLE): (WHOLE, (WHOLE, WHOLE)),
        (WHOLE, Shard(0)): (SUM, (WHOLE, Shard(0))),
        (WHOLE, Shard(1)): (Shard(x.dim()), (WHOLE, Shard(1))),
        **{(Shard(dim), WHOLE): (Shard(dim), (Shard(dim), SUM)) for dim in range(x.dim())},
    }
    return compute_on_parts("an embedding", table, look_up, (x, weight), (*x.shape, width))


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
                updates = (mean, running_mean), (variance * (count / (count - 1)), running_var)
                for statistic, running in updates:
                    running.lerp_(statistic.full_tensor().flatten().to(running.dtype), momentum)
    return _scale_and_shift_channels((x - mean) * (variance + eps).rsqrt(), weight, bias).to(input.dtype)


def apply_layer_norm(
    input: Any, normalized_shape: Sequence[int], weight: Any = None, bias: Any = None, eps: float = 1e-5
) -> Any:
    """Takes the statistics over all ranks where a normalized dimension is sharded."""
    x, over = complete_sums(input), list(range(-len(normalized_shape), 0))
    if is_sharded(x, over):
        return apply_rms_norm(x - sum_partials(x.mean(over, keepdim=True)), normalized_shape, weight, eps, bias)
    if is_sharded(weight) or is_sharded(bias):
        return _scale_and_shift(F.layer_norm(x, normalized_shape, eps=eps), weight, bias)
    return F.layer_norm(x, normalized_shape, weight, bias, eps)


def apply_rms_norm(
    input: Any, normalized_shape: Sequence[int], weight: Any = None, eps: float | None = None, bias: Any = None
) -> Any:
    """Takes the mean square over all ranks where a normalized dimension is sharded."""
    x, over = complete_sums(input), list(range(-len(normalized_shape), 0))
    if is_sharded(x, over):
        eps = torch.finfo(x.dtype).eps if eps is None else eps
        return _scale_and_shift(x * (sum_partials(x.square().mean(over, keepdim=True)) + eps).rsqrt(), weight, bias)
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

    It is computed as they are sharded: by batch, or by heads. Where the length is sharded, an all-to-all shards the
    heads instead, and another one afterwards the length again (DeepSpeed-Ulysses, Jacobs et al. 2023, 3).

    Raises:
        PlanError: the ranks that shard the length, or the heads, do not divide the heads of queries, keys or values.
    """
    options: dict[str, Any] = {"is_causal": is_causal, "scale": scale, "enable_gqa": enable_gqa}
    if not any(isinstance(tensor, DTensor) for tensor in (query, key, value)):
        return F.scaled_dot_product_attention(query, key, value, attn_mask, dropout_p, **options)
    query, key, value = (sum_partials(tensor) for tensor in make_dtensors(query, key, value))
    mesh, length, heads = query.device_mesh, query.dim() - 2, query.dim() - 3
    for at in range(mesh.ndim):  # slices, where only some are sharded
        cut = next((tensor.placements[at] for tensor in (query, key, value) if tensor.placements[at] != WHOLE), WHOLE)
        query, key, value = (
            tensor
            if tensor.placements[at] != WHOLE
            else redistribute(tensor, [*tensor.placements[:at], cut, *tensor.placements[at + 1 :]])
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
    # In memory, of the queries and of the result.
    order = range(query.dim()) if dropout_p else memory_order(query.shape, query._spec.stride)

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        for group in groups:
            if uneven := [tensor.shape[heads] for tensor in (q, k, v) if tensor.shape[heads] % group.size()]:
                raise PlanError(
                    f"attention was asked for where {group.size()} ranks shard the length, which then shard the heads "
                    f"instead, but there are {uneven[0]} heads; choose a number of heads that they divide, or shard "
                    "'heads' or 'batch' instead of the length"
                )
            q, k, v = (
                all_to_all(part, group, length, heads, whole.shape[length])
                for part, whole in ((q, query), (k, key), (v, value))
            )
        q = put_in_order(q, order) if groups else q
        if noise is None:
            attended = F.scaled_dot_product_attention(q, k, v, mask, **options)
        else:
            attended = _attend_with_noise(noise, q, k, v, mask, **options)
        attended_order = find_order(attended, order)
        for group in groups:
            attended = all_to_all(attended, group, heads, length, attended.shape[heads] * group.size())
        return put_in_order(attended, attended_order) if groups else attended

    table: Table = {(placed,) * 3: (placed, (placed,) * 3) for placed in (WHOLE, *map(Shard, range(length + 1)))}
    shape = *query.shape[:-1], value.shape[-1]
    return compute_on_parts("attention", table, attend, (query, key, value), shape, order)


def _check_heads(query: DTensor, key: DTensor, value: DTensor, heads: int, enable_gqa: bool) -> None:
    """Raises a `PlanError` where a rank would have queries whose keys and values are on another."""
    if query.dim() == 3 and not enable_gqa:
        return  # these are samples, which may be sharded unevenly
    ranks = prod(query.device_mesh.size(at) for at, cut in enumerate(query.placements) if cut == Shard(heads))
    counts = tuple(tensor.shape[heads] for tensor in (query, key, value))
    if any(count % ranks for count in counts):
        raise PlanError(
            f"attention was asked for where {ranks} ranks shard the heads, but there are {counts[0]} heads of queries, "
            f"{counts[1]} of keys and {counts[2]} of values; choose numbers of heads that they divide, or shard "
            "'batch' instead of 'heads'"
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

    Over some dimensions of the mesh the length is sharded, and meanwhile the heads.
    """
    mesh, missing = query.device_mesh, query.dim() - mask.dim()
    mask = wrap_whole(mask, mesh)
    slices: list[tuple[int, int]] = []
    placed: list[Placement] = [WHOLE] * mesh.ndim
    gradients: list[Placement] = [WHOLE] * mesh.ndim
    for at in [*(at for at in range(mesh.ndim) if at not in over), *over]:
        cut = query.placements[at]
        if not isinstance(cut, Shard):
            continue
        gradients[at], dim = SUM, (query.dim() - 3 if at in over else cut.dim) - missing
        if dim < 0 or mask.shape[dim] == 1:
            continue
        if at not in over and mask.placements[at] == Shard(dim):
            placed[at] = gradients[at] = Shard(dim)
        else:
            slices.append((at, dim))
    part: torch.Tensor = redistribute(mask, placed).to_local(grad_placements=gradients)
    for at, dim in slices:
        sizes = part_sizes(part.shape[dim], mesh.size(at))
        part = part.split(sizes, dim)[mesh.get_local_rank(at)]  # type: ignore[no-untyped-call]
    return part
