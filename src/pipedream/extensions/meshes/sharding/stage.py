"""One stage on a mesh of ranks: its layers compute with DTensors, everything else with each rank's own part.

Life of a weight: the user's parameter holds this rank's part, and so do the versions, gradients and optimizer state.
While layers run, `wrap_weights` puts DTensors around the leaves of a version. Their gradients come back as parts. Where
a weight is whole on every rank, its gradient may be a partial sum. It stays one until the update (`sum_gradients`), so
that microbatches cost no collective.

Life of an activation: it enters as this rank's part (`enter`), and leaves as one (`leave`), sharded as the boundary
says (`Boundary`). At the last stage the outputs are whole.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from math import prod
from typing import Any, Self

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, _random
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from pipedream.core.box import Box, box_of, dense_strides, slice_of
from pipedream.core.errors import CaptureError
from pipedream.core.model.profile import Collective
from pipedream.core.plan.ranks import Mesh
from pipedream.extensions.meshes.layout import BATCH, Crossing, Layout
from pipedream.extensions.meshes.sharding.count import CountCollectives, FirstPasses
from pipedream.extensions.meshes.sharding.functions import (
    list_placements,
    list_shards,
    put_in_order,
    redistribute,
    redistribute_in_steps,
    runs_early,
    sum_partials,
    wrap_whole,
)
from pipedream.extensions.meshes.sharding.local_rules import LocalRules, NoHiddenGathers
from pipedream.extensions.meshes.sharding.sharded_weights import GatheredWeights, LazyParameters, Rows, ShardedWeight
from pipedream.runtime.comm.values import map_tensors
from pipedream.runtime.division import Division
from pipedream.tensors.elementwise import steps_each_element
from pipedream.tensors.parts import like_part, local_part


class _StageGenerator(_random.OffsetBasedRNGTracker):
    """Lets DTensor's random operators draw from the stage's generator, as on CPUs.

    By default DTensor makes a tracker at the first of them, and broadcasts its state to all ranks of the job, of which
    only those of this stage are there.
    """

    def __init__(self, device_mesh: DeviceMesh) -> None:
        super().__init__(device_mesh, run_state_sync=False)
        self.distribute_region_enabled = False

    @contextmanager
    def _distribute_region(self, spec: DTensorSpec, generator: torch.Generator | None = None) -> Iterator[None]:
        yield  # torch 2.11 would set the generator back, though the region is disabled


class _Part:
    """A tensor's placements, and what becomes of its gradient.

    Attributes:
        rows: the shard of a sharded weight; None where the rank keeps all rows of its part.
        summed_late: mesh dimensions over which the gradient is a partial sum until the update: that of the batch, and
            those found in the first backward; None before.
    """

    def __init__(
        self,
        spec: DTensorSpec,
        summed_late: frozenset[int] | None = frozenset(),
        *,
        rows: Rows | None = None,
        shard_dim: int | None = None,
        batch: int | None = None,
    ) -> None:
        self.spec = spec
        self.rows = rows
        # Replicas must agree, and the first microbatch of one may be too small to be sharded.
        is_whole = batch is not None and spec.placements[batch] == Replicate()
        self._summed_by_batch = frozenset({batch} if is_whole and batch is not None else ())
        self._summed_now = frozenset() if shard_dim is None or rows is None else frozenset({shard_dim})
        self.whole_shape = spec.shape
        self._place = spec.mesh.get_coordinate() or ()
        self.box = box_of(self.whole_shape, list_shards(spec.placements), spec.mesh.shape, self._place)
        if rows is not None:
            self.box = (self.box[0][rows.local.start : rows.local.stop], *self.box[1:])
        self.part_shape = torch.Size(map(len, self.box))
        self.summed_late = summed_late

    def copy_fresh(self) -> _Part:
        """Returns the same of a weight before any backward."""
        fresh = copy.copy(self)
        fresh.summed_late = None
        return fresh

    def wrap(self, local: torch.Tensor) -> Any:
        return like_part(local, self.spec)

    def gradient(self, gradient: DTensor) -> torch.Tensor:
        """Returns this rank's part of a gradient."""
        placed = list(zip(gradient.placements, self.spec.placements, strict=True))
        unsummed = {at for at, (have, want) in enumerate(placed) if have == Partial() and want == Replicate()}
        if self.summed_late is None:
            self.summed_late = (frozenset(unsummed) | self._summed_by_batch) - self._summed_now
        summed = self.summed_late | self._summed_now
        target = [Partial() if at in summed and at in unsummed else want for at, (_, want) in enumerate(placed)]
        if target != list(gradient.placements):
            gradient = gradient.redistribute(placements=target)
        # A sum that is whole already counts once.
        if any(self._place[at] for at in summed - unsummed):
            return torch.zeros_like(local_part(gradient))
        return local_part(gradient)


