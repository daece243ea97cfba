"""The user's parameters across ranks: a rank keeps its own stages'; the others become meta tensors (no storage)."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from pipedream.core.errors import CaptureError
from pipedream.core.model.graph import LayerGraph
from pipedream.core.plan.placement import Placement
from pipedream.core.seeds import layer_seed

__all__ = ["collect", "drop_foreign", "load", "materialise", "named_state", "share_initial", "stage_names", "trained"]


def stage_names(graph: LayerGraph, first: int, last: int) -> list[str]:
    """Returns the parameters and buffers of layers first <= i < last, each once."""
    return list(dict.fromkeys(name for layer in graph.layers[first:last] for name in layer.parameters))


def named_state(model: nn.Module) -> dict[str, torch.Tensor]:
    """Returns parameters and buffers, shared ones under each of their names."""
    return {
        **dict(model.named_parameters(remove_duplicate=False)),
        **dict(model.named_buffers(remove_duplicate=False)),
    }


def trained(model: nn.Module, names: Iterable[str]) -> dict[str, nn.Parameter]:
    """Returns the trained ones, each once, in the model's order, under the first of its names."""
    every = dict(model.named_parameters(remove_duplicate=False))
    wanted = {id(every[name]) for name in names if name in every}
    return {
        name: parameter
        for name, parameter in model.named_parameters()
        if parameter.requires_grad and id(parameter) in wanted
    }


def materialise(model: nn.Module, layers: Sequence[tuple[str, nn.Module]], device: torch.device, seed: int) -> None:
    """Gives storage and initial values to layers built on the meta device.

    Each layer is seeded by (seed, layer name), whatever the cut. A parameter that layers share gets the first one's
    values. Raises a `CaptureError` if a module with parameters of its own has no ``reset_parameters``.
    """
    slots: dict[int, list[tuple[dict[str, Any], str]]] = {}
    for module in model.modules():
        for slot, parameter in module._parameters.items():
            if parameter is not None and parameter.is_meta:
                slots.setdefault(id(parameter), []).append((module._parameters, slot))
    for name, layer in layers:
        if not any(t.is_meta for t in [*layer.parameters(), *layer.buffers()]):
            layer.to(device)
            continue
        layer.to_empty(device=device)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(layer_seed(seed, 0, name))
            for inner in layer.modules():
                own = [*inner.parameters(recurse=False), *inner.buffers(recurse=False)]
                if hasattr(inner, "reset_parameters"):
                    inner.reset_parameters()  # type: ignore[operator]
                elif own:
                    raise CaptureError(
                        f"layer {name!r} is on the meta device and {type(inner).__name__} has no reset_parameters() to "
                        "initialise it; give it one, or build the model on the CPU"
                    )
    for places in slots.values():
        made = next((held[slot] for held, slot in places if not held[slot].is_meta), None)
        for held, slot in places if made is not None else ():
            held[slot] = made


def drop_foreign(model: nn.Module, own: set[str]) -> None:
    """Turns all parameters and buffers but `own` into meta tensors, in place."""
    kept = {id(tensor) for name, tensor in named_state(model).items() if name in own}
    for module in model.modules():
        both: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
        for slots in both:
            for slot, tensor in list(slots.items()):
                if tensor is None or id(tensor) in kept or tensor.is_meta:
                    continue
                empty = torch.empty_like(tensor, device="meta")
                slots[slot] = (
                    nn.Parameter(empty, requires_grad=tensor.requires_grad)
                    if isinstance(tensor, nn.Parameter)
                    else empty
                )


def share_initial(
    model: nn.Module,
    names: Sequence[Sequence[str]],
    placement: Placement,
    rank: int,
    group: dist.ProcessGroup,
    drawn: Collection[str],
) -> None:
    """Sends rank 0's parameters and buffers to the ranks of each stage, over gloo.

    Args:
        drawn: those from the meta device, for which each owner has drawn the same values.
    """
    state = named_state(model)
    for stage, owned in enumerate(names):
        for owner in placement.ranks[stage]:
            if owner == 0 or rank not in (0, owner):
                continue
            for name in owned:
                tensor = state[name]
                if name in drawn:
                    continue
                if rank == 0:
                    dist.send(tensor.detach().cpu().contiguous(), owner, group=group)
                else:
                    received = torch.empty(tensor.shape, dtype=tensor.dtype)
                    dist.recv(received, 0, group=group)
                    with torch.no_grad():
                        tensor.copy_(received)


def collect(
    own: Mapping[str, torch.Tensor],
    shapes: Mapping[str, torch.Tensor],
    names: Sequence[Sequence[str]],
    placement: Placement,
    rank: int,
    group: dist.ProcessGroup | None,
) -> dict[str, torch.Tensor]:
    """Returns all named tensors at rank 0, on the CPU, each from replica 0 of its stage; nothing elsewhere.

    Args:
        own: this rank's tensors.
        shapes: by name, any tensor of that shape and dtype.
        names: of each stage.
        group: None if one process has everything.
    """
    whole: dict[str, torch.Tensor] = {}
    for stage, owned in enumerate(names):
        owner = placement.ranks[stage][0]
        for name in owned:
            if group is None or (owner == 0 and rank == 0):
                whole[name] = own[name].detach().cpu().clone()
            elif rank == 0:
                received = torch.empty(shapes[name].shape, dtype=shapes[name].dtype)
                dist.recv(received, owner, group=group)
                whole[name] = received
            elif rank == owner:
                dist.send(own[name].detach().cpu().contiguous(), 0, group=group)
    return whole if rank == 0 else {}


def load(model: nn.Module, state: Mapping[str, torch.Tensor], own: Iterable[str]) -> None:
    """Copies values into this rank's own. Raises a `CaptureError` if a name is missing or a shape differs."""
    mine, wanted = named_state(model), set(own)
    for name in mine:
        if name not in wanted:
            continue
        if name not in state:
            if name not in model.state_dict():
                continue  # a buffer that is not part of state dicts
            raise CaptureError(f"the state dict lacks {name!r}; give one of this model, as from model.state_dict()")
        if state[name].shape != mine[name].shape:
            raise CaptureError(
                f"{name!r} has shape {tuple(state[name].shape)} in the state dict, {tuple(mine[name].shape)} in the "
                "model; give one of this model"
            )
        with torch.no_grad():
            mine[name].copy_(state[name])
