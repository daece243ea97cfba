"""A stage whose worker, or that of a neighbour, is a mesh: how the engine's `Division` is made of sharded tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from pipedream.core.box import Box
from pipedream.core.model.collective import Collective, StageCollectives
from pipedream.core.model.graph import LayerGraph
from pipedream.core.schedule.program import Program
from pipedream.extensions.meshes.layout import Boundary, Layout, read_crossings, with_crossings
from pipedream.extensions.meshes.layouts import partition_layer
from pipedream.extensions.meshes.sharding.parallelized import parallelize_layers
from pipedream.extensions.meshes.sharding.stage import StageSharding
from pipedream.extensions.meshes.sharding.whole_weights import whole_weights
from pipedream.extensions.meshes.without_data import SampleMessage
from pipedream.runtime.blueprint import Blueprint
from pipedream.runtime.comm.connections import Connections
from pipedream.runtime.comm.message import Message, dimension_order
from pipedream.runtime.comm.values import map_tensors
from pipedream.runtime.division import Division
from pipedream.runtime.session.local_workers import LocalWorkers
from pipedream.runtime.stage.part import StageFacts, StagePart
from pipedream.runtime.weights.initial_values import named_state


class BesideMesh(Division):
    """A single rank, whose neighbours may be meshes.

    Args:
        boundary: after this stage; None after the last one.
    """

    def __init__(self, boundary: Boundary | None) -> None:
        self._boundary = boundary

    def unpack(self, structure: str, tensors: Sequence[torch.Tensor]) -> tuple[str, Sequence[torch.Tensor]]:
        return read_crossings(structure)[1], tensors

    def pack(
        self, structure: str, tensors: tuple[torch.Tensor, ...], samples: int
    ) -> tuple[str, tuple[torch.Tensor, ...]]:
        if self._boundary is None:
            return structure, tensors
        # Receivers restore the order of dimensions in memory, such as channels_last.
        crossings = [
            crossing._replace(order=dimension_order(tensor))
            for tensor, crossing in zip(
                tensors, self._boundary.crossings([tensor.shape for tensor in tensors], samples), strict=True
            )
        ]
        return with_crossings(structure, crossings), tensors

    def gradient_structure(self, message: Message) -> str:
        """The gradients travel back in the shards in which the tensors came."""
        crossings, _ = read_crossings(message.structure)
        pairs = zip(crossings, message.wants, strict=False)
        return with_crossings("", [crossing.reversed() for crossing, wants in pairs if wants])


class OnMesh(BesideMesh):
    """A stage whose tensors the ranks of a mesh divide."""

    is_divided = True

    def __init__(self, sharding: StageSharding, boundary: Boundary | None) -> None:
        super().__init__(boundary)
        self._sharding = sharding
        self._sample: SampleMessage | None = None
        self.ranks = sharding.mesh.size
        self.is_first = sharding.is_first

    @property
    def collectives(self) -> Mapping[str, tuple[Collective, ...]]:
        return self._sharding.collectives

    def choose_caller(self, layer: nn.Module) -> Callable[..., Any]:
        return partition_layer(layer, self._sharding)

    def prepare(self, modules: Iterable[nn.Module]) -> None:
        self._sharding.prepare(modules)

    def wrap_weights(
        self, leaves: Mapping[str, torch.Tensor], names_by_layer: Iterable[Sequence[str]]
    ) -> Mapping[str, Any]:
        weights: dict[str, Any] = {}
        for names in names_by_layer:
            weights |= self._sharding.wrap_weights({name: leaves[name] for name in names})
        return weights

    def enter_pass(self, what: str) -> AbstractContextManager[None]:
        return self._sharding.enter_pass(what)

    def count_collectives(self, what: str) -> AbstractContextManager[None]:
        return self._sharding.count_collectives(what)

    def watch_memory(self, sample: Callable[[], None]) -> None:
        self._sharding.sample_memory = sample

    def prepare_input(self, value: Any, samples: int) -> Any:
        return map_tensors(value, lambda tensor: self._sharding.shard_input(tensor, samples))

    def unpack(self, structure: str, tensors: Sequence[torch.Tensor]) -> tuple[str, Sequence[torch.Tensor]]:
        crossings, structure = read_crossings(structure)
        return structure, [self._sharding.enter(*pair) for pair in zip(tensors, crossings, strict=True)]

    def pack(
        self, structure: str, tensors: tuple[torch.Tensor, ...], samples: int
    ) -> tuple[str, tuple[torch.Tensor, ...]]:
        if self._boundary is None:
            return structure, tensors
        planned = self._boundary.crossings([tensor.shape for tensor in tensors], samples)
        crossings = [
            (crossing if self._sharding.is_sharded(tensor) else self._boundary.whole(tensor.shape))._replace(
                order=dimension_order(tensor)
            )
            for tensor, crossing in zip(tensors, planned, strict=True)
        ]
        pairs = zip(tensors, crossings, strict=True)
        parts = tuple(self._sharding.leave(tensor, crossing.sent) for tensor, crossing in pairs)
        return with_crossings(structure, crossings), parts

    def gather_output(self, output: Any) -> Any:
        return map_tensors(output, self._sharding.leave)

    def find_box(self, names: Sequence[str], shape: Sequence[int]) -> Box:
        return self._sharding.find_box(names, shape)

    def locate_saved(self, names: Sequence[str], part: torch.Tensor) -> tuple[Box, Sequence[int]] | None:
        return self._sharding.locate_saved(names, part)

    def check_shapes(self, shapes: Mapping[str, Sequence[int]]) -> None:
        self._sharding.check_shapes(shapes)

    def take_part(self, names: Sequence[str], whole: torch.Tensor) -> torch.Tensor:
        return self._sharding.take_part(names, whole)

    def gather(self, names: Sequence[str], part: torch.Tensor) -> torch.Tensor:
        return self._sharding.gather(names, part)

    def adapt_optimizer(self, optimizer: torch.optim.Optimizer, *, rotates: bool) -> None:
        self._sharding.adapt_optimizer(optimizer, rotates=rotates)

    def stepping(
        self, optimizer: torch.optim.Optimizer, handles: Mapping[str, nn.Parameter]
    ) -> AbstractContextManager[None]:
        if not self._sharding.steps_whole_weights:
            return nullcontext()
        return whole_weights(optimizer, handles, self._sharding)

    def sum_gradients(self, names: Sequence[str], sums: Sequence[torch.Tensor | None]) -> None:
        self._sharding.sum_gradients(names, sums)

    def is_counted(self, name: str) -> bool:
        return self._sharding.is_counted(name)

    def sum(self, number: torch.Tensor) -> torch.Tensor:
        return self._sharding.sum(number)

    def make_parts(self, facts: StageFacts) -> Iterator[StagePart]:
        self._sample = SampleMessage(facts, self._sample)
        yield self._sample

    def compare_collectives(self, program: Program, *, needs_norms: bool) -> StageCollectives:
        assert self._sample is not None, "a stage has parts before it trains"
        fresh = self._sharding.copy_fresh()
        return self._sample.compare(fresh, OnMesh(fresh, self._boundary), self.collectives, program, needs_norms)


def divide_stage(
    workers_here: LocalWorkers,
    graph: LayerGraph,
    connections: Connections,
    stage: int,
    trained: dict[str, nn.Parameter],
) -> Division:
    """Divides a stage's tensors among the ranks of this worker, in a plan with meshes.

    Args:
        trained: the stage's trained parameters, which become parts.
    """
    blueprint, model = workers_here.blueprint, workers_here.model
    settings, boundary = blueprint.settings, _find_boundary(blueprint, stage)
    if connections.mesh is None:
        return BesideMesh(boundary)
    sharding = StageSharding(_layout_of(blueprint), connections.mesh, connections.mesh_group)
    sharding.share_initial(
        [tensor for name, tensor in named_state(model).items() if name in workers_here.names.by_stage[stage]]
    )
    placements = {}
    if settings.parallelize is not None:
        modules, span = dict(model.named_modules()), blueprint.program.plan.stages[stage]
        names = [layer.name for layer in graph.layers[span.first : span.last]]
        layers = [(name, modules[name]) for name in names if name in modules]
        placements = parallelize_layers(settings.parallelize, layers, connections.mesh)
    sharding.shard_parameters(trained, placements)
    return OnMesh(sharding, boundary)


def _layout_of(blueprint: Blueprint) -> Layout:
    layout = blueprint.settings.layout
    assert isinstance(layout, Layout), "a plan with meshes has a layout"
    return layout


def _find_boundary(blueprint: Blueprint, stage: int) -> Boundary | None:
    """Returns the boundary after a stage; None after the last one."""
    meshes = blueprint.program.plan.meshes
    if stage == len(meshes) - 1:
        return None
    return Boundary(_layout_of(blueprint), blueprint.last_layers[stage], meshes[stage], meshes[stage + 1])
