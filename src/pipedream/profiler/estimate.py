"""Profiles a chain of layers without running it: bytes from stand-ins, seconds from a device's roofline.

With stand-ins for all tensors (`pipedream.capture.stand_ins`) nothing is allocated.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_map

from pipedream.core.hardware.devices import Device
from pipedream.core.model.graph import LayerGraph
from pipedream.core.model.profile import LayerProfile, Profile
from pipedream.profiler.environment import versions
from pipedream.profiler.measure import PreserveState, check_chain, choose_mode, dtype_name
from pipedream.profiler.op_costs import Lap, OpCosts, opaque_bytes
from pipedream.profiler.passes import LossFunction, Passes, Sample, list_shapes
from pipedream.profiler.sizes import Sizes, largest_parameter_bytes, measure_sizes, parameter_bytes, tied_parameters
from pipedream.profiler.update import (
    OptimizerFactory,
    UpdateCost,
    all_parameters,
    estimate_update,
    named_parameters,
)

_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size)


def estimate(
    layers: Sequence[nn.Module],
    graph: LayerGraph,
    sample: Sample,
    *,
    model_name: str,
    preserve_state: PreserveState,
    device: Device,
    loss: LossFunction | None = None,
    optimizer: OptimizerFactory | None = None,
    autocast: torch.dtype | None = None,
    samples: int | None = None,
) -> Profile:
    """Predicts what `measure` would find on a device, with the same arguments. Of identical layers one is looked at.

    Raises:
        ProfileError: a layer, the loss or the optimizer fails, or needs the value of a tensor.
    """
    sample = dict(sample) if isinstance(sample, Mapping) else sample  # which tree_map knows
    samples = check_chain(layers, graph, sample, samples)
    costs = OpCosts(device)
    passes = Passes(layers, graph, loss, costs, torch.device("cpu"), autocast)
    fresh = tree_map(lambda leaf: leaf.detach().clone() if isinstance(leaf, torch.Tensor) else leaf, sample)
    with preserve_state(layers, [], 0), costs:
        choose_mode(layers)
        laps, arguments, hidden = _time_layers(layers, passes, costs, fresh)
        if loss is not None:
            passes.time_loss(arguments)
        loss_s = sum(costs.laps_s())
        sizes, loss_bytes = measure_sizes(
            layers, fresh, passes.run_layer, passes.run_loss if loss is not None else None
        )
        parameters = named_parameters(layers, graph)
        update = UpdateCost()
        if optimizer is not None and parameters:
            update = estimate_update(optimizer, parameters, costs)
    return Profile(
        model=model_name,
        graph=graph,
        layers=_build_layer_profiles(layers, laps, sizes, hidden),
        batch=samples,
        input_shapes=list_shapes(sample),
        dtype=dtype_name(layers, autocast),
        device=device.name,
        update_s=update.update_s,
        copy_s=update.copy_s,
        optimizer=update.name,
        optimizer_bytes=update.state_bytes,
        loss_s=loss_s,
        loss_bytes=loss_bytes,
        versions=versions(),
        tied=tied_parameters(graph, all_parameters(layers, graph)),
        notes=tuple(_write_notes(device, laps, hidden, graph, update)),
    )


def _build_layer_profiles(
    layers: Sequence[nn.Module], laps: Sequence[tuple[Lap, Lap]], sizes: Sequence[Sizes], hidden: Sequence[int]
) -> tuple[LayerProfile, ...]:
    return tuple(
        LayerProfile(
            forward_s=forward.seconds,
            backward_s=backward.seconds,
            output_bytes=size.output_bytes,
            parameter_bytes=weights,
            activation_bytes=size.activation_bytes + more,
            arriving_bytes=size.arriving_bytes,
            leaving_bytes=size.leaving_bytes,
            # Temporaries inside operations are not visible.
            working_bytes=size.output_bytes + entering,
            backward_bytes=size.output_bytes + entering + weights,
            largest_parameter_bytes=largest,
            forward_flops=forward.flops,
            backward_flops=backward.flops,
            moved_bytes=forward.moved_bytes + backward.moved_bytes,
        )
        for (forward, backward), size, entering, weights, largest, more in zip(
            laps,
            sizes,
            (0, *(size.output_bytes for size in sizes[:-1])),
            parameter_bytes(layers),
            largest_parameter_bytes(layers),
            hidden,
            strict=True,
        )
    )


def _time_layers(
    layers: Sequence[nn.Module], passes: Passes, costs: OpCosts, sample: Sample
) -> tuple[list[tuple[Lap, Lap]], Sample, list[int]]:
    """Forward and backward laps, the last output, and the bytes that stand-ins do not show."""
    timed: dict[Any, tuple[Lap, Lap, Any]] = {}
    laps, hidden = [], []
    arguments: Sample = sample
    for index, layer in enumerate(layers):
        key = _identify_module(layer), _identify_value(arguments)
        if key not in timed:
            value = passes.time_layer(index, arguments)
            forward, backward = costs.laps()
            timed[key] = forward, backward, value
        forward, backward, value = timed[key]
        laps.append((forward, backward))
        hidden.append(opaque_bytes(layer, arguments) if forward.opaque else 0)
        arguments = (value,)
    return laps, arguments, hidden


def _write_notes(
    device: Device, laps: Sequence[tuple[Lap, Lap]], hidden: Sequence[int], graph: LayerGraph, update: UpdateCost
) -> list[str]:
    notes = [
        f"computed from flops and bytes, not measured, for {device}",
        "the operations are those that torch chooses on a CPU; some that are one kernel on a GPU are several here",
        "not checked: that the layers, run one after the other, give the values of the model",
    ]
    if update.name:
        notes.append(f"the state of {update.name} is that of steps on tensors without numbers, one of each shape")
    names = [layer.name for layer, more in zip(graph.layers, hidden, strict=True) if more]
    if names:
        kinds = sorted({kind for forward, _ in laps for kind in forward.opaque})
        notes.append(
            f"what {', '.join(kinds)} keeps for its backward is not visible and is counted by a rule, in "
            f"{', '.join(names)}: measure such layers if their bytes matter"
        )
    return notes


def _identify_module(module: nn.Module) -> Any:
    """A key that is equal only for modules that do the same operations on inputs of the same shape.

    A module with an attribute that is not plain equals only itself.
    """
    storages: dict[int, int] = {}
    return _describe_module(module, storages)


def _identify_value(value: Any) -> Any:
    leaves, spec = tree_flatten(value)
    return spec, tuple(
        _describe_tensor(leaf) if isinstance(leaf, torch.Tensor) else _describe_setting(leaf) for leaf in leaves
    )


def _describe_module(module: nn.Module, storages: dict[int, int]) -> Any:
    owned = (*module._parameters.items(), *module._buffers.items())
    tensors = tuple(
        (
            name,
            None
            if t is None
            else (_describe_tensor(t), storages.setdefault(t.untyped_storage()._cdata, len(storages))),
        )
        for name, t in owned
    )
    settings = tuple(
        (name, _describe_setting(value))
        for name, value in sorted(module.__dict__.items())
        if name not in ("_parameters", "_buffers", "_modules")
    )
    inner = tuple((n, None if m is None else _describe_module(m, storages)) for n, m in module._modules.items())
    return type(module), tensors, settings, inner


def _describe_setting(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return _describe_tensor(value)
    if type(value) in (list, tuple, set, frozenset):
        return type(value), tuple(_describe_setting(item) for item in value)
    if isinstance(value, dict):
        return type(value), tuple((_describe_setting(key), _describe_setting(item)) for key, item in value.items())
    return value if isinstance(value, _PLAIN) else id(value)


def _describe_tensor(tensor: torch.Tensor) -> Any:
    return tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.requires_grad
