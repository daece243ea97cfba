"""Bytes of outputs, of parameters, and of what autograd keeps."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

__all__ = ["kept_and_output_bytes", "parameter_bytes", "storage_bytes"]


def storage_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Returns the bytes behind the tensors, each storage once."""
    storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage() for tensor in tensors}
    return sum(storage.nbytes() for storage in storages.values())


def parameter_bytes(layers: Sequence[nn.Module]) -> tuple[int, ...]:
    """Returns the bytes of each layer's own parameters; a shared one counts in the first layer that has it."""
    counted: set[int] = set()
    sizes = []
    for layer in layers:
        size = 0
        for parameter in layer.parameters():
            if id(parameter) not in counted:
                counted.add(id(parameter))
                size += parameter.nbytes
        sizes.append(size)
    return tuple(sizes)


def kept_and_output_bytes(
    layers: Sequence[nn.Module],
    sample: tuple[Any, ...],
    run_layer: Callable[[int, tuple[Any, ...]], Any],
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Returns, for each layer, the bytes that autograd keeps from its forward, and those of its output.

    The layers run one after the other as in training, with one graph through all of them. A storage counts
    once, in the first layer that saves a tensor in it: the output of a ReLU counts there and not again in the
    Linear that saves it as its input. Parameters and buffers are not counted; copies of them that autocast
    makes are.

    Args:
        layers: in run order.
        sample: inputs of the first layer.
        run_layer: calls layer i with its arguments.
    """
    held = {t.untyped_storage()._cdata for layer in layers for t in [*layer.parameters(), *layer.buffers()]}
    kept: dict[int, torch.UntypedStorage] = {}
    fresh: list[int] = []

    def pack(tensor: torch.Tensor) -> None:
        # Nothing runs backward here, so autograd may hold None; the storage is kept alive as it would be.
        storage = tensor.untyped_storage()
        if storage._cdata not in held and storage._cdata not in kept:
            kept[storage._cdata] = storage
            fresh.append(storage.nbytes())

    def unpack(_: None) -> torch.Tensor:
        raise RuntimeError("a backward ran while the saved bytes were counted")

    kept_bytes, output_bytes = [], []
    arguments, value = sample, None
    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        for index in range(len(layers)):
            fresh.clear()
            value = run_layer(index, arguments)
            arguments = (value,)
            kept_bytes.append(sum(fresh))
            output_bytes.append(sum(leaf.nbytes for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)))
    return tuple(kept_bytes), tuple(output_bytes)
