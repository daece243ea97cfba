"""Which layers are alike: the same classes, shapes and settings, so that one need be looked at and not all."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten

__all__ = ["structure_of", "value_shape"]

_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size)


def structure_of(module: nn.Module) -> Any:
    """Returns a key that only modules have that do the same operations on inputs of the same shape.

    It holds the class, the shapes and dtypes of parameters and buffers, which of them share a storage, and every plain
    attribute; an attribute that is an object of its own makes a module like itself alone.
    """
    storages: dict[int, int] = {}
    return _structure(module, storages)


def value_shape(value: Any) -> Any:
    """Returns a key that only values have of the same structure, shapes, strides, dtypes and gradients."""
    leaves, spec = tree_flatten(value)
    return spec, tuple(_tensor(leaf) if isinstance(leaf, torch.Tensor) else _setting(leaf) for leaf in leaves)


def _structure(module: nn.Module, storages: dict[int, int]) -> Any:
    owned = (*module._parameters.items(), *module._buffers.items())
    tensors = tuple(
        (name, None if t is None else (_tensor(t), storages.setdefault(t.untyped_storage()._cdata, len(storages))))
        for name, t in owned
    )
    settings = tuple(
        (name, _setting(value))
        for name, value in sorted(module.__dict__.items())
        if name not in ("_parameters", "_buffers", "_modules")
    )
    inner = tuple((n, None if m is None else _structure(m, storages)) for n, m in module._modules.items())
    return type(module), tensors, settings, inner


def _setting(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return _tensor(value)
    if type(value) in (list, tuple, set, frozenset):
        return type(value), tuple(_setting(item) for item in value)
    if isinstance(value, dict):
        return type(value), tuple((_setting(key), _setting(item)) for key, item in value.items())
    return value if isinstance(value, _PLAIN) else id(value)


def _tensor(tensor: torch.Tensor) -> Any:
    return tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.requires_grad
