"""Measures a chain of layers: the Profile that the planner plans with (PipeDream, SOSP 2019, section 3.1)."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from functools import partial
from statistics import median, quantiles
from typing import Any

import torch
from torch import nn

from pipedream.core.errors import ProfileError
from pipedream.core.model.graph import LayerGraph
from pipedream.core.model.profile import LayerProfile, Profile
from pipedream.core.progress import progress
from pipedream.profiler.device import name_device, versions
from pipedream.profiler.passes import LossFunction, Need, Passes, Sample, list_shapes, measure_launch_seconds
from pipedream.profiler.sizes import Sizes, largest_parameter_bytes, list_matrices, parameter_bytes, tied_parameters
from pipedream.profiler.stopwatch import HostStopwatch, Stopwatch
from pipedream.profiler.update import (
    OptimizerFactory,
    SchedulerFactory,
    UpdateCost,
    all_parameters,
    measure_update,
    named_parameters,
)
from pipedream.tensors.trees import tree_map

PreserveState = Callable[[Sequence[nn.Module], list[int], int], AbstractContextManager[None]]


def part_of(sample: tuple[Any, ...], batch: int, size: int) -> tuple[Any, ...]:
    """Returns a sample with the first rows of each tensor that has the batch along dimension 0."""

    def cut(leaf: Any) -> Any:
        has_batch = isinstance(leaf, torch.Tensor) and leaf.dim() > 0 and leaf.shape[0] == batch
        return leaf[:size] if has_batch else leaf

    part: tuple[Any, ...] = tree_map(cut, sample)
    return part


def measure(
    layers: Sequence[nn.Module],
    graph: LayerGraph,
    sample: Sample,
    *,
    model_name: str,
    preserve_state: PreserveState,
    loss: LossFunction | None = None,
    optimizer: OptimizerFactory | None = None,
    scheduler: SchedulerFactory | None = None,
    device: str | torch.device = "cpu",
    warmup: int = 3,
    runs: int = 10,
    autocast: torch.dtype | None = None,
    seed: int = 0,
    samples: int | None = None,
    parts: int = 2,
    part_of: Callable[[Any, int, int], Any] = part_of,
    call: Callable[[Callable[..., Any], Sample], Any] | None = None,
    enter_backward: Callable[[], AbstractContextManager[None]] = nullcontext,
    reason: str = "",
) -> Profile:
    """Measures every layer of a chain on one minibatch, leaving its state and the random generators unchanged.

    The layers run in training mode, unless some are in it already: then each runs in its own mode. The times hold for
    torch's number of threads.

    Args:
        layers: in run order; all parameters are on `device`.
        sample: one minibatch: positional arguments, or a mapping of keyword arguments.
        preserve_state: (modules, CUDA devices, seed) -> a context, see `pipedream.capture.preserve_state`.
        loss: from the last layer's output to a tensor of one number.
        optimizer: from (name, parameter) pairs to an optimizer, which is timed on copies.
        scheduler: from the optimizer to a learning-rate schedule, which steps with it.
        warmup: runs that do not count.
        runs: runs that count; times are their medians.
        autocast: of the forwards; None: no autocast.
        samples: in the minibatch; by default the first dimension of the first tensor.
        parts: 1 / parts of the sample is measured as well, for minibatches that are split (`Profile.in_parts`).
        part_of: (sample, its number of samples, fewer) -> the first of them.
        call, enter_backward: see `Passes`.
        reason: for another try, which its progress says.

    Raises:
        ProfileError: a layer, the loss or the optimizer fails, or the model is not on `device`.
    """
    device = torch.device(device)
    if runs < 1 or warmup < 0:
        raise ProfileError(f"runs={runs} and warmup={warmup} were given; give at least 1 run and 0 runs of warm-up")
    sample = dict(sample) if isinstance(sample, Mapping) else sample  # which tree_map knows
    samples = check_chain(layers, graph, sample, samples)
    _check_places(layers, graph, device)
    sample = tree_map(lambda leaf: leaf.detach().to(device) if isinstance(leaf, torch.Tensor) else leaf, sample)
    indices = [torch.cuda.current_device() if device.index is None else device.index] if device.type == "cuda" else []
    make_passes = partial(
        Passes, layers, graph, device=device, autocast=autocast, call=call, enter_backward=enter_backward
    )
    passes = make_passes(loss, Stopwatch(device, without_launches=True))
    with (
        preserve_state(layers, indices, seed),
        progress(f"profiling {model_name}{reason}", 2 * (warmup + runs)) as advance,
    ):
        choose_mode(layers)
        fresh = tree_map(lambda leaf: leaf.clone() if isinstance(leaf, torch.Tensor) else leaf, sample)
        sizes, loss_bytes = passes.measure_sizes(fresh)
        laps_s, update, parameters = list[list[float]](), UpdateCost(), named_parameters(layers, graph)

        def run_passes() -> None:
            laps_s.append(_time_run(passes, advance, sample))

        if optimizer is not None and parameters:
            watch, counts = Stopwatch(device), {"warmup": warmup, "runs": runs}
            update = measure_update(optimizer, parameters, watch, run_passes, scheduler=scheduler, **counts)
        else:
            for _ in range(warmup + runs):
                run_passes()
        del laps_s[:warmup]
        needs = passes.measure_needs(sample, sizes, loss_bytes)
        # Without the loss, which takes the whole batch. A failed run leaves laps in the stopwatch.
        time_part = partial(_time_run, make_passes(None, Stopwatch(device, without_launches=True)), advance)
        columns = list(zip(*laps_s, strict=True))  # forwards and backwards of each layer, then of the loss
        whole = [(median(column), _spread(column)) for column in columns[: 2 * len(layers)]]
        fixed = fixed_s(time_part, sample, samples, whole, warmup=warmup, runs=runs, parts=parts, part_of=part_of)
        of_passes = {"fixed_s": fixed, "launch_s": [0.0] * len(laps_s[0])}
        if device.type == "cuda":
            of_passes["launch_s"] = measure_launch_seconds(make_passes(loss, HostStopwatch(device)), sample, runs)
    laps = list(zip(columns[0::2], columns[1::2], strict=True))
    loss_laps = laps.pop() if loss is not None else None
    loss_launch_s = sum(of_passes["launch_s"][2 * len(layers) :])
    return Profile(
        model=model_name,
        graph=graph,
        layers=build_layer_profiles(layers, laps, sizes, needs, of_passes),
        batch=samples,
        input_shapes=list_shapes(sample),
        dtype=dtype_name(layers, autocast),
        device=name_device(device),
        runs=runs,
        parts=parts,
        **asdict(update),
        loss_s=max(loss_launch_s, 0.0 if loss_laps is None else median(map(sum, zip(*loss_laps, strict=True)))),
        loss_bytes=loss_bytes,
        loss_temporary_bytes=needs[-1].temporary_bytes,
        versions=versions(),
        tied=tied_parameters(graph, all_parameters(layers, graph)),
    )


def _time_run(passes: Passes, advance: Callable[[], None], sample: Sample) -> list[float]:
    """Returns the seconds of each lap of a run."""
    laps_s = passes.time_run(sample)
    advance()
    return laps_s


def build_layer_profiles(
    layers: Sequence[nn.Module],
    laps: Sequence[tuple[Sequence[float], Sequence[float]]],
    sizes: Sequence[Sizes],
    needs: Sequence[Need],
    of_passes: Mapping[str, Sequence[float]],
    **columns: Sequence[Any],
) -> tuple[LayerProfile, ...]:
    """Returns the profiles of layers.

    Args:
        laps: seconds of each layer's forwards and backwards.
        of_passes: ends of the names of fields for the forward and the backward -> each layer's two values in turn.
        columns: further fields of `LayerProfile`, each with a value for every layer.
    """
    for name, values in of_passes.items():
        columns |= {f"forward_{name}": values[0::2], f"backward_{name}": values[1::2]}
    parameters = parameter_bytes(layers), largest_parameter_bytes(layers), list_matrices(layers)
    rows = zip(laps, sizes, needs[: len(layers)], *parameters, strict=True)
    return tuple(
        LayerProfile(
            forward_s=median(forward),
            backward_s=median(backward),
            parameter_bytes=weights,
            frozen_bytes=frozen,
            forward_spread_s=_spread(forward),
            backward_spread_s=_spread(backward),
            output_bytes=size.output_bytes,
            activation_bytes=size.activation_bytes,
            arriving_bytes=size.arriving_bytes,
            leaving_bytes=size.leaving_bytes,
            temporary_bytes=need.temporary_bytes,
            backward_bytes=need.backward_bytes,
            largest_parameter_bytes=largest,
            matrices=matrices,
            **{name: column[index] for name, column in columns.items()},
        )
        for index, ((forward, backward), size, need, (weights, frozen), largest, matrices) in enumerate(rows)
    )


def fixed_s(
    run: Callable[[Any], Sequence[float]],
    sample: Any,
    batch: int,
    whole: Sequence[tuple[float, float]],
    *,
    warmup: int,
    runs: int,
    parts: int = 2,
    part_of: Callable[[Any, int, int], Any] = part_of,
) -> list[float]:
    """Returns the part of each lap's seconds that a smaller batch does not save; all 0 if the layers cannot run one.

    With t(n) = fixed + n k for n samples, measuring h of them gives fixed = (n t(h) - h t(n)) / (n - h). It is negative
    where a large batch takes longer per sample, because its activations do not fit into the caches. What is not greater
    than the spread counts as 0.

    Args:
        run: runs a sample and returns its laps.
        whole: median and spread of each lap of the whole batch.
        parts: the smaller batch has 1 / parts of the samples.
        part_of: (sample, its number of samples, fewer) -> the first of them.
    """
    size = batch // parts
    if not size:
        return [0.0] * len(whole)
    small = part_of(sample, batch, size)
    try:
        laps = [run(small) for _ in range(warmup + runs)][warmup:]
    except ProfileError:  # a layer works with this batch size only
        return [0.0] * len(whole)
    fixed_seconds = []
    for column, (seconds, spread_s) in zip(zip(*laps, strict=True), whole, strict=True):
        fixed = (batch * median(column) - size * seconds) / (batch - size)
        fixed_seconds.append(min(fixed, seconds) if abs(fixed) > spread_s else 0.0)
    return fixed_seconds


def check_chain(layers: Sequence[nn.Module], graph: LayerGraph, sample: Sample, samples: int | None = None) -> int:
    """Checks that the layers form a chain, and that the sample is a minibatch; returns its number of samples.

    Raises ProfileError.
    """
    if len(layers) != len(graph.layers) or graph.edges != LayerGraph.chain(graph.layers).edges:
        raise ProfileError(
            f"only a chain with one module for each layer can be measured, found {len(layers)} modules, "
            f"{len(graph.layers)} layers and {len(graph.edges)} edges; give what capture returned"
        )
    shapes = list_shapes(sample) if isinstance(sample, (tuple, Mapping)) else ()
    if samples is None:
        samples = shapes[0][0] if shapes and shapes[0] else 0
    if not shapes or samples < 1:
        raise ProfileError(
            "the sample should be a tuple whose first tensor has the minibatch along dimension 0 (or batch_dim), or a "
            f"mapping; for one input x write (x,); found {type(sample).__name__} with tensors of shapes "
            f"{list(map(list, shapes))}"
        )
    return samples


def _check_places(layers: Sequence[nn.Module], graph: LayerGraph, device: torch.device) -> None:
    for layer, module in zip(graph.layers, layers, strict=True):
        for tensor in [*module.parameters(), *module.buffers()]:
            if tensor.is_meta:
                raise ProfileError(
                    f"layer {layer.name!r} should hold numbers to be measured, but is on the meta device; materialise "
                    f"the model first: model.to_empty(device={str(device)!r}), then initialise it; or profile it with "
                    "device='meta'; after a Pipeline on several processes, which leaves each its own stages' weights, "
                    "build it again and load them (state_dict, or a checkpoint)"
                )
            if tensor.device.type != device.type or (device.index is not None and tensor.device.index != device.index):
                raise ProfileError(
                    f"layer {layer.name!r} should be measured on {device}, but is on {tensor.device}; "
                    f"move the model: model.to({str(device)!r})"
                )


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
    """Returns autocast's dtype, or that of the first parameter."""
    if autocast is not None:
        return str(autocast).removeprefix("torch.")
    floats = [p.dtype for layer in layers for p in layer.parameters() if p.is_floating_point()]
    return str(floats[0] if floats else torch.get_default_dtype()).removeprefix("torch.")
