"""Layers that the user shards by torch's `parallelize_module` in place of a layout.

Its styles replace parameters by DTensors, and add hooks that shard plain tensors. The parameters become the user's
again, so that weight versions know them; how they are sharded is kept.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.utils._pytree import tree_map_only

from pipedream.core.errors import PlanError
from pipedream.sharding.functions import sum_partials


def parallelize_layers(
    parallelize: Callable[[str, nn.Module, DeviceMesh], Any],
    layers: Iterable[tuple[str, nn.Module]],
    device_mesh: DeviceMesh,
) -> dict[nn.Parameter, tuple[int | None, ...]]:
    """Calls a function of the user for each layer; returns which dimension of a weight each mesh dimension shards.

    Raises:
        PlanError: it does something else than sharding weights evenly.
    """
    placements: dict[nn.Parameter, tuple[int | None, ...]] = {}
    for name, layer in layers:
        slots = {
            (path, slot): (module, parameter)
            for path, module in layer.named_modules()
            for slot, parameter in module._parameters.items()
            if parameter is not None
        }
        parallelize(name, layer, device_mesh)
        what = f"parallelize({name!r}, ...)"
        if any(isinstance(module, FSDPModule) for module in layer.modules()):
            raise PlanError(
                f"{what} has called fully_shard, which keeps parameters of its own, so that versions of the weights "
                "would not reach it; shard them by Layout(shard_weights=...) instead"
            )
        used: set[str] = set()
        sharded_slots: set[tuple[str, str]] = set()
        for place, (module, parameter) in slots.items():
            slot = place[1]
            now = module._parameters.get(slot)
            if now is parameter:
                continue
            if not isinstance(now, DTensor):
                raise PlanError(f"{what} has replaced the parameter {slot!r}; let it call parallelize_module only")
            placements[parameter] = _read_placements(now, device_mesh, f"{what} shards {slot!r}")
            used |= set(now.device_mesh.mesh_dim_names or ())
            sharded_slots.add(place)
            module._parameters[slot] = parameter
        if used:
            _run_on_parts(layer, device_mesh, sorted(used, key=(device_mesh.mesh_dim_names or ()).index), sharded_slots)
    return placements


def _read_placements(weight: DTensor, device_mesh: DeviceMesh, what: str) -> tuple[int | None, ...]:
    """Raises a `PlanError` if the weight is not sharded evenly."""
    names = weight.device_mesh.mesh_dim_names or ()
    placed = dict(zip(names, weight.placements, strict=True))
    for over, placement in placed.items():
        even = isinstance(placement, Shard) and weight.shape[placement.dim] % device_mesh[over].size() == 0
        if type(placement) not in (Shard, Replicate) or not (even or placement == Replicate()):
            raise PlanError(
                f"{what}, of {tuple(weight.shape)}, over {over!r} as {placement}; shard a dimension that its "
                f"{device_mesh[over].size()} ranks divide, or none"
            )
    cuts = [placed.get(over) for over in device_mesh.mesh_dim_names or ()]
    return tuple(placement.dim if isinstance(placement, Shard) else None for placement in cuts)


def _run_on_parts(
    layer: nn.Module, device_mesh: DeviceMesh, used: Sequence[str], sharded_slots: Container[tuple[str, str]]
) -> None:
    """Gives a layer what torch's styles expect: plain tensors, and DTensors for the weights that are sharded.

    Args:
        used: dimensions of the mesh over which styles shard.
        sharded_slots: module and name of the weights that they made DTensors.
    """
    names = list(device_mesh.mesh_dim_names or ())
    inner, over = device_mesh[tuple(used)], [names.index(name) for name in used]
    kept: list[tuple[dict[str, Any], str, Any]] = []
    placed: list[Placement] = []  # of the inputs of the call that runs

    def part_of(tensor: DTensor) -> torch.Tensor:
        tensor = sum_partials(tensor)
        target = [Replicate() if at in over else placement for at, placement in enumerate(tensor.placements)]
        before = placed or target
        if any(Replicate() not in pair and pair[0] != pair[1] for pair in zip(before, target, strict=True)):
            raise PlanError(
                f"a layer that parallelize shards got tensors that the layout shards differently, {before} and "
                f"{target}; shard them alike"
            )
        placed[:] = [
            placement if placement != Replicate() else other for placement, other in zip(before, target, strict=True)
        ]
        return tensor.redistribute(placements=target).to_local(grad_placements=target)

    def weight_of(weight: DTensor, is_sharded: bool) -> torch.Tensor:
        # Over other dimensions its gradient is a partial sum where they shard the inputs.
        gradient = [
            placement if at in over or placement != Replicate() else partial[at]
            for at, placement in enumerate(weight.placements)
        ]
        part, inner_placements = weight.to_local(grad_placements=gradient), [weight.placements[at] for at in over]
        return DTensor.from_local(part, inner, inner_placements, run_check=False) if is_sharded else part

    partial: list[Placement] = []

    def enter(module: nn.Module, args: Any, kwargs: Any) -> Any:
        placed.clear()
        inputs = tree_map_only(DTensor, part_of, (args, kwargs))
        partial[:] = [Partial() if isinstance(placement, Shard) else placement for placement in placed]
        for path, child in module.named_modules():
            for slot in child._parameters:
                weight = child._parameters[slot]
                if isinstance(weight, DTensor):
                    kept.append((child._parameters, slot, dict.__getitem__(child._parameters, slot)))
                    child._parameters[slot] = weight_of(weight, (path, slot) in sharded_slots)
        return inputs

    def leave(module: nn.Module, args: Any, output: Any) -> Any:
        while kept:
            slots, slot, weight = kept.pop()
            slots[slot] = weight
        return tree_map_only(torch.Tensor, whole, output)

    def whole(tensor: torch.Tensor) -> DTensor:
        if isinstance(tensor, DTensor):
            by_dimension = dict(zip(over, tensor.placements, strict=True))
            tensor = tensor.to_local(grad_placements=tensor.placements)
        else:
            by_dimension = {}
        placements = [by_dimension.get(at, placement) for at, placement in enumerate(placed)]
        return DTensor.from_local(tensor, device_mesh, placements, run_check=False)

    layer.register_forward_pre_hook(enter, with_kwargs=True)
    layer.register_forward_hook(leave)
