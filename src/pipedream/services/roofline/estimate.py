"""Profiles a chain of layers without running it: bytes from stand-ins, seconds from a device's roofline.

With stand-ins for all tensors (`pipedream.capture.stand_ins`) nothing is allocated.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from math import prod
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten
from torch.utils.flop_counter import flop_registry

from pipedream.core.hardware.devices import Device
from pipedream.core.model.graph import LayerGraph
from pipedream.core.model.profile import LayerProfile, Profile
from pipedream.core.model.runtime_costs import RuntimeCosts
from pipedream.profiler.device import versions
from pipedream.profiler.measure import PreserveState, build_layer_profiles, check_chain, choose_mode, dtype_name
from pipedream.profiler.passes import LossFunction, Need, Passes, Sample, list_shapes
from pipedream.profiler.sizes import Sizes, parameter_bytes, tied_parameters
from pipedream.profiler.update import (
    NamedParameters,
    OptimizerFactory,
    UpdateCost,
    all_parameters,
    count_state_bytes,
    named_parameters,
    naming_failure,
    step_once,
)
from pipedream.tensors.trees import tree_leaves, tree_map

_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size)

_FREE = {
    *("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "device", "lift_fresh"),
    *("_local_scalar_dense", "sym_size", "sym_numel", "sym_stride", "sym_storage_offset", "is_same_size"),
}
# These read only the part of their first tensor that they return.
_GATHERS = {"embedding", "index_select", "gather", "index", "take", "nll_loss_forward", "nll_loss2d_forward"}
# These overwrite their first tensor without reading it.
_OVERWRITES = {"copy_", "fill_", "zero_", "normal_", "uniform_"}
OPAQUE = {"mkldnn_rnn_layer"}
"""Kernels that keep a workspace for their backward, whose size stand-ins do not show: those of LSTMs on a CPU."""


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
        sizes, loss_bytes = passes.measure_sizes(fresh)
        parameters = named_parameters(layers, graph)
        update = UpdateCost()
        if optimizer is not None and parameters:
            update = _estimate_update(optimizer, parameters, costs)
    return Profile(
        model=model_name,
        graph=graph,
        layers=_build_layer_profiles(layers, laps, sizes, hidden),
        batch=samples,
        input_shapes=list_shapes(sample),
        dtype=dtype_name(layers, autocast),
        device=device.name,
        **asdict(update),
        loss_s=loss_s,
        loss_bytes=loss_bytes,
        versions=versions(),
        tied=tied_parameters(graph, all_parameters(layers, graph)),
        runtime=RuntimeCosts(overlap_device=not device.name.startswith("cpu")),
        notes=tuple(_write_notes(device, laps, hidden, graph, update)),
    )


def _estimate_update(optimizer: OptimizerFactory, parameters: NamedParameters, watch: OpCosts) -> UpdateCost:
    """Adds up the costs of the parameters, each stepped alone; of equal shapes and dtypes only one is run.

    The factory gets all parameters, because an optimizer skips those without a gradient. Raises ProfileError.
    """
    copies = [(name, nn.Parameter(tensor.detach().clone())) for name, tensor in parameters]
    alike: dict[Any, list[nn.Parameter]] = {}
    for _, copy in copies:
        alike.setdefault((copy.shape, copy.stride(), copy.dtype), []).append(copy)
    update_s, copy_s, state_bytes = 0.0, 0.0, 0
    with naming_failure(len(copies)):
        stepper = optimizer(copies)
        for same in alike.values():
            step_once(stepper, same[:1], watch)  # creates its state
            step_once(stepper, same[:1], watch)
            same[0].grad = None
            update_s += len(same) * watch.laps_s()[-1]
            source = same[0].detach()
            watch.start()
            torch.empty_like(source).copy_(source)
            watch.stop()
            copy_s += len(same) * watch.laps_s()[-1]
            state_bytes += len(same) * count_state_bytes(stepper.state[same[0]])
    return UpdateCost(type(stepper).__name__, update_s, copy_s=copy_s, optimizer_bytes=state_bytes)


def _build_layer_profiles(
    layers: Sequence[nn.Module], laps: Sequence[tuple[Lap, Lap]], sizes: Sequence[Sizes], hidden: Sequence[int]
) -> tuple[LayerProfile, ...]:
    entering = (0, *(size.output_bytes for size in sizes[:-1]))
    # Temporaries inside operations are not visible.
    working = [size.output_bytes + more for size, more in zip(sizes, entering, strict=True)]
    needs = [
        Need(size, size + weights - frozen)
        for size, (weights, frozen) in zip(working, parameter_bytes(layers), strict=True)
    ]
    return build_layer_profiles(
        layers,
        [((forward.seconds,), (backward.seconds,)) for forward, backward in laps],
        [
            replace(size, activation_bytes=size.activation_bytes + more)
            for size, more in zip(sizes, hidden, strict=True)
        ],
        needs,
        {"flops": [lap.flops for both in laps for lap in both]},
        moved_bytes=[forward.moved_bytes + backward.moved_bytes for forward, backward in laps],
    )


def _time_layers(
    layers: Sequence[nn.Module], passes: Passes, costs: OpCosts, sample: Sample
) -> tuple[list[tuple[Lap, Lap]], Sample, list[int]]:
    """Forward and backward laps, the last output, and the bytes that stand-ins do not show."""
    timed: dict[Any, tuple[Lap, Lap, Any]] = {}
    laps, hidden = [], []
    arguments: Sample = sample
    for index, layer in enumerate(layers):
        leaves, spec = tree_flatten(arguments)
        # Of a module with an attribute that is not plain the key is its own.
        key = _describe_module(layer, {}), spec, tuple(map(_describe_setting, leaves))
        if key not in timed:
            value = passes.time_layer(index, arguments)
            forward, backward = costs.laps()
            timed[key] = forward, backward, value
        forward, backward, value = timed[key]
        laps.append((forward, backward))
        hidden.append(_count_opaque_bytes(layer, arguments) if forward.opaque else 0)
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
    if update.optimizer:
        notes.append(f"the state of {update.optimizer} is that of steps on tensors without numbers, one of each shape")
    names = [layer.name for layer, more in zip(graph.layers, hidden, strict=True) if more]
    if names:
        kinds = sorted({kind for forward, _ in laps for kind in forward.opaque})
        notes.append(
            f"what {', '.join(kinds)} keeps for its backward is not visible and is counted by a rule, in "
            f"{', '.join(names)}: measure such layers if their bytes matter"
        )
    return notes


def _describe_module(module: nn.Module, storages: dict[int, int]) -> Any:
    """A key that is equal only for modules that do the same operations on inputs of the same shape."""
    tensors = tuple(
        (name, _describe_tensor(tensor), storages.setdefault(tensor.untyped_storage()._cdata, len(storages)))
        for name, tensor in (*module._parameters.items(), *module._buffers.items())
        if tensor is not None
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


_PRODUCTS = {"mm", "addmm", "bmm", "baddbmm"}
_HALVES = {"float16", "bfloat16"}
_UNALIGNED = "a product of rows that do not begin at 16 bytes"
_GPU_SHARES = {
    "convolution": 0.5,
    "convolution_backward": 0.5,
    "native_batch_norm": 0.35,
    "native_batch_norm_backward": 0.22,
    "max_pool2d_with_indices": 0.6,
    "max_pool2d_with_indices_backward": 0.3,
    _UNALIGNED: 0.15,
}
"""Operation -> the share that it reaches of what others do, as VGG-16, ResNet-50 and GPT-2 medium with its 50,257 words
showed on an H200 (benchmarks/roofline)."""


@dataclass(frozen=True)
class Lap:
    """The cost of the operations of a lap; `opaque` names those that keep bytes which are not visible (`OPAQUE`)."""

    flops: int = 0
    moved_bytes: int = 0
    seconds: float = 0.0
    opaque: frozenset[str] = frozenset()

    def __add__(self, other: Lap) -> Lap:
        return Lap(
            self.flops + other.flops,
            self.moved_bytes + other.moved_bytes,
            self.seconds + other.seconds,
            self.opaque | other.opaque,
        )


class OpCosts(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A stopwatch that adds up the roofline costs of each operation that torch dispatches.

    Enter it as a context, inside the mode of the stand-ins. Flops come from torch's formulas
    (``torch.utils.flop_counter``) and rules for fused kernels, bytes from the distinct tensors read and written. Views
    cost nothing.
    """

    def __init__(self, device: Device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._device = device
        self._open = False
        self._lap = Lap()
        self._laps: list[Lap] = []

    def start(self) -> None:
        self._open, self._lap = True, Lap()

    def stop(self) -> None:
        self._laps.append(self._lap)
        self._open = False

    def laps(self) -> list[Lap]:
        laps, self._laps = self._laps, []
        return laps

    def laps_s(self) -> list[float]:
        return [lap.seconds for lap in self.laps()]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if self._open:
            self._lap += _measure_op(func, args, kwargs or {}, out, self._device)
        return out


def _count_opaque_bytes(module: torch.nn.Module, arguments: Any) -> int:
    """Returns the bytes of the workspaces that LSTMs keep, by a rule of thumb.

    16 numbers for each step, sample and unit of each layer and direction: 15.4 to 18.6 were measured on CPUs (oneDNN);
    cuDNN keeps less.
    """
    first = next((leaf for leaf in tree_leaves(arguments) if isinstance(leaf, torch.Tensor)), None)
    total = 0
    for inner in module.modules():
        if isinstance(inner, torch.nn.LSTM) and first is not None:
            units = inner.hidden_size * inner.num_layers * (1 + inner.bidirectional)
            total += 16 * prod(first.shape[:2]) * units * next(inner.parameters()).itemsize
    return total


def _measure_op(func: Any, args: Any, kwargs: Any, out: Any, device: Device) -> Lap:
    name = func._schema.name.partition("::")[2]
    if name in _FREE:
        return Lap()
    inputs, outputs = _list_tensors((args, kwargs)), _list_tensors(out)
    if not outputs or (not func._schema.is_mutable and _list_storages(outputs) <= _list_storages(inputs)):
        return Lap()  # a view
    read = inputs
    if name in _GATHERS:
        read = inputs[1:] + outputs
    elif name in _OVERWRITES:
        read = inputs[1:]
    moved = _count_bytes(read) + _count_bytes(outputs)
    flops = _count_flops(func, name, args, kwargs, out)
    draws = outputs[0].numel() if torch.Tag.nondeterministic_seeded in func.tags else 0
    dtype, share = _choose_rate(name, [t for t in (*inputs, *outputs) if t.is_floating_point()], device)
    seconds = device.op_s(flops, moved, dtype, draws=draws, share=share)
    return Lap(flops, moved, seconds, frozenset({name} if name.removesuffix("_backward") in OPAQUE else ()))


def _choose_rate(name: str, tensors: Sequence[torch.Tensor], device: Device) -> tuple[str, float]:
    """Returns the dtype of an operation's rate, and the share of what programs reach that it reaches."""
    dtype = str(tensors[0].dtype).removeprefix("torch.") if tensors else "float32"
    if not device.has_tensor_cores:
        return dtype, 1.0
    if name.startswith("convolution") and dtype == "float32":
        runs_in_tf32 = torch.backends.cudnn.allow_tf32 and "tf32" in device.flops_per_s
        return ("tf32", _GPU_SHARES[name]) if runs_in_tf32 else (dtype, 1.0)
    if name in _PRODUCTS and dtype in _HALVES:
        rows = [tensor.shape[-1] * tensor.element_size() for tensor in tensors if tensor.ndim > 1]
        name = _UNALIGNED if any(row % 16 for row in rows) else name
    return dtype, _GPU_SHARES.get(name, 1.0)


def _count_flops(func: Any, name: str, args: Any, kwargs: Any, out: Any) -> int:
    if name == "_scaled_dot_product_flash_attention_for_cpu":
        # Two products of the scores' size; if causal, the kernel skips the half above the diagonal, which torch's own
        # formula (from 2.15 on) counts.
        return _count_attention_flops(args[0], args[1], 2, kwargs.get("is_causal", args[4] if len(args) > 4 else False))
    if name == "_scaled_dot_product_flash_attention_for_cpu_backward":
        return _count_attention_flops(args[1], args[2], 5, kwargs.get("is_causal", args[7] if len(args) > 7 else False))
    if name in ("mkldnn_rnn_layer", "mkldnn_rnn_layer_backward"):
        layer = [t for t in args if isinstance(t, torch.Tensor)]
        steps = prod(layer[0].shape[:-1])
        # Input and hidden weights once for each step; twice that in the backward.
        return 2 * steps * (layer[1].numel() + layer[2].numel()) * (2 if name.endswith("backward") else 1)
    formula = flop_registry.get(func._overloadpacket)
    return 0 if formula is None else int(formula(*args, **kwargs, out_val=out))


def _count_attention_flops(query: torch.Tensor, key: torch.Tensor, products: int, is_causal: bool) -> int:
    batch, heads, length, width = query.shape
    return products * 2 * batch * heads * length * key.shape[2] * width // (2 if is_causal else 1)


def _list_tensors(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def _list_storages(tensors: Iterable[torch.Tensor]) -> set[int]:
    return {tensor.untyped_storage()._cdata for tensor in tensors}


def _count_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """The bytes of distinct tensors; an expanded one counts only what is stored."""
    distinct = {
        (t.untyped_storage()._cdata, t.storage_offset(), t.shape, t.stride()): min(
            t.numel() * t.itemsize, t.untyped_storage().nbytes()
        )
        for t in tensors
    }
    return sum(distinct.values())
