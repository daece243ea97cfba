"""The user's parameters across ranks: a rank keeps those of its stages; the others become meta tensors.

Also the extra state of modules (``get_extra_state``).
"""

import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from pipedream.core.errors import CaptureError, PipelineError
from pipedream.core.model.graph import LayerGraph
from pipedream.core.plan.placement import Placement
from pipedream.runtime.data.rng import from_json, to_json

_KEY = "_extra_state"


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


def collect(
    tensors: Mapping[str, torch.Tensor],
    shapes: Mapping[str, torch.Tensor],
    names: Sequence[Sequence[str]],
    placement: Placement,
    rank: int,
    group: dist.ProcessGroup | None,
    to: int = 0,
) -> dict[str, torch.Tensor]:
    """Returns all named tensors on the CPU of rank `to`, each from replica 0 of its stage; elsewhere an empty dict.

    A tensor of several stages is taken from the first.

    Args:
        tensors: this rank's.
        shapes: by name, any tensor of that shape and dtype.
        names: what each stage holds.
        group: None if one process has everything.
    """
    collected: dict[str, torch.Tensor] = {}
    done: set[str] = set()
    for stage, owned in enumerate(names):
        owner = placement.ranks[stage][0]
        for name in owned:
            if name in done:
                continue
            done.add(name)
            if group is None or owner == rank == to:
                collected[name] = tensors[name].detach().cpu().clone()
            elif rank == to:
                received = torch.empty(shapes[name].shape, dtype=shapes[name].dtype)
                dist.recv(received, group=group, group_src=owner)
                collected[name] = received
            elif rank == owner:
                dist.send(tensors[name].detach().cpu().contiguous(), group=group, group_dst=to)
    return collected if rank == to else {}


def load(
    model: nn.Module,
    state: Mapping[str, torch.Tensor],
    names: Iterable[str],
    shared: Mapping[str, Sequence[str]],
    device: torch.device,
) -> None:
    """Copies values into this rank's parameters and buffers, which may be on the meta device.

    Args:
        state: may lack all but one of the names of a shared parameter.
        shared: `find_shared_names` of the whole model.

    Raises:
        CaptureError: a name is missing or a shape differs.
    """
    tensors, slots, saved = named_state(model), Slots(model), saved_names(model)
    names_to_load, loaded_ids = set(names), set[int]()
    for name, tensor in tensors.items():
        if name not in names_to_load:
            continue
        aliases = (name, *shared.get(name, ()))
        source = next((n for n in (*aliases, *(saved.get(alias) for alias in aliases)) if n in state), None)
        if source is None:
            if name not in saved:
                continue  # a buffer that is not part of state dicts
            other = min(state, default="nothing")
            raise CaptureError(f"the state dict lacks {name!r}, but has {other!r}; give one as from model.state_dict()")
        if source != name and id(tensor) in loaded_ids:
            continue
        value = state[source]
        if value.shape != tensor.shape:
            raise CaptureError(
                f"{name!r} has shape {tuple(value.shape)} in the state dict, {tuple(tensor.shape)} in the model; give "
                "one of this model"
            )
        loaded_ids.add(id(tensor))
        if tensor.is_meta:
            slots.replace(tensor, value.to(device, copy=True))
        else:
            with torch.no_grad():
                tensor.copy_(value)


def collect_extra_states(
    model: nn.Module, stage: int, layers: Sequence[Sequence[str]], names: Sequence[Sequence[str]]
) -> dict[str, Any]:
    """Returns module -> extra state, in JSON, of a stage's modules; warns of one that JSON cannot hold.

    A module that no stage's names contain counts as stage 0's.

    Args:
        layers: names of the layers of each stage.
        names: of the parameters and buffers of each stage.
    """
    states = {}
    for key, module in find_modules_by_key(model).items():
        name = key.removesuffix(_KEY).removesuffix(".")
        owners = [
            number
            for number, (layer_names, tensor_names) in enumerate(zip(layers, names, strict=True))
            if any(f"{name}.".startswith(f"{layer}.") for layer in layer_names)
            or any(n.startswith(f"{name}.") for n in tensor_names)
        ]
        if stage != (owners[0] if owners else 0):
            continue
        try:
            states[name] = to_json(module.get_extra_state(), f"the extra state of {name!r}")
        except PipelineError as error:
            warnings.warn(f"{error}; it is not saved", stacklevel=2)
    return states


def set_extra_states(model: nn.Module, states: Mapping[str, Any]) -> None:
    """Sets the extra states of modules, from JSON."""
    modules = find_modules_by_key(model)
    for key, state in key_extra_states(states).items():
        if key in modules:
            modules[key].set_extra_state(state)


def find_modules_by_key(model: nn.Module) -> dict[str, nn.Module]:
    """Returns the modules that have an extra state, by its key in a state dict."""
    return {
        f"{name}.{_KEY}".lstrip("."): module
        for name, module in model.named_modules()
        if type(module).get_extra_state is not nn.Module.get_extra_state
    }


def key_extra_states(states: Mapping[str, Any]) -> dict[str, Any]:
    """Returns extra states, from JSON, by their keys in a state dict."""
    return {f"{name}.{_KEY}".lstrip("."): from_json(state) for name, state in states.items()}
