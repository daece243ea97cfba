"""Layers that the user shards by torch's `parallelize_module` in place of a layout.

Its styles replace parameters by DTensors, and add hooks that shard plain tensors. The parameters become the user's
again, so that weight versions know them; how they are sharded is kept.
"""

from collections.abc import Callable, Container, Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.utils._pytree import tree_map_only

from pipedream.core.errors import PlanError
from pipedream.extensions.meshes.sharding.functions import list_shards, redistribute, sum_partials, wrap_part


def parallelize_layers(
    parallelize: Callable[[str, nn.Module, DeviceMesh], Any],
    layers: Iterable[tuple[str, nn.Module]],
    device_mesh: DeviceMesh,
) -> dict[nn.Parameter, tuple[int | None, ...]]:
    """Calls a function of the user for each layer; returns which dimension of a weight each mesh dimension shards.

    Raises:
        PlanError: it does more than shard weights evenly.
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
            names = sorted(used, key=(device_mesh.mesh_dim_names or ()).index)
            _PartHooks(device_mesh, names, sharded_slots).register(layer)
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
    return list_shards(placed.get(over) for over in device_mesh.mesh_dim_names or ())


class _PartHooks:
    """Gives a layer what torch's styles expect: plain tensors, and DTensors for the weights that are sharded.

    Args:
        used: dimensions of the mesh over which styles shard.
        sharded_slots: module and name of the weights that they made DTensors.
    """

    def __init__(self, device_mesh: DeviceMesh, used: Sequence[str], sharded_slots: Container[tuple[str, str]]) -> None:
        names = list(device_mesh.mesh_dim_names or ())
        self._mesh, self._inner = device_mesh, device_mesh[tuple(used)]
        self._over = [names.index(name) for name in used]
        self._sharded_slots = sharded_slots
        self._replaced: list[tuple[dict[str, Any], str, Any]] = []  # in the call that runs
        self._placed: list[Placement] = []  # of its inputs

    def register(self, layer: nn.Module) -> None:
        layer.register_forward_pre_hook(self._enter, with_kwargs=True)
        layer.register_forward_hook(self._leave)

    def _enter(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        self._placed = []
        inputs = tree_map_only(DTensor, self._take_part, (args, kwargs))
        for path, child in module.named_modules():
            for slot in child._parameters:
                weight = child._parameters[slot]
                if isinstance(weight, DTensor):
                    self._replaced.append((child._parameters, slot, dict.__getitem__(child._parameters, slot)))
                    child._parameters[slot] = self._take_weight(weight, (path, slot) in self._sharded_slots)
        return inputs

    def _leave(self, module: nn.Module, args: Any, output: Any) -> Any:
        while self._replaced:
            slots, slot, weight = self._replaced.pop()
            slots[slot] = weight
        return tree_map_only(torch.Tensor, self._wrap, output)

    def _take_part(self, tensor: DTensor) -> torch.Tensor:
        tensor = sum_partials(tensor)
        target = [Replicate() if at in self._over else placement for at, placement in enumerate(tensor.placements)]
        before = self._placed or target
        if any(Replicate() not in pair and pair[0] != pair[1] for pair in zip(before, target, strict=True)):
            raise PlanError(
                f"a layer that parallelize shards got tensors that the layout shards differently, {before} and "
                f"{target}; shard them alike"
            )
        pairs = zip(before, target, strict=True)
        self._placed = [placement if placement != Replicate() else other for placement, other in pairs]
        return redistribute(tensor, target).to_local(grad_placements=target)

    def _take_weight(self, weight: DTensor, is_sharded: bool) -> torch.Tensor:
        # Over other dimensions its gradient is a partial sum where they shard the inputs.
        gradient = [
            Partial()
            if placement == Replicate() and at not in self._over and isinstance(self._placed[at], Shard)
            else placement
            for at, placement in enumerate(weight.placements)
        ]
        part, inner_placements = weight.to_local(grad_placements=gradient), [weight.placements[at] for at in self._over]
        return wrap_part(part, self._inner, inner_placements) if is_sharded else part

    def _wrap(self, tensor: torch.Tensor) -> DTensor:
        by_dimension: dict[int, Placement] = {}
        if isinstance(tensor, DTensor):
            by_dimension = dict(zip(self._over, tensor.placements, strict=True))
            tensor = tensor.to_local(grad_placements=tensor.placements)
        placements = [by_dimension.get(at, placement) for at, placement in enumerate(self._placed)]
        return wrap_part(tensor, self._mesh, placements)