class _Wrap(torch.autograd.Function):
    """Makes a rank's part a DTensor, and a DTensor's gradient a rank's part."""

    @staticmethod
    def forward(ctx: Any, local: torch.Tensor, part: _Part) -> DTensor:
        ctx.part = part
        return part.wrap(local.view_as(local))  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[torch.Tensor, None]:
        return ctx.part.gradient(gradients[0]), None


def _wrap(local: torch.Tensor, part: _Part) -> torch.Tensor:
    wrapped: torch.Tensor = _Wrap.apply(local, part)  # type: ignore[no-untyped-call]
    return wrapped


def _wrap_weight(local: torch.Tensor, part: _Part, sample_memory: Callable[[], None]) -> torch.Tensor:
    """Returns a weight, whose gradient goes to its leaf at once."""
    weight = _wrap(local, part)
    runs_early(weight)
    if weight.grad_fn is not None:
        weight.grad_fn.register_prehook(lambda _: sample_memory())
    return weight


class StageSharding(Division):
    """One stage whose tensors are sharded over the ranks of its worker.

    Args:
        device_mesh: mesh with named dimensions.
        group: all its ranks, for a layout that was found.

    Attributes:
        steps_whole_weights: the optimizer gathers weights.
    """

    is_divided = True

    def __init__(self, layout: Layout, device_mesh: DeviceMesh, group: dist.ProcessGroup | None = None) -> None:
        names = enumerate(device_mesh.mesh_dim_names or ())
        self.mesh = Mesh(",".join(f"{name}:{device_mesh.size(at)}" for at, name in names))
        self._layout = layout
        self.device_mesh = device_mesh
        if device_mesh.device_type == "cuda":  # DTensor has no tracker for CPUs
            _random._rng_tracker = _StageGenerator(device_mesh)
        self._group = group
        self._place: Sequence[int] = device_mesh.get_coordinate() or []
        self.ranks, self.is_first = self.mesh.size, not any(self._place)
        self._shard_dim = self._find_dimension(layout.shard_weights)
        self._gathered = GatheredWeights()
        self._weights: dict[str, _Part] = {}
        self._checked: set[tuple[str, bool]] = set()
        self._first = FirstPasses(self.make_counter)
        self.steps_whole_weights = False

    def choose_caller(self, layer: torch.nn.Module) -> Callable[..., Any]:
        if not self._layout.uses_cuts(self.mesh):
            return layer
        from pipedream.extensions.meshes.layouts.layer import PartitionedLayer  # only such a layout needs it

        assert self._group is not None
        return PartitionedLayer(layer, self.device_mesh, self._group)

    def adapt_optimizer(self, optimizer: torch.optim.Optimizer, *, rotates: bool) -> None:
        is_sharded = any(part.part_shape != part.whole_shape for part in self._weights.values())
        self.steps_whole_weights = is_sharded and (rotates or not steps_each_element(optimizer))

    def _find_dimension(self, name: str) -> int | None:
        names = list(self.mesh.dimensions)
        return names.index(name) if name in names else None

    # -- weights --------------------------------------------------------------------------------------

    def share_initial(self, tensors: Sequence[torch.Tensor]) -> None:
        """Copies the values of the worker's first rank to the others."""
        for tensor in tensors:
            for group in self.device_mesh.get_all_groups():
                dist.broadcast(tensor.data, group=group, group_src=0)

    def shard_parameters(
        self,
        handles: Mapping[str, torch.nn.Parameter],
        overrides: Mapping[torch.nn.Parameter, Sequence[int | None]] | None = None,
    ) -> None:
        """Replaces each parameter's values by this rank's part.

        Args:
            overrides: placements that do not follow from the layout, as `Layout.placements`.

        Raises:
            PlanError: the layout is not legal for a parameter (`Layout.placements`).
        """
        for name, handle in handles.items():
            if overrides and handle in overrides:
                placements = overrides[handle]
            else:
                placements = self._layout.parameter(name, handle.shape, self.mesh)
            meta = TensorMeta(handle.shape, handle.stride(), handle.dtype)
            placed = tuple(list_placements(placements))
            spec, rows = DTensorSpec(self.device_mesh, placed, meta), None
            if self._shard_dim is not None and handle.dim() and placed[self._shard_dim] == Replicate():
                parts = prod(self.device_mesh.size(at) for at, placement in enumerate(placed) if placement == Shard(0))
                rows = Rows(self.device_mesh.get_group(self._shard_dim), -(-handle.shape[0] // parts))
            self._weights[name] = _Part(
                spec,
                None,
                rows=rows,
                shard_dim=self._shard_dim,
                batch=self._find_dimension(self._layout.over.get(BATCH, "")),
            )
            handle.data = self.take_part([name], handle.data)

    def prepare(self, modules: Iterable[torch.nn.Module]) -> None:
        for module in modules if self._shard_dim is not None else ():
            module._parameters = LazyParameters(module._parameters)

    def watch_memory(self, sample: Callable[[], None]) -> None:
        self._gathered.sample_memory = sample

    def wrap_weights(
        self, leaves: Mapping[str, torch.Tensor], names_by_layer: Iterable[Sequence[str]]
    ) -> dict[str, Any]:
        """Returns DTensors around parts; of sharded weights what gathers them, with others of their layer."""
        weights: dict[str, Any] = {}
        for names in names_by_layer:
            sharded = self._list_sharded({name: leaves[name] for name in names})
            weights |= zip(sharded, self._gathered.plan_readings(sharded.values()), strict=True)
            for name in (name for name in names if name not in sharded):
                weights[name] = _wrap_weight(leaves[name], self._weights[name], self._gathered.sample_memory)
        return weights

    def gathered_bytes(self, leaves: Mapping[str, torch.Tensor]) -> int:
        """Returns the most bytes that the sharded weights of a layer need in a pass, with any number of samples."""
        return GatheredWeights.needed_bytes(self._list_sharded(leaves).values())

    def _list_sharded(self, leaves: Mapping[str, torch.Tensor]) -> dict[str, ShardedWeight]:
        return {
            name: ShardedWeight(
                leaf, part.rows, partial(_wrap_weight, part=part, sample_memory=self._gathered.sample_memory)
            )
            for name, leaf in leaves.items()
            for part in [self._weights[name]]
            if part.rows is not None
        }

    def is_counted(self, name: str) -> bool:
        """Whether this rank is the first of those with an equal part."""
        part = self._weights[name]
        sharded = {self._shard_dim} if part.rows is not None else set()
        placed = enumerate(zip(part.spec.placements, self._place, strict=True))
        return not any(place for at, (placement, place) in placed if placement.is_replicate() and at not in sharded)

    def locate_saved(self, names: Sequence[str], part: torch.Tensor) -> tuple[Box, Sequence[int]] | None:
        weight = self._find_weight(names)
        if weight is None or part.shape != weight.part_shape:
            return (tuple(map(range, part.shape)), part.shape) if self.is_first else None
        name = next(name for name in names if name in self._weights)
        return (weight.box, weight.whole_shape) if self.is_counted(name) else None

    def find_box(self, names: Sequence[str], shape: Sequence[int]) -> Box:
        weight = self._find_weight(names)
        return tuple(map(range, shape)) if weight is None or weight.whole_shape != tuple(shape) else weight.box

    def check_shapes(self, shapes: Mapping[str, Sequence[int]]) -> None:
        for name, shape in shapes.items():
            weight = self._weights.get(name)
            if weight is not None and tuple(shape) != tuple(weight.whole_shape):
                raise CaptureError(
                    f"{name!r} has shape {tuple(shape)} in the state dict, {tuple(weight.whole_shape)} in the model; "
                    "give one of this model"
                )

    def gather(self, names: Sequence[str], part: torch.Tensor) -> torch.Tensor:
        weight = self._find_weight(names)
        if weight is None or part.dim() == 0 or part.shape != weight.part_shape:
            return part
        part = part.detach() if weight.rows is None else weight.rows.gather(part.detach())
        return local_part(weight.wrap(part).redistribute(placements=self._nowhere))

    def take_part(self, names: Sequence[str], whole: torch.Tensor) -> torch.Tensor:
        box = self.find_box(names, whole.shape)
        return whole if tuple(map(len, box)) == whole.shape else whole[slice_of(box)].clone()

    def _find_weight(self, names: Sequence[str]) -> _Part | None:
        return next((self._weights[name] for name in names if name in self._weights), None)

    def sum_gradients(self, names: Sequence[str], sums: Sequence[torch.Tensor | None]) -> None:
        with self.count_collectives("sums"):
            for at in range(len(self.mesh.dimensions)):
                group = self.device_mesh.get_group(at)
                late = [
                    total
                    for name, total in zip(names, sums, strict=True)
                    if total is not None and at in (self._weights[name].summed_late or ())
                ]
                works = [dist.all_reduce(total, group=group, async_op=True) for total in late]
                for work in works:
                    assert work is not None
                    work.wait()

    def sum(self, number: torch.Tensor) -> torch.Tensor:
        with self.count_collectives("norm"):
            for at in range(len(self.mesh.dimensions)):
                dist.all_reduce(number, group=self.device_mesh.get_group(at))
        return number

    # -- collectives ----------------------------------------------------------------------------------

    def make_counter(self) -> CountCollectives:
        """Returns what counts collectives of the stage's mesh while it is active."""
        return CountCollectives(self.device_mesh, self._group)

    def count_collectives(self, what: str) -> AbstractContextManager[None]:
        return self._first.counting(what)

    @property
    def collectives(self) -> dict[str, tuple[Collective, ...]]:
        return self._first.collectives

    def copy_fresh(self) -> Self:
        """Returns the sharding of the same stage before it has run."""
        fresh = copy.copy(self)
        fresh._gathered = GatheredWeights()
        fresh._first = FirstPasses(self.make_counter)
        fresh._weights = {name: part.copy_fresh() for name, part in self._weights.items()}
        return fresh

    # -- activations ----------------------------------------------------------------------------------

    @contextmanager
    def enter_pass(self, what: str) -> Iterator[None]:
        """Context in which plain tensors count as whole, and some operators have rules of their own.

        The first pass of each kind is checked for hidden gathers.
        """
        from torch.distributed.tensor.experimental import implicit_replication  # it imports much that is not needed

        keeps = what == "forward" and self._shard_dim is not None
        references = self._gathered.keep_references() if keeps else nullcontext()
        kind = what, torch.is_grad_enabled()  # an evaluation may run other operators
        check = nullcontext() if kind in self._checked else NoHiddenGathers()
        with implicit_replication(), LocalRules(), check, references:
            try:
                yield
            finally:
                self._gathered.drop()
        self._checked.add(kind)

    def prepare_input(self, value: Any, samples: int) -> Any:
        return map_tensors(value, lambda tensor: self.shard_input(tensor, samples))

    def shard_input(self, tensor: torch.Tensor, samples: int) -> torch.Tensor:
        """Returns a tensor of the model's input, which every rank has whole, as a DTensor."""
        placements = list_placements(self.place_batch(tensor, samples))
        return redistribute(wrap_whole(tensor, self.device_mesh), placements)  # a slice

    def gather_output(self, output: Any) -> Any:
        return map_tensors(output, self.leave)

    def place_batch(self, tensor: torch.Tensor, samples: int) -> tuple[int | None, ...]:
        """Returns how a tensor without names is sharded where it enters or leaves the stage."""
        return self._layout.boundary(None, tensor.shape, samples, self.mesh)

    def enter(self, tensor: torch.Tensor, crossing: Crossing) -> torch.Tensor:
        """Returns a received part as a DTensor."""
        shape, order = torch.Size(crossing.shape), crossing.order
        meta = TensorMeta(shape, dense_strides(shape, order), tensor.dtype)
        spec = DTensorSpec(self.device_mesh, tuple(list_placements(crossing.received)), meta)
        return _wrap(put_in_order(tensor, order), _Part(spec))

    def leave(self, tensor: torch.Tensor, placements: Sequence[int | None] | None = None) -> torch.Tensor:
        """Returns this rank's part of an output; by default all of it."""
        if not isinstance(tensor, DTensor):
            return tensor
        placed = self._nowhere if placements is None else list_placements(placements)
        return local_part(redistribute_in_steps(tensor, placed).to_local(grad_placements=placed))

    def enter_layer(self, local: torch.Tensor, spec: Any) -> torch.Tensor:
        """Returns a part that `leave_layer` gave, as it was before."""
        return local if spec is None else _wrap(local, _Part(spec))

    def leave_layer(self, tensor: torch.Tensor, *, whole: bool) -> tuple[torch.Tensor, Any]:
        """Returns this rank's part of a value between two layers of a stage, and its placement.

        Partial sums are added up, and the model's output is made whole.
        """
        if not isinstance(tensor, DTensor):
            return tensor, None
        if whole:
            return self.leave(tensor), None
        tensor = sum_partials(tensor)
        return local_part(tensor.to_local(grad_placements=tensor.placements)), tensor._spec

    @property
    def _nowhere(self) -> list[Placement]:
        return [Replicate()] * len(self.mesh.dimensions)
