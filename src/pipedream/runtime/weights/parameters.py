"""The user's parameters across ranks: a rank keeps those of its stages; the others become meta tensors."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from pipedream.core.model.graph import LayerGraph


def named_state(model: nn.Module) -> dict[str, torch.Tensor]:
    """Returns parameters and buffers, shared ones under each of their names."""
    return {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers(remove_duplicate=False))}


class Slots:
    """The places where a model keeps each parameter and buffer, to replace them."""

    def __init__(self, model: nn.Module) -> None:
        self._holders: dict[int, list[tuple[dict[str, Any], str]]] = {}
        self._tensors: list[torch.Tensor] = []  # keeps their ids from being used again
        for module in model.modules():
            for slots in list_slots(module):
                for slot, tensor in slots.items():
                    if tensor is not None:
                        self._holders.setdefault(id(tensor), []).append((slots, slot))
                        self._tensors.append(tensor)

    def replace(self, old: torch.Tensor, values: torch.Tensor) -> None:
        """Puts values in all slots of `old`, as a parameter if `old` is one."""
        new = make_like(old, values.to(old.dtype))
        for slots, slot in self._holders[id(old)]:
            slots[slot] = new


def list_slots(module: nn.Module) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns a module's own parameters and buffers, by name."""
    return module._parameters, module._buffers


def make_like(old: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Returns values as a parameter if `old` is one."""
    if not isinstance(old, nn.Parameter):
        return values
    new = nn.Parameter(values, requires_grad=old.requires_grad)
    new.__dict__.update(old.__dict__)  # marks for the user's optimizer
    return new


def list_stage_names(graph: LayerGraph, first: int, last: int) -> list[str]:
    """Returns the parameters and buffers of layers first <= i < last, each once."""
    return list(dict.fromkeys(name for layer in graph.layers[first:last] for name in layer.parameters))


def saved_names(model: nn.Module) -> dict[str, str]:
    """Returns name in the model -> name in its state dict, which the model's hooks may change."""
    saved = model.state_dict(keep_vars=True)
    renamed = {id(value): name for name, value in saved.items()}
    return {
        name: name if name in saved else renamed[id(tensor)]
        for name, tensor in named_state(model).items()
        if name in saved or id(tensor) in renamed
    }


def list_unused_names(model: nn.Module, names: Iterable[str]) -> list[str]:
    """Returns the parameters and buffers that no layer reads and a state dict holds, without those on the meta device.

    Args:
        names: what all layers read.
    """
    state, saved = named_state(model), saved_names(model)
    used_ids = {id(state[name]) for name in names}
    return [name for name, t in state.items() if id(t) not in used_ids and name in saved and not t.is_meta]


def find_shared_names(model: nn.Module) -> dict[str, tuple[str, ...]]:
    """Returns, for each name of a parameter or buffer that has several, all of them."""
    names_by_id: dict[int, list[str]] = {}
    for name, tensor in named_state(model).items():
        names_by_id.setdefault(id(tensor), []).append(name)
    return {name: tuple(names) for names in names_by_id.values() if len(names) > 1 for name in names}


def select_trained(model: nn.Module, names: Iterable[str]) -> dict[str, nn.Parameter]:
    """Returns the trained parameters, each once, in the model's order, under the first of its names."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    ids = {id(parameters[name]) for name in names if name in parameters}
    return {
        name: parameter
        for name, parameter in model.named_parameters()
        if parameter.requires_grad and id(parameter) in ids
    }


def drop_foreign(model: nn.Module, names: set[str]) -> None:
    """Turns all parameters and buffers except `names` into meta tensors, in place."""
    state, slots = named_state(model), Slots(model)
    kept_ids = {id(tensor) for name, tensor in state.items() if name in names}
    for tensor in {id(tensor): tensor for tensor in state.values()}.values():
        if id(tensor) not in kept_ids and not tensor.is_meta:
            slots.replace(tensor, torch.empty_like(tensor, device="meta"))
