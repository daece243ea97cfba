"""Profiles a chain of layers without computing it: bytes from stand-ins, seconds from the roofline of a device.

The counterpart of `measure` for a model or a device that is not here. All tensors should be stand-ins, without numbers
(`pipedream.capture.stand_ins`): then nothing is allocated, and a layer costs some milliseconds, however large it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map

from pipedream.core.hardware.devices import Device
from pipedream.core.model.graph import LayerGraph
from pipedream.core.model.profile import LayerProfile, Profile
from pipedream.profiler.about import versions
from pipedream.profiler.alike import structure_of, value_shape
from pipedream.profiler.measure import Untouched, check_chain, choose_mode, dtype_name
from pipedream.profiler.op_costs import Lap, OpCosts, opaque_bytes
from pipedream.profiler.passes import Loss, Passes, shapes_of
from pipedream.profiler.sizes import largest_parameter_bytes, measure_sizes, parameter_bytes
from pipedream.profiler.update import (
    OptimizerFactory,
    UpdateCost,
    estimate_update,
    named_parameters,
)

__all__ = ["estimate"]


def estimate(
    layers: Sequence[nn.Module],
    graph: LayerGraph,
    sample: tuple[Any, ...],
    *,
    model_name: str,
    untouched: Untouched,
    device: Device,
    loss: Loss | None = None,
    optimizer: OptimizerFactory | None = None,
    autocast: torch.dtype | None = None,
) -> Profile:
    """Predicts what `measure` would find on a device, see there; layers that are alike are looked at once.

    Raises:
        ProfileError: a layer, the loss or the optimizer fails, or needs a tensor's value to go on.
    """
    check_chain(layers, graph, sample)
    costs = OpCosts(device)
    passes = Passes(layers, graph, loss, costs, torch.device("cpu"), autocast)
    fresh = tree_map(lambda leaf: leaf.detach().clone() if isinstance(leaf, torch.Tensor) else leaf, sample)
    with untouched(layers, [], 0), costs:
        choose_mode(layers)
        laps, arguments, hidden = _laps_of_layers(layers, passes, costs, fresh)
        if loss is not None:
            passes.timed_loss(arguments)
        loss_s = sum(costs.laps_s())
        sizes, loss_bytes = measure_sizes(
            layers, fresh, passes.run_layer, passes.run_loss if loss is not None else None
        )
        parameters = named_parameters(layers, graph)
        update = UpdateCost()
        if optimizer is not None and parameters:
            update = estimate_update(optimizer, parameters, costs)
    found = tuple(
        LayerProfile(
            forward_s=forward.seconds,
            backward_s=backward.seconds,
            output_bytes=size.output_bytes,
            parameter_bytes=own,
            activation_bytes=size.activation_bytes + more,
            arriving_bytes=size.arriving_bytes,
            leaving_bytes=size.leaving_bytes,
            # Temporaries inside of operations do not show; the gradients that enter and leave the backward do.
            working_bytes=size.output_bytes + entering,
            backward_bytes=size.output_bytes + entering + own,
            largest_parameter_bytes=largest,
            forward_flops=forward.flops,
            backward_flops=backward.flops,
            moved_bytes=forward.moved_bytes + backward.moved_bytes,
        )
        for (forward, backward), size, entering, own, largest, more in zip(
            laps,
            sizes,
            (0, *(size.output_bytes for size in sizes[:-1])),
            parameter_bytes(layers),
            largest_parameter_bytes(layers),
            hidden,
            strict=True,
        )
    )
    shapes = shapes_of(sample)
    return Profile(
        model=model_name,
        graph=graph,
        layers=found,
        batch=shapes[0][0],
        input_shapes=shapes,
        dtype=dtype_name(layers, autocast),
        device=device.name,
        update_s=update.update_s,
        copy_s=update.copy_s,
        optimizer=update.name,
        optimizer_bytes=update.state_bytes,
        loss_s=loss_s,
        loss_bytes=loss_bytes,
        versions=versions(),
        notes=tuple(_notes(device, laps, hidden, graph, update)),
    )


def _laps_of_layers(
    layers: Sequence[nn.Module], passes: Passes, costs: OpCosts, sample: tuple[Any, ...]
) -> tuple[list[tuple[Lap, Lap]], tuple[Any, ...], list[int]]:
    """Returns the laps of forward and backward of each layer, the last one's output, and bytes that do not show."""
    known: dict[Any, tuple[Lap, Lap, Any]] = {}
    laps, hidden = [], []
    arguments = sample
    for index, layer in enumerate(layers):
        key = structure_of(layer), value_shape(arguments)
        if key not in known:
            value = passes.timed_layer(index, arguments)
            forward, backward = costs.laps()
            known[key] = forward, backward, value
        forward, backward, value = known[key]
        laps.append((forward, backward))
        hidden.append(opaque_bytes(layer, arguments) if forward.opaque else 0)
        arguments = (value,)
    return laps, arguments, hidden


def _notes(
    device: Device, laps: Sequence[tuple[Lap, Lap]], hidden: Sequence[int], graph: LayerGraph, update: UpdateCost
) -> list[str]:
    notes = [
        f"computed from flops and bytes, not measured, for {device}",
        "the operations are those that torch chooses on a CPU; some that a GPU has as one kernel are several here",
        "not compared: that the layers, run one after the other, give the values of the model",
    ]
    if update.name:
        notes.append(f"the state of {update.name} is that of steps on tensors without numbers, one of each shape")
    names = [layer.name for layer, more in zip(graph.layers, hidden, strict=True) if more]
    if names:
        kinds = sorted({kind for forward, _ in laps for kind in forward.opaque})
        notes.append(
            f"what {', '.join(kinds)} keeps for its backward does not show and is counted by rule, in "
            f"{', '.join(names)}: measure such layers where their bytes matter"
        )
    return notes
