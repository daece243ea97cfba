"""Floating-point operations and bytes of each operation that torch dispatches, and its seconds on a device.

Flops come from torch's formulas (``torch.utils.flop_counter``) and rules for fused kernels, bytes from the distinct
tensors read and written. Views cost nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from pipedream.core.hardware.devices import Device

_FREE = {
    *("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "device", "lift_fresh"),
    *("_local_scalar_dense", "sym_size", "sym_numel", "sym_stride", "sym_storage_offset", "is_same_size"),
}
# These read only the part of their first tensor that they return.
_GATHERS = {"embedding", "index_select", "gather", "index", "take", "nll_loss_forward", "nll_loss2d_forward"}
# These overwrite their first tensor without reading it.
_OVERWRITES = {"copy_", "fill_", "zero_", "normal_", "uniform_"}

OPAQUE = {"mkldnn_rnn_layer"}
"""Kernels that keep a workspace for their backward, whose size stand-ins do not show: those of LSTMs on a CPU."""


@dataclass(frozen=True)
class Lap:
    """The cost of the operations of a lap; `opaque` names those that keep bytes which are not visible (`OPAQUE`)."""

    flops: int = 0
    moved_bytes: int = 0
    seconds: float = 0.0
    opaque: frozenset[str] = frozenset()

    def __add__(self, other: Lap) -> Lap:
        return Lap(
            self.flops + other.flops,
            self.moved_bytes + other.moved_bytes,
            self.seconds + other.seconds,
            self.opaque | other.opaque,
        )


class OpCosts(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A stopwatch that adds up roofline costs. Enter it as a context, inside the mode of the stand-ins."""

    def __init__(self, device: Device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._device = device
        self._open = False
        self._lap = Lap()
        self._laps: list[Lap] = []

    def start(self) -> None:
        self._open, self._lap = True, Lap()

    def stop(self) -> None:
        self._laps.append(self._lap)
        self._open = False

    def laps(self) -> list[Lap]:
        laps, self._laps = self._laps, []
        return laps

    def laps_s(self) -> list[float]:
        return [lap.seconds for lap in self.laps()]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if self._open:
            self._lap += _measure_op(func, args, kwargs or {}, out, self._device)
        return out


def opaque_bytes(module: torch.nn.Module, arguments: Any) -> int:
    """Returns the bytes of the workspaces that LSTMs keep, by a rule of thumb.

    16 numbers for each step, sample and unit of each layer and direction: 15.4 to 18.6 were measured on CPUs (oneDNN);
    cuDNN keeps less.
    """
    first = next((leaf for leaf in tree_leaves(arguments) if isinstance(leaf, torch.Tensor)), None)
    total = 0
    for inner in module.modules():
        if isinstance(inner, torch.nn.LSTM) and first is not None:
            units = inner.hidden_size * inner.num_layers * (1 + inner.bidirectional)
            total += 16 * prod(first.shape[:2]) * units * next(inner.parameters()).itemsize
    return total


def _measure_op(func: Any, args: Any, kwargs: Any, out: Any, device: Device) -> Lap:
    name = func._schema.name.partition("::")[2]
    if name in _FREE:
        return Lap()
    inputs, outputs = _list_tensors((args, kwargs)), _list_tensors(out)
    if not outputs or (not func._schema.is_mutable and _list_storages(outputs) <= _list_storages(inputs)):
        return Lap()  # a view
    read = inputs
    if name in _GATHERS:
        read = inputs[1:] + outputs
    elif name in _OVERWRITES:
        read = inputs[1:]
    moved = _count_bytes(read) + _count_bytes(outputs)
    flops = _count_flops(func, name, args, kwargs, out)
    dtypes = [str(t.dtype).removeprefix("torch.") for t in (*inputs, *outputs) if t.is_floating_point()]
    draws = outputs[0].numel() if torch.Tag.nondeterministic_seeded in func.tags else 0
    seconds = device.op_s(flops, moved, dtypes[0] if dtypes else "float32", draws=draws)
    return Lap(flops, moved, seconds, frozenset({name} if name.removesuffix("_backward") in OPAQUE else ()))


def _count_flops(func: Any, name: str, args: Any, kwargs: Any, out: Any) -> int:
    if name == "_scaled_dot_product_flash_attention_for_cpu":
        # Two products of the scores' size; if causal, the kernel skips the half above the diagonal, which torch's own
        # formula (from 2.15 on) counts.
        return _count_attention_flops(args[0], args[1], 2, kwargs.get("is_causal", args[4] if len(args) > 4 else False))
    if name == "_scaled_dot_product_flash_attention_for_cpu_backward":
        return _count_attention_flops(args[1], args[2], 5, kwargs.get("is_causal", args[7] if len(args) > 7 else False))
    if name in ("mkldnn_rnn_layer", "mkldnn_rnn_layer_backward"):
        layer = [t for t in args if isinstance(t, torch.Tensor)]
        steps = prod(layer[0].shape[:-1])
        # Input and hidden weights once for each step; twice that in the backward.
        return 2 * steps * (layer[1].numel() + layer[2].numel()) * (2 if name.endswith("backward") else 1)
    formula = flop_registry.get(func._overloadpacket)
    return 0 if formula is None else int(formula(*args, **kwargs, out_val=out))


def _count_attention_flops(query: torch.Tensor, key: torch.Tensor, products: int, is_causal: bool) -> int:
    batch, heads, length, width = query.shape
    return products * 2 * batch * heads * length * key.shape[2] * width // (2 if is_causal else 1)


def _list_tensors(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def _list_storages(tensors: Iterable[torch.Tensor]) -> set[int]:
    return {tensor.untyped_storage()._cdata for tensor in tensors}


def _count_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """The bytes of distinct tensors; an expanded one counts only what is stored."""
    distinct = {
        (t.untyped_storage()._cdata, t.storage_offset(), t.shape, t.stride()): min(
            t.numel() * t.itemsize, t.untyped_storage().nbytes()
        )
        for t in tensors
    }
    return sum(distinct.values())
