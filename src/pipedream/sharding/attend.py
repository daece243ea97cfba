"""Attention on parts: by batch, by heads, or by length with all-to-alls."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Placement, Shard
from torch.nn import functional as F

from pipedream.core.errors import PlanError
from pipedream.sharding.functions import all_to_all, part_sizes, sum_partials
from pipedream.sharding.parts import SUM, WHOLE, Table, compute_on_parts, make_dtensors


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
                    f"attention was asked for where {group.size()} ranks shard the length, which then shard the heads "
                    f"instead, but there are {uneven[0]} heads; choose a number of heads that they divide, or shard "
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

    table: Table = {(placed,) * 3: (placed, (placed,) * 3) for placed in (WHOLE, *map(Shard, range(length + 1)))}
    return compute_on_parts("attention", table, attend, (query, key, value), (*query.shape[:-1], value.shape[-1]))


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

    Args:
        over: dimensions of the mesh that shard the length, and meanwhile the heads.
    """
    mesh, missing = query.device_mesh, query.dim() - mask.dim()
    if not isinstance(mask, DTensor):
        mask = DTensor.from_local(mask, mesh, [WHOLE] * mesh.ndim, run_check=False)
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
    part: torch.Tensor = mask.redistribute(placements=placed).to_local(grad_placements=gradients)
    for at, dim in slices:
        sizes = part_sizes(part.shape[dim], mesh.size(at))
        part = part.split(sizes, dim)[mesh.get_local_rank(at)]  # type: ignore[no-untyped-call]
    return part


def _replace_placement(placements: Sequence[Placement], at: int, placed: Placement) -> list[Placement]:
    return [*placements[:at], placed, *placements[at + 1 :]]
