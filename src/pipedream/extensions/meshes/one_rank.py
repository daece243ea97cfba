"""Runs a model's layers as one rank of a mesh would, in this process alone: collectives do nothing.

The rank has its own part of every tensor, so that its seconds and bytes can be measured like those of any layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from pipedream.core.errors import ProfileError
from pipedream.core.model.collective import Collective
from pipedream.core.model.graph import LayerGraph
from pipedream.core.plan.ranks import Mesh
from pipedream.extensions.meshes.layout import Layout
from pipedream.extensions.meshes.sharding.count import CountCollectives
from pipedream.extensions.meshes.sharding.stage import StageSharding
from pipedream.profiler.passes import Sample, call_with, enter_autocast, has_numbers, leave
from pipedream.profiler.update import named_parameters


@contextmanager
def one_rank(
    layers: Sequence[nn.Module], graph: LayerGraph, layout: Layout, mesh: Mesh, device: torch.device
) -> Iterator[OneRank]:
    """Context in which the layers' parameters are the parts of a mesh's first rank.

    Raises:
        ProfileError: other processes are connected, but fewer than the mesh has.
        PlanError: the layout is not legal for a parameter.
    """
    parameters = dict(named_parameters(layers, graph))
    whole = {name: parameter.data for name, parameter in parameters.items()}
    modules = {id(module): module for layer in layers for module in layer.modules()}.values()
    parameter_dicts = [module._parameters for module in modules]
    with _make_fake_mesh(mesh, device) as (device_mesh, group):
        try:
            yield OneRank(layers, parameters, StageSharding(layout, device_mesh, group), device_mesh, group)
        finally:
            for module, slots in zip(modules, parameter_dicts, strict=True):
                module._parameters = slots
            for name, parameter in parameters.items():
                parameter.data = whole[name]


class OneRank:
    """Layers whose parameters are parts.

    Attributes:
        call: the function by which `Passes` calls a layer: it gets and returns parts as plain tensors.
        sent_bytes: bytes of each layer's output, if a stage ends there; known from `collectives` on.
    """

    def __init__(
        self,
        layers: Sequence[nn.Module],
        parameters: Mapping[str, nn.Parameter],
        sharding: StageSharding,
        device_mesh: DeviceMesh,
        group: dist.ProcessGroup,
    ) -> None:
        self._layers = layers
        self._parameters = dict(parameters)
        self._sharding = sharding
        self._mesh = device_mesh, group
        self._entering: list[Any] = []  # the placement of each tensor of the last output
        sharding.shard_parameters(self._parameters)
        modules = {id(module): module for layer in layers for module in layer.modules()}
        sharding.prepare(modules.values())
        name_of = {id(parameter): name for name, parameter in self._parameters.items()}
        self._slots = [
            (module._parameters, slot, name_of[id(parameter)])
            for module in modules.values()
            for slot, parameter in module._parameters.items()
            if id(parameter) in name_of
        ]
        self._callers = {id(layer): sharding.choose_caller(layer) for layer in layers}
        self._names = {
            id(layer): [name_of[id(parameter)] for parameter in layer.parameters() if id(parameter) in name_of]
            for layer in layers
        }
        self.sent_bytes: list[int] = []

    @property
    def gathered_bytes(self) -> list[int]:
        names = (self._names[id(layer)] for layer in self._layers)
        return [
            self._sharding.gathered_bytes({name: self._parameters[name] for name in layer_names})
            for layer_names in names
        ]

    def call(self, function: Callable[..., Any], arguments: Sample) -> Any:
        """Calls a layer; other functions as they are."""
        if id(function) not in self._names:
            return call_with(function, arguments)
        return self._take_parts(self._run(function, arguments), whole=function is self._layers[-1])

    def enter_backward(self) -> AbstractContextManager[None]:
        """Context of a backward, in which plain tensors count as whole."""
        return self._sharding.enter_pass("backward")

    def _run(self, layer: Callable[..., Any], arguments: Sample) -> Any:
        tensors, structure = tree_flatten(arguments)
        if layer is self._layers[0]:
            self._samples = next(tensor.shape[0] for tensor in tensors if isinstance(tensor, torch.Tensor))
            inside = [
                self._sharding.shard_input(tensor, self._samples) if has_numbers(tensor) else tensor
                for tensor in tensors
            ]
        else:
            placed = iter(self._entering)
            inside = [
                self._sharding.enter_layer(tensor, next(placed)) if has_numbers(tensor) else tensor
                for tensor in tensors
            ]
        arguments = tree_unflatten(inside, structure)
        leaves = {name: self._parameters[name] for name in self._names[id(layer)]}
        weights = self._sharding.wrap_weights(leaves, [list(leaves)])
        replaced = [(slots, slot, slots[slot]) for slots, slot, name in self._slots if name in weights]
        try:
            for slots, slot, name in self._slots:
                if name in weights:
                    slots[slot] = weights[name]
            with self._sharding.enter_pass("forward"):
                return call_with(self._callers[id(layer)], arguments)
        finally:
            for slots, slot, parameter in replaced:
                slots[slot] = parameter

    def _take_parts(self, value: Any, *, whole: bool) -> Any:
        """Returns the parts of an output; at the model's end whole tensors."""
        self._entering = []

        def take_part(tensor: Any) -> Any:
            if not has_numbers(tensor):
                return tensor
            part, placed = self._sharding.leave_layer(tensor, whole=whole)
            self._entering.append(placed)
            return part

        return tree_map(take_part, value)

    def collectives(
        self, sample: Sample, autocast: torch.dtype | None = None
    ) -> tuple[list[tuple[Collective, ...]], list[tuple[Collective, ...]], tuple[Collective, ...]]:
        """Returns those of each layer's forward and backward, and those of an update."""
        forwards, backwards = [], []
        gradients: dict[str, torch.Tensor] = {}
        arguments, self.sent_bytes = sample, []
        device = self._mesh[0].device_type
        for layer in self._layers:
            parameters = {name: self._parameters[name] for name in self._names[id(layer)]}
            arguments = tree_map(leave, arguments)
            inputs = [tensor for tensor in tree_flatten(arguments)[0] if has_numbers(tensor) and tensor.requires_grad]
            arguments = tree_map(lambda tensor: tensor.clone() if has_numbers(tensor) else tensor, arguments)
            with CountCollectives(*self._mesh) as forward, torch.enable_grad(), enter_autocast(device, autocast):
                inside = self._run(layer, arguments)
                value = self._take_parts(inside, whole=layer is self._layers[-1])
            outputs = [tensor for tensor in tree_flatten(value)[0] if has_numbers(tensor) and tensor.requires_grad]
            with CountCollectives(*self._mesh) as backward:
                if outputs and (inputs or parameters):
                    leaves, seeds = [*inputs, *parameters.values()], list(map(torch.ones_like, outputs))
                    with self.enter_backward():
                        computed = torch.autograd.grad(outputs, leaves, seeds, allow_unused=True)
                    by_name = zip(parameters, computed[len(inputs) :], strict=True)
                    gradients |= {name: gradient for name, gradient in by_name if gradient is not None}
            forwards.append(forward.collectives)
            backwards.append(backward.collectives)
            sent = (
                self._sharding.leave(tensor.detach(), self._sharding.place_batch(tensor, self._samples))
                for tensor in tree_flatten(inside)[0]
                if has_numbers(tensor)
            )
            self.sent_bytes.append(sum(part.nbytes for part in sent))
            arguments = (tree_map(leave, value),)
        with CountCollectives(*self._mesh) as update:
            self._sharding.sum_gradients(list(gradients), list(gradients.values()))
        return forwards, backwards, update.collectives


