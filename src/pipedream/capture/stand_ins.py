"""Replaces a model's tensors by ones without numbers, so that a model of any size runs without memory."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from pipedream.capture.preserve_state import Attributes
from pipedream.capture.structure import is_stand_in
from pipedream.tensors.trees import tree_leaves, tree_map


@contextmanager
def stand_ins(model: nn.Module, sample: Any, dtype: torch.dtype | None = None) -> Iterator[Any]:
    """A context in which the model has stand-ins; yields the sample with stand-ins too.

    A stand-in (torch's FakeTensor) has no numbers, and what is computed from one is one. It is on the CPU: then torch
    chooses kernels that keep what those of a GPU keep (attention without a matrix of scores), unlike on the meta
    device. Shared storage stays shared. Integers and truth values remain numbers, unless they are on the meta device:
    what is computed from them alone (masks, positions) may decide what the model does.

    Args:
        model: restored afterwards.
        dtype: of all floating-point tensors; None: their own.
    """
    replacements: dict[Any, torch.Tensor] = {}
    mode = FakeTensorMode(allow_non_fake_inputs=True)

    def replaced(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        empty = leaf.is_floating_point() or leaf.is_complex() or leaf.is_meta or leaf.layout is not torch.strided
        with torch.no_grad():
            if empty or isinstance(leaf, nn.Parameter):
                return _make_stand_in(leaf, dtype, replacements, mode)
            return replacements.setdefault(id(leaf), leaf.detach().to("cpu", copy=True))  # may be written into

    attributes = Attributes([model], children=True)
    try:
        for module in attributes.every:
            for tensors in (module._parameters, module._buffers):
                tensors.update({name: replaced(tensor) for name, tensor in tensors.items()})
            selected = _select_tensor_attributes(module)
            module.__dict__.update({name: tree_map(replaced, value) for name, value in selected.items()})
        yield tree_map(replaced, sample)
    finally:
        attributes.restore()


def has_stand_ins(model: nn.Module, sample: Any) -> bool:
    """Returns whether the sample or the model has any."""
    return any(map(is_stand_in, [*tree_leaves(sample), *model.parameters(), *model.buffers()]))


def _select_tensor_attributes(module: nn.Module) -> dict[str, Any]:
    """The plain attributes that are or contain tensors, such as a recurrent module's list of weights."""
    return {
        name: value
        for name, value in module.__dict__.items()
        if name not in ("_parameters", "_buffers", "_modules")
        and type(value) in (torch.Tensor, nn.Parameter, list, tuple, dict)
        and any(isinstance(leaf, torch.Tensor) for leaf in tree_leaves(value))
    }


def _make_stand_in(
    tensor: torch.Tensor, dtype: torch.dtype | None, replacements: dict[Any, torch.Tensor], mode: FakeTensorMode
) -> torch.Tensor:
    if id(tensor) in replacements:
        return replacements[id(tensor)]
    kind = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
    with mode:
        if tensor.layout is not torch.strided:
            stand_in = torch.empty(tensor.shape, dtype=kind)
        else:
            storage = tensor.untyped_storage()
            key = ("storage", storage._cdata, tensor.dtype)
            if key not in replacements:
                replacements[key] = torch.empty(storage.nbytes() // tensor.itemsize, dtype=kind)
            stand_in = replacements[key].as_strided(tensor.shape, tensor.stride(), tensor.storage_offset()).detach()
    if isinstance(tensor, nn.Parameter):
        stand_in = nn.Parameter(stand_in, requires_grad=tensor.requires_grad)
    elif tensor.requires_grad and kind.is_floating_point:
        stand_in.requires_grad_()
    replacements[id(tensor)] = stand_in
    return stand_in
