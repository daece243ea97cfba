"""Layers on a mesh of halves, whose operators run along the indices that a partition has chosen (`Layout.of`).

A layer gets DTensors and returns DTensors, as any layer on a mesh. In between, its forward and its backward are its
traced operators, with this rank's parts. Where its weights and inputs rest is given; the rest of the partition is
searched at the first call with each kind of input.
"""

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeCopyMode, FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement
from torch.overrides import _pop_mode_temporarily
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_unflatten

from pipedream.core.errors import PlanError
from pipedream.extensions.meshes.layouts.search.partition import Partition, complete_partition
from pipedream.extensions.meshes.layouts.step import GroupRank, PartitionedStep
from pipedream.extensions.meshes.layouts.tracing.trace import trace
from pipedream.extensions.meshes.sharding.functions import (
    list_placements,
    list_shards,
    redistribute_in_steps,
    sum_partials,
    wrap_part,
    wrap_whole,
)

_ADVICE = "make it one (nn.Sequential of its blocks), or use a layout by hand"


class PartitionedLayer:
    """A layer that is called in place of the user's.

    Args:
        layer: whose parameters are DTensors while it is called.
        group: all ranks of the mesh.

    Raises:
        PlanError: a slice of a model that is no chain; or, when called, an operator without a description.
    """

    def __init__(self, layer: nn.Module, device_mesh: DeviceMesh, group: dist.ProcessGroup) -> None:
        if hasattr(layer, "reseed") and not (layer.is_first and layer.is_last):
            raise PlanError(
                "a stage of several has a mesh with a layout that was found, but the model is no chain of modules; "
                f"{_ADVICE}"
            )
        self.layer = layer
        self.mesh = device_mesh
        self.group = group
        self._passes: dict[object, _Passes] = {}

    def __call__(self, *args: Any, **named: Any) -> Any:
        leaves, structure = tree_flatten((args, named))
        tensors = [self._enter(leaf) for leaf in leaves if isinstance(leaf, torch.Tensor)]
        parameters = {name: self._enter(parameter) for name, parameter in self.layer.named_parameters()}
        others = tuple(leaf for leaf in leaves if not isinstance(leaf, torch.Tensor))
        flags = tuple(module.training for module in self.layer.modules())
        autocast = torch.is_autocast_enabled(self.mesh.device_type)
        kinds = tuple(
            (tensor.shape, tensor.dtype, tensor.placements, tensor.requires_grad)
            for tensor in (*tensors, *parameters.values())
        )
        key = structure, repr(others), flags, autocast, kinds
        if key not in self._passes:
            with _suspend_modes():
                self._passes[key] = _Passes(self, leaves, structure, tensors, parameters)
        return self._passes[key](tensors, parameters, dict(self.layer.named_buffers()))

    def _enter(self, tensor: torch.Tensor) -> DTensor:
        """Returns a DTensor without partial sums; a plain tensor is whole on every rank."""
        return sum_partials(wrap_whole(tensor, self.mesh))


@contextmanager
def _suspend_modes() -> Iterator[None]:
    """Context of a trace within a pass: of the pass's modes and hooks none applies."""
    with ExitStack() as apart:
        apart.enter_context(_disable_current_modes())
        while torch._C._len_torch_function_stack():
            apart.enter_context(_pop_mode_temporarily())
        apart.enter_context(torch.enable_grad())
        apart.enter_context(saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor))
        yield


