"""Measures a chain of layers: the Profile that the planner plans with.

After PipeDream, SOSP 2019, section 3.1, which runs a few hundred minibatches on one worker and notes, for
each layer, the time of forward and backward, the bytes of its output and of its weights.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from statistics import median, quantiles
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map

from pipedream.core.errors import ProfileError
from pipedream.core.model.graph import LayerGraph
from pipedream.core.model.profile import LayerProfile, Profile
from pipedream.profiler.about import device_text, versions
from pipedream.profiler.halved import fixed_s
from pipedream.profiler.passes import Loss, Passes, shapes_of
from pipedream.profiler.sizes import largest_parameter_bytes, measure_sizes, parameter_bytes
from pipedream.profiler.stopwatch import Stopwatch
from pipedream.profiler.update import (
    OptimizerFactory,
    UpdateCost,
    measure_update,
    named_parameters,
)

__all__ = ["Untouched", "check_chain", "choose_mode", "dtype_name", "measure"]

Untouched = Callable[[Sequence[nn.Module], list[int], int], AbstractContextManager[None]]


def measure(
    layers: Sequence[nn.Module],
    graph: LayerGraph,
    sample: tuple[Any, ...],
    *,
    model_name: str,
    untouched: Untouched,
    loss: Loss | None = None,
    optimizer: OptimizerFactory | None = None,
    device: str | torch.device = "cpu",
    warmup: int = 3,
    runs: int = 10,
    autocast: torch.dtype | None = None,
    seed: int = 0,
) -> Profile:
    """Measures every layer of a chain on one minibatch.

    The layers are left as they were: parameters, gradients, buffers, training flags and random generators. They
    run in training mode, unless some are in it already: then each in its own. The times hold for the threads
    that torch is set to.

    Args:
        layers: the modules, in run order; all parameters on `device`.
        graph: the chain that they make.
        sample: the model's positional inputs: one minibatch.
        model_name: written into the profile.
        untouched: (modules, CUDA devices, seed) -> a context in which the modules work on copies of their buffers
            and seeded generators, and after which all is as it was (`pipedream.capture.untouched`).
        loss: from the last layer's output to a tensor of one number, in the units of training.
        optimizer: from a list of (name, parameter) to an optimizer; timed on copies.
        device: where to measure.
        warmup: runs that are not counted.
        runs: runs behind each median.
        autocast: dtype of mixed precision for the forwards; None for none.
        seed: of the random numbers that layers draw.

    Raises:
        ProfileError: a layer, the loss or the optimizer fails, or the model is not where it should be.
    """
    place = torch.device(device)
    if runs < 1 or warmup < 0:
        raise ProfileError(f"at least one run and no negative warm-up are needed, found runs={runs}, warmup={warmup}")
    check_chain(layers, graph, sample)
    _check_places(layers, graph, place)
    sample = tree_map(lambda leaf: leaf.detach().to(place) if isinstance(leaf, torch.Tensor) else leaf, sample)
    indices = [_cuda_index(place)] if place.type == "cuda" else []
    watch = Stopwatch(place)
    passes = Passes(layers, graph, loss, watch, place, autocast)
    with untouched(layers, indices, seed):
        choose_mode(layers)
        fresh = tree_map(lambda leaf: leaf.clone() if isinstance(leaf, torch.Tensor) else leaf, sample)
        sizes, loss_bytes = measure_sizes(
            layers, fresh, passes.run_layer, passes.run_loss if loss is not None else None
        )
        laps_s = []
        for _ in range(warmup + runs):
            passes.timed_run(sample)
            laps_s.append(watch.laps_s())
        needs = passes.measured_needs(sample, sizes, loss_bytes)
        columns = list(zip(*laps_s[warmup:], strict=True))[: 2 * len(layers)]
        # The loss is of the whole batch; and a run that fails leaves laps behind.
        second = Stopwatch(place)
        parts = Passes(layers, graph, None, second, place, autocast)

        def laps_of(part: tuple[Any, ...]) -> list[float]:
            parts.timed_run(part)
            return second.laps_s()

        known = [(median(column), _spread(column)) for column in columns]
        fixed = fixed_s(laps_of, sample, shapes_of(sample)[0][0], known, warmup=warmup, runs=runs)
        parameters = named_parameters(layers, graph)
        update = UpdateCost()
        if optimizer is not None and parameters:
            update = measure_update(optimizer, parameters, watch, warmup=warmup, runs=runs)
    columns = list(zip(*laps_s[warmup:], strict=True))
    forward_s, backward_s = columns[0::2], columns[1::2]
    # The loss, if any, is the pair of columns after the last layer's, and the last of the needs.
    costs = tuple(
        LayerProfile(
            forward_s=median(forward),
            backward_s=median(backward),
            parameter_bytes=own,
            forward_spread_s=_spread(forward),
            backward_spread_s=_spread(backward),
            output_bytes=size.output_bytes,
            activation_bytes=size.activation_bytes,
            arriving_bytes=size.arriving_bytes,
            leaving_bytes=size.leaving_bytes,
            working_bytes=need.working_bytes,
            backward_bytes=need.backward_bytes,
            largest_parameter_bytes=largest,
            forward_fixed_s=fixed[2 * i],
            backward_fixed_s=fixed[2 * i + 1],
        )
        for i, (forward, backward, size, need, own, largest) in enumerate(
            zip(
                forward_s[: len(layers)],
                backward_s[: len(layers)],
                sizes,
                needs[: len(layers)],
                parameter_bytes(layers),
                largest_parameter_bytes(layers),
                strict=True,
            )
        )
    )
    shapes = shapes_of(sample)
    return Profile(
        model=model_name,
        graph=graph,
        layers=costs,
        batch=shapes[0][0],
        input_shapes=shapes,
        dtype=dtype_name(layers, autocast),
        device=device_text(place),
        runs=runs,
        update_s=update.update_s,
        copy_s=update.copy_s,
        optimizer=update.name,
        optimizer_bytes=update.state_bytes,
        loss_s=median(f + b for f, b in zip(forward_s[-1], backward_s[-1], strict=True)) if loss is not None else 0.0,
        loss_bytes=loss_bytes,
        loss_working_bytes=needs[-1].working_bytes,
        update_working_bytes=update.working_bytes,
        versions=versions(),
    )


def check_chain(layers: Sequence[nn.Module], graph: LayerGraph, sample: tuple[Any, ...]) -> None:
    """Refuses what is no chain with a minibatch.

    Raises:
        ProfileError: modules and layers differ in number, the graph branches, or the sample is no minibatch.
    """
    if len(layers) != len(graph.layers) or graph.edges != LayerGraph.chain(graph.layers).edges:
        raise ProfileError(
            f"a chain of as many modules as layers can be measured, found {len(layers)} modules, "
            f"{len(graph.layers)} layers and {len(graph.edges)} edges; give what capture gave"
        )
    shapes = shapes_of(sample) if isinstance(sample, tuple) else ()
    if not shapes or not shapes[0] or shapes[0][0] < 1:
        raise ProfileError(
            "the sample should be a tuple whose first tensor has the minibatch along dimension 0; for one "
            f"input x write (x,); found {type(sample).__name__} with tensors of shapes {list(map(list, shapes))}"
        )


def _check_places(layers: Sequence[nn.Module], graph: LayerGraph, device: torch.device) -> None:
    for layer, module in zip(graph.layers, layers, strict=True):
        for tensor in [*module.parameters(), *module.buffers()]:
            if tensor.is_meta:
                raise ProfileError(
                    f"layer {layer.name!r} should hold numbers to be measured, but is on the meta device; materialise "
                    f"the model first: model.to_empty(device={str(device)!r}), then initialise it; or profile it with "
                    "device='meta'"
                )
            if tensor.device.type != device.type or (device.index is not None and tensor.device.index != device.index):
                raise ProfileError(
                    f"layer {layer.name!r} should be measured on {device}, but is on {tensor.device}; "
                    f"move the model: model.to({str(device)!r})"
                )


def _cuda_index(device: torch.device) -> int:
    return torch.cuda.current_device() if device.index is None else device.index


def choose_mode(layers: Sequence[nn.Module]) -> None:
    """Puts the layers into training mode, unless some are in it already."""
    modules = [module for layer in layers for module in layer.modules()]
    if not any(module.training for module in modules):
        for module in modules:
            module.training = True


def _spread(values: Sequence[float]) -> float:
    if len(values) < 2:
        return 0.0
    first, _, third = quantiles(values, n=4, method="inclusive")
    return third - first


def dtype_name(layers: Sequence[nn.Module], autocast: torch.dtype | None) -> str:
    """Returns what the layers compute with: autocast's dtype, or that of the first parameter."""
    if autocast is not None:
        return str(autocast).removeprefix("torch.")
    floats = [p.dtype for layer in layers for p in layer.parameters() if p.is_floating_point()]
    return str(floats[0] if floats else torch.get_default_dtype()).removeprefix("torch.")