@contextmanager
def _make_fake_mesh(mesh: Mesh, device: torch.device) -> Iterator[tuple[DeviceMesh, dist.ProcessGroup]]:
    """Yields a mesh whose first rank is this process, and a group of all its ranks; the others do not exist."""
    joined = dist.is_initialized()
    if not joined:
        dist.init_process_group("fake", rank=0, world_size=mesh.size, store=FakeStore())
    elif dist.get_world_size() < mesh.size:
        raise ProfileError(
            f"a rank of the mesh {mesh} should be measured, which has {mesh.size} ranks, but this run has "
            f"{dist.get_world_size()} processes; start at least {mesh.size}, or profile in a single process and save "
            "the profile"
        )
    coordinates = mesh.coordinates()
    groups: list[Any] = []
    try:
        for at in range(len(mesh.dimensions)):
            ranks = [r for r, place in enumerate(coordinates) if not any((*place[:at], *place[at + 1 :]))]
            groups.append(dist.new_group(ranks, backend="fake", use_local_synchronization=True))
        everyone = dist.new_group(range(mesh.size), backend="fake", use_local_synchronization=True)
        sizes = list(mesh.dimensions.values())
        numbers = torch.arange(mesh.size).view(sizes)
        names = tuple(mesh.dimensions)
        device_mesh = DeviceMesh.from_group(
            groups if len(groups) > 1 else groups[0],
            device.type,
            mesh=numbers if len(groups) > 1 else None,
            mesh_dim_names=names,
        )
        # DTensor remembers what it has done on a mesh, and would use these groups on a real one that is equal.
        device_mesh._thread_id, device_mesh._hash = -1, None
        yield device_mesh, everyone
    finally:
        if joined:
            for group in (*groups, everyone):
                dist.destroy_process_group(group)
        else:
            dist.destroy_process_group()