class _Passes:
    """Forward and backward for one kind of input: the flattened arguments, with `tensors` among their leaves."""

    def __init__(
        self,
        partitioned: PartitionedLayer,
        leaves: Sequence[Any],
        structure: Any,
        tensors: Sequence[DTensor],
        parameters: Mapping[str, DTensor],
    ) -> None:
        layer, self._mesh = partitioned.layer, partitioned.mesh
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            empty = iter([torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device) for tensor in tensors])
            filled = [next(empty) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
            twin = _copy_without_data(layer, parameters, mode)
            args, named = tree_unflatten(filled, structure)
            self._step = trace(twin, named or args)
            if self._step.drawn and hasattr(layer, "reseed"):
                raise PlanError(
                    "the model draws random numbers, such as a dropout's, on a mesh with a layout that was found, but "
                    f"is no chain of modules; {_ADVICE}"
                )
            with torch.no_grad():
                self._output_leaves, self._structure = tree_flatten(twin(*args, **named))
        self._partition = self._complete_partition(tensors, parameters)
        self._run = PartitionedStep(self._step, self._partition, GroupRank(partitioned.group))
        self._shapes = self._step.operators.tensors
        step = self._step
        self._updated = {name: tensor for name, tensor in step.updated.items() if tensor != step.buffers[name]}
        self._entering = (*step.inputs, *step.parameters.values())
        floating = (name for name in step.inputs if step.dtypes[name].is_floating_point)
        self._gradients = dict(zip(floating, step.input_gradients, strict=True)) | {
            step.parameters[name]: gradient for name, gradient in step.gradients.items()
        }
        forward = {*step.outputs, *self._updated.values()}
        computed = self._run.list_needed((), forward)
        steps = step.operators.steps
        # What follows from weights alone the backward computes again, so that a gathered weight is not kept.
        of_weights = {*step.parameters.values(), *step.constants.keys() - set(step.drawn)}
        for operator in steps[: len(step.calls)]:
            of_weights |= {operator.result} if {access.tensor for access in operator.operands} <= of_weights else set()
        available = {*(steps[number].result for number in computed), *step.drawn} - of_weights
        available |= {*self._entering, *step.buffers.values()}
        late = self._run.list_needed({*available, *step.tangents}, self._gradients.values())
        read = {access.tensor for number in late for access in steps[number].operands}
        saved = (read | set(self._gradients.values())) & available
        self._saved = tuple(sorted(saved))
        self._forward = forward | saved

    def _complete_partition(self, tensors: Sequence[DTensor], parameters: Mapping[str, DTensor]) -> Partition:
        step = self._step
        stored = {name: list_shards(tensor.placements) for name, tensor in zip(step.inputs, tensors, strict=True)}
        stored |= {step.parameters[name]: list_shards(tensor.placements) for name, tensor in parameters.items()}
        whole = (None,) * self._mesh.ndim
        fixed = {step.gradients[name]: stored[step.parameters[name]] for name in step.gradients}
        fixed |= dict.fromkeys((*step.buffers.values(), *step.updated.values()), whole) | stored
        alike = tuple(zip(step.outputs, step.tangents, strict=True))
        return complete_partition(replace(step.operators, alike=alike), self._mesh.size(), fixed)

    def __call__(
        self, tensors: Sequence[DTensor], parameters: Mapping[str, DTensor], buffers: Mapping[str, torch.Tensor]
    ) -> Any:
        ordered = (parameters[name] for name in self._step.parameters)
        inside = [tensor.to_local(grad_placements=tensor.placements) for tensor in (*tensors, *ordered)]
        parts = iter(_Apply.apply(self, buffers, *inside))  # type: ignore[no-untyped-call]
        names = iter(self._step.outputs)
        outputs = [
            self._wrap(next(names), next(parts)) if torch.is_tensor(value) else value for value in self._output_leaves
        ]
        return tree_unflatten(outputs, self._structure)

    def forward(
        self, buffers: Mapping[str, torch.Tensor], parts: Sequence[torch.Tensor]
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Returns the parts of the outputs, and those that the backward needs."""
        values = dict(zip(self._entering, parts, strict=True))
        values |= {self._step.buffers[name]: buffer for name, buffer in buffers.items()}
        results = self._run.run(values, self._forward)
        for name, tensor in self._updated.items():
            buffers[name].copy_(results[tensor])
        storages = {tensor.untyped_storage()._cdata for tensor in (*parts, *buffers.values())}
        outputs = []
        for name in self._step.outputs:
            storage = results[name].untyped_storage()._cdata
            outputs.append(results[name].clone() if storage in storages else results[name])
            storages.add(storage)
        return outputs, [results[name] for name in self._saved]

    def backward(
        self, saved: Sequence[torch.Tensor], tangents: Sequence[torch.Tensor], needs_gradient: Sequence[bool]
    ) -> list[torch.Tensor | None]:
        """Returns the gradients of what `forward` got, where they are wanted."""
        names = {name: self._gradients[name] for name, want in zip(self._entering, needs_gradient, strict=True) if want}
        values = dict(zip(self._saved, saved, strict=True)) | dict(zip(self._step.tangents, tangents, strict=True))
        results = self._run.run(values, names.values())
        return [
            self._return_gradient(name, names[name], results[names[name]]) if name in names else None
            for name in self._entering
        ]

    def _wrap(self, name: str, part: torch.Tensor) -> DTensor:
        return wrap_part(part, self._mesh, self._find_placements(name), self._shapes[name])

    def _find_placements(self, name: str) -> list[Placement]:
        return list_placements(cut.schemes[name] for cut in self._partition.cuts)

    def _return_gradient(self, name: str, gradient: str, part: torch.Tensor) -> torch.Tensor:
        """Returns a gradient where its tensor rests."""
        have, target = self._find_placements(gradient), self._find_placements(name)
        if have == target:
            return part
        return redistribute_in_steps(self._wrap(gradient, part), target).to_local()


class _Apply(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, passes: _Passes, buffers: Mapping[str, torch.Tensor], *parts: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        outputs, saved = passes.forward(buffers, parts)
        ctx.passes = passes
        ctx.save_for_backward(*saved)
        ctx.mark_non_differentiable(*(output for output in outputs if not output.is_floating_point()))
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *tangents: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return None, None, *ctx.passes.backward(ctx.saved_tensors, tangents, ctx.needs_input_grad[2:])


def _copy_without_data(layer: nn.Module, parameters: Mapping[str, DTensor], mode: FakeTensorMode) -> nn.Module:
    """Returns a copy of a layer whose parameters and buffers are whole and have no data."""
    memo: dict[int, Any] = {}
    if (reseed := getattr(layer, "reseed", None)) is not None:  # of a slice, before each of its calls
        memo[id(reseed)] = lambda *names: None
    originals = dict(layer.named_parameters())
    for name, parameter in parameters.items():
        empty = torch.empty(parameter.shape, dtype=parameter.dtype, device=parameter.device)
        memo[id(originals[name])] = nn.Parameter(empty, originals[name].requires_grad)
    for buffer in layer.buffers():
        memo[id(buffer)] = torch.empty(buffer.shape, dtype=buffer.dtype, device=buffer.device)
    with FakeCopyMode(mode):
        return copy.deepcopy(layer, memo)
