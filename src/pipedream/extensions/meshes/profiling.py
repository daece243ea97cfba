"""Measures a rank of each mesh, beside the layers on a single rank.

A model's layers run as one rank of a mesh would, in this process alone: with its own part of every tensor, and with
collectives that do nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import fields, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._pytree import tree_leaves, tree_map

from pipedream import profiler
from pipedream.capture import Captured
from pipedream.core.errors import PlanError, ProfileError
from pipedream.core.model.graph import LayerGraph
from pipedream.core.model.profile import Collective, Profile, RankProfile
from pipedream.core.plan.ranks import Mesh, TensorLayout
from pipedream.core.user_code import call_model
from pipedream.extensions.meshes.layout import Layout
from pipedream.extensions.meshes.planning import NOT_MEASURED
from pipedream.extensions.meshes.sharding.count import FirstPasses
from pipedream.extensions.meshes.sharding.stage import StageSharding
from pipedream.plan_request import AUTO
from pipedream.profiler.passes import Sample, has_numbers
from pipedream.profiler.update import named_parameters
from pipedream.workflows.profile import MAX_RANKS


def measure_ranks(
    captured: Captured,
    model: Any,
    layout: TensorLayout | None,
    meshes: Sequence[str] | str,
    torch_device: Any,
    measure: partial[Profile],
) -> tuple[list[RankProfile], list[str]]:
    """Returns the profile of a rank of each mesh, and notes on those left out; `measure` measures the layers."""
    names = (layout if isinstance(layout, Layout) else Layout()).of_model(model)
    measure_rank = partial(_measure_rank, captured, names, torch_device=torch_device, measure=measure)
    if not isinstance(meshes, str):
        return [measure_rank(Mesh(mesh)) for mesh in meshes], []
    parameters = profiler.all_parameters(captured.layers, captured.graph)
    names.check(parameters, [layer.name for layer in captured.graph.layers], ())
    shapes = {name: tuple(parameter.shape) for name, parameter in parameters.items()}
    candidates = names.candidates(shapes, measure.keywords["samples"], _parse_max_ranks(meshes))
    return _measure_legal_meshes(candidates, measure_rank)


def _parse_max_ranks(meshes: str) -> int:
    """Returns the most ranks that a mesh may have by the text 'auto' or 'auto:N'."""
    auto, _, max_ranks = meshes.partition(":")
    if auto != AUTO or (max_ranks and not (max_ranks.isdecimal() and int(max_ranks) > 1)):
        raise ProfileError(
            f"meshes={meshes!r} was given; give 'auto', 'auto:4' for meshes of at most 4 ranks, or meshes such as "
            "('model:2', 'data:2')"
        )
    return int(max_ranks or MAX_RANKS)


def _measure_legal_meshes(
    candidates: Mapping[Mesh, str], measure_rank: Callable[[Mesh], RankProfile]
) -> tuple[list[RankProfile], list[str]]:
    """Returns a rank of each legal mesh, and why the others are left out."""
    ranks, problems = [], {mesh: why for mesh, why in candidates.items() if why}
    for mesh, why in candidates.items():
        if not why:
            try:
                ranks.append(measure_rank(mesh))
            except (PlanError, ProfileError) as error:
                problems[mesh] = str(error)
    meshes_by_reason: dict[str, list[str]] = {}
    for mesh, why in problems.items():
        meshes_by_reason.setdefault(why, []).append(str(mesh))
    notes = [f"{NOT_MEASURED}{' or '.join(names)}: {why}" for why, names in meshes_by_reason.items()]
    return ranks, notes if candidates else [f"{NOT_MEASURED}any mesh: the layout has no rule"]


def _measure_rank(
    captured: Captured, layout: Layout, mesh: Mesh, *, torch_device: Any, measure: partial[Profile]
) -> RankProfile:
    layers, graph = captured.layers, captured.graph
    layout.check(profiler.all_parameters(layers, graph), [layer.name for layer in graph.layers], [mesh])
    with one_rank(layers, graph, layout, mesh, torch_device) as rank:
        profile = measure(call=rank.call, enter_backward=rank.enter_backward)
        forward, backward, update = rank.collectives
        sizes = zip(profile.layers, rank.sent_bytes, rank.gathered_bytes, strict=True)
        costs = tuple(replace(layer, output_bytes=output, gathered_bytes=gathered) for layer, output, gathered in sizes)
    values: dict[str, Any] = {field.name: getattr(profile, field.name, None) for field in fields(RankProfile)}
    values |= {"mesh": mesh.text, "layout": layout.rules_on(mesh) if layout.uses_cuts(mesh) else str(layout)}
    values |= {"layers": costs, "forward": tuple(forward), "backward": tuple(backward), "update": update}
    return RankProfile(**values)


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
    parameter_dicts = {module: module._parameters for layer in layers for module in layer.modules()}
    with _make_fake_mesh(mesh, device) as (device_mesh, group):
        try:
            yield OneRank(layers, parameters, StageSharding(layout, device_mesh, group))
        finally:
            for module, slots in parameter_dicts.items():
                module._parameters = slots
            for name, parameter in parameters.items():
                parameter.data = whole[name]


class OneRank:
    """Layers whose parameters are parts.

    Attributes:
        sent_bytes: bytes of each layer's output, if a stage ends there.
    """

    def __init__(
        self, layers: Sequence[nn.Module], parameters: Mapping[str, nn.Parameter], sharding: StageSharding
    ) -> None:
        self._layers = layers
        self._parameters = parameters
        self._sharding = sharding
        self._entering: list[Any] = []  # the placement of each tensor of the last output
        sharding.shard_parameters(parameters)
        modules = list(dict.fromkeys(module for layer in layers for module in layer.modules()))
        sharding.prepare(modules)
        name_of = {parameter: name for name, parameter in parameters.items()}
        self._slots = [
            (module._parameters, slot, name_of[parameter])
            for module in modules
            for slot, parameter in module._parameters.items()
            if parameter in name_of
        ]
        self._callers = {layer: sharding.choose_caller(layer) for layer in layers}
        self._names = {
            layer: [name_of[parameter] for parameter in layer.parameters() if parameter in name_of] for layer in layers
        }
        self._first = {layer: FirstPasses(sharding.make_counter) for layer in layers}
        self._last: Any = None  # called last
        self.sent_bytes: list[int] = []

    @property
    def gathered_bytes(self) -> list[int]:
        """The bytes that the sharded weights of each layer need in a pass."""
        return [
            self._sharding.gathered_bytes({name: self._parameters[name] for name in self._names[layer]})
            for layer in self._layers
        ]

    @property
    def collectives(self) -> tuple[list[tuple[Collective, ...]], list[tuple[Collective, ...]], tuple[Collective, ...]]:
        """Those of each layer's first forward and backward, and those of an update."""
        forwards, backwards = (
            [self._first[layer].counted.get(what, ()) for layer in self._layers] for what in ("forward", "backward")
        )
        with self._sharding.make_counter() as update:
            sums = [parameter.detach() for parameter in self._parameters.values()]
            self._sharding.sum_gradients(list(self._parameters), sums)
        return forwards, backwards, update.collectives

    def call(self, function: Callable[..., Any], arguments: Sample) -> Any:
        """Calls a layer as `Passes` does: it gets and returns parts as plain tensors; other functions as they are."""
        self._last = function
        if function not in self._names:
            return call_model(function, arguments)
        is_first = "forward" not in self._first[function].counted
        with self._first[function].counting("forward"):
            value = self._run(function, arguments)
            parts = self._take_parts(value, whole=function is self._layers[-1])
        if is_first:
            sent = (
                self._sharding.leave(tensor.detach(), self._sharding.place_batch(tensor, self._samples))
                for tensor in tree_leaves(value)
                if has_numbers(tensor)
            )
            self.sent_bytes.append(sum(part.nbytes for part in sent))
        return parts

    @contextmanager
    def enter_backward(self) -> Iterator[None]:
        """Context of a backward, in which plain tensors count as whole."""
        counting = self._first[self._last].counting("backward") if self._last in self._first else nullcontext()
        with counting, self._sharding.enter_pass("backward"):
            yield

    def _run(self, layer: Any, arguments: Sample) -> Any:
        placed, is_first = iter(self._entering), layer is self._layers[0]
        if is_first:
            tensors = (leaf for leaf in tree_leaves(arguments) if isinstance(leaf, torch.Tensor))
            self._samples = next(tensors).shape[0]

        def enter(leaf: Any) -> Any:
            if not has_numbers(leaf):
                return leaf
            if is_first:
                return self._sharding.shard_input(leaf, self._samples)
            return self._sharding.enter_layer(leaf, next(placed))

        arguments = tree_map(enter, arguments)
        leaves = {name: self._parameters[name] for name in self._names[layer]}
        weights = self._sharding.wrap_weights(leaves, [list(leaves)])
        replaced = [(slots, slot, slots[slot]) for slots, slot, name in self._slots if name in weights]
        try:
            for slots, slot, name in self._slots:
                if name in weights:
                    slots[slot] = weights[name]
            with self._sharding.enter_pass("forward"):
                return call_model(self._callers[layer], arguments)
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
