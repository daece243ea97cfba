"""A stage whose worker, or that of a neighbour, is a mesh: how the engine's `Division` is made of sharded tensors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from pipedream.core.errors import PlanError
from pipedream.core.model.graph import LayerGraph
from pipedream.core.model.profile import StageCollectives
from pipedream.core.schedule.program import Program
from pipedream.extensions.meshes.layout import Boundary, Layout, read_crossings, with_crossings
from pipedream.extensions.meshes.sharding.parallelized import parallelize_layers
from pipedream.extensions.meshes.sharding.stage import StageSharding
from pipedream.extensions.meshes.without_data import SampleMessage
from pipedream.runtime.blueprint import Blueprint
from pipedream.runtime.comm.connections import Connections
from pipedream.runtime.comm.message import Message, dimension_order
from pipedream.runtime.division import Division
from pipedream.runtime.session.local_workers import LocalWorkers
from pipedream.runtime.stage.part import StageFacts, StagePart
from pipedream.runtime.weights.parameters import named_state


class BesideMesh(Division):
    """A single rank, whose neighbours may be meshes; `boundary` is after this stage, None after the last one."""

    def __init__(self, boundary: Boundary | None) -> None:
        self._boundary = boundary

    def unpack(self, structure: str, tensors: Sequence[torch.Tensor]) -> tuple[str, Sequence[torch.Tensor]]:
        return read_crossings(structure)[1], tensors

    def pack(
        self, structure: str, tensors: tuple[torch.Tensor, ...], samples: int
    ) -> tuple[str, tuple[torch.Tensor, ...]]:
        if self._boundary is None:
            return structure, tensors
        planned = self._boundary.crossings([tensor.shape for tensor in tensors], samples)
        # Receivers restore the order of dimensions in memory, such as channels_last.
        crossings = [
            (crossing.whole() if self.is_divided and not isinstance(tensor, DTensor) else crossing)._replace(
                order=dimension_order(tensor)
            )
            for tensor, crossing in zip(tensors, planned, strict=True)
        ]
        pairs = zip(tensors, crossings, strict=True)
        return with_crossings(structure, crossings), tuple(self.leave(tensor, cut.sent) for tensor, cut in pairs)

    def leave(self, tensor: torch.Tensor, placements: Sequence[int | None] | None = None) -> torch.Tensor:
        """Returns this rank's part of an output; by default all of it."""
        return tensor

    def gradient_structure(self, message: Message) -> str:
        """The gradients travel back in the shards in which the tensors came."""
        crossings, _ = read_crossings(message.structure)
        pairs = zip(crossings, message.wants, strict=False)
        return with_crossings("", [crossing.reversed() for crossing, wants in pairs if wants])


class OnMesh(StageSharding, BesideMesh):
    """A stage whose tensors the ranks of a mesh divide."""

    def __init__(
        self, layout: Layout, device_mesh: DeviceMesh, group: dist.ProcessGroup | None, boundary: Boundary | None
    ) -> None:
        super().__init__(layout, device_mesh, group)
        self._boundary = boundary
        self._sample: SampleMessage | None = None

    def unpack(self, structure: str, tensors: Sequence[torch.Tensor]) -> tuple[str, Sequence[torch.Tensor]]:
        crossings, structure = read_crossings(structure)
        return structure, [self.enter(*pair) for pair in zip(tensors, crossings, strict=True)]

    def stepping(
        self, optimizer: torch.optim.Optimizer, handles: Mapping[str, nn.Parameter]
    ) -> AbstractContextManager[None]:
        return whole_weights(optimizer, handles, self) if self.steps_whole_weights else nullcontext()

    def make_parts(self, facts: StageFacts) -> Iterator[StagePart]:
        self._sample = SampleMessage(facts, self._sample)
        yield self._sample

    def compare_collectives(self, program: Program, *, needs_norms: bool) -> StageCollectives:
        assert self._sample is not None, "a stage has parts before it trains"
        return self._sample.compare(self.copy_fresh(), self.collectives, program, needs_norms)


def divide_stage(
    workers_here: LocalWorkers,
    graph: LayerGraph,
    connections: Connections,
    stage: int,
    trained: dict[str, nn.Parameter],
) -> Division:
    """Divides a stage among the ranks of this worker, in a plan with meshes; `trained` parameters become parts."""
    blueprint, model = workers_here.blueprint, workers_here.model
    settings, boundary = blueprint.settings, _find_boundary(blueprint, stage)
    if connections.mesh is None:
        return BesideMesh(boundary)
    division = OnMesh(_layout_of(blueprint), connections.mesh, connections.mesh_group, boundary)
    division.share_initial(
        [tensor for name, tensor in named_state(model).items() if name in workers_here.names.by_stage[stage]]
    )
    placements = {}
    if settings.parallelize is not None:
        modules, span = dict(model.named_modules()), blueprint.program.plan.stages[stage]
        names = [layer.name for layer in graph.layers[span.first : span.last]]
        layers = [(name, modules[name]) for name in names if name in modules]
        placements = parallelize_layers(settings.parallelize, layers, connections.mesh)
    division.shard_parameters(trained, placements)
    return division


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


@contextmanager
def whole_weights(
    optimizer: torch.optim.Optimizer, handles: Mapping[str, nn.Parameter], sharding: StageSharding
) -> Iterator[None]:
    """Context in which an optimizer of handles, which hold parts, has whole weights, gradients and states.

    So optimizers that do not step each element by itself, such as Muon and Adafactor, step whole weights on every rank,
    which keeps its parts afterwards. The numbers are those of one process for any optimizer, but the step takes memory
    and time as without a mesh.
    """
    names = {handle: name for name, handle in handles.items()}
    weight_of: dict[nn.Parameter, nn.Parameter] = {}
    with sharding.count_collectives("whole weights"):
        for handle in [handle for group in optimizer.param_groups for handle in group["params"]]:
            gather, state = partial(sharding.gather, [names[handle]]), optimizer.state.pop(handle, {})
            weight = weight_of[handle] = nn.Parameter(gather(handle.detach()), requires_grad=handle.requires_grad)
            weight.grad = None if handle.grad is None else gather(handle.grad)
            if state:
                whole_state = {key: gather(value) if torch.is_tensor(value) else value for key, value in state.items()}
                optimizer.state[weight] = whole_state
    for group in optimizer.param_groups:
        group["params"] = [weight_of[handle] for handle in group["params"]]
    yield
    handle_of = {weight: handle for handle, weight in weight_of.items()}
    for group in optimizer.param_groups:
        group["params"] = [handle_of[weight] for weight in group["params"]]

    def cut(handle: nn.Parameter, weight: nn.Parameter, key: str, value: Any) -> Any:
        if not torch.is_tensor(value) or value.dim() == 0:
            return value
        if value.shape == handle.shape != weight.shape:
            raise PlanError(
                f"the optimizer {type(optimizer).__name__} was asked for on a mesh, but its state {key!r} for "
                f"{names[handle]!r} of {tuple(weight.shape)} looks like one of a rank's parts, {tuple(value.shape)}; "
                "use another layout, or an optimizer that steps each element by itself"
            )
        return sharding.take_part([names[handle]], value)

    for handle, weight in weight_of.items():
        handle.data.copy_(sharding.take_part([names[handle]], weight.detach()))
        if state := optimizer.state.pop(weight, {}):
            optimizer.state[handle] = {key: cut(handle, weight, key, value) for key, value in state.items()}
