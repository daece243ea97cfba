"""Finds the chain of modules that a model consists of.

A module is replaced by the modules that it calls if each of these gets exactly what the one before returned. Any other
module stays one layer, and so does one with parameters, buffers or hooks of its own, which its children would lose.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch.nn.modules.batchnorm import _NormBase
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map

from pipedream.capture.captured import Captured
from pipedream.capture.preserve_state import preserve_state, preserve_weights
from pipedream.capture.stand_ins import is_stand_in
from pipedream.capture.structure import walk
from pipedream.capture.trace import TracedCall, trace, why_not_a_chain
from pipedream.core.errors import CaptureError
from pipedream.core.model.graph import Layer, LayerGraph, Value, ValueSite
from pipedream.core.user_code import note_module, with_place

_DISTRIBUTED = ("DistributedDataParallel", "DataParallel", "FullyShardedDataParallel", "FSDPModule")
_ADVICE = (
    "write that step as a module of its own (nn.Flatten, nn.ReLU, ...) so that the forward only calls modules "
    "one after the other, or put the modules around it into one module"
)


def capture_chain(model: nn.Module, sample: tuple[Any, ...]) -> Captured:
    """Captures a model that is a chain. Raises CaptureError with the place and what to change."""
    compiled = next((name for name, module in model.named_modules() if _is_compiled(module)), None)
    if compiled is not None:
        raise CaptureError(f"the module {compiled!r} is compiled and cannot be looked into")
    kind = type(model).__name__
    if any(parameter.is_meta for parameter in model.parameters()):
        sample = tree_map(lambda leaf: leaf.to("meta") if isinstance(leaf, torch.Tensor) else leaf, sample)
    devices = cuda_devices(model, sample)
    names = {id(module): name or kind for name, module in model.named_modules()}
    reasons = {id(module): reason for module in model.modules() if (reason := _explain_keeping_whole(module))}
    orders = []
    calls = [_trace_in_mode(model, sample, training, devices) for training in (True, False)]
    for call in calls:
        _note_reasons(call, names, reasons)
    if id(model) in reasons and any(call.calls for call in calls):
        raise CaptureError(
            f"the model {kind} should be a chain of modules to be cut, but {reasons[id(model)]}; {_ADVICE}"
        )
    orders = [_unfold(call, reasons) for call in calls]
    layers = orders[0]
    if list(map(id, layers)) != list(map(id, orders[1])):
        raise CaptureError(
            f"the model {kind} runs {len(layers)} layers in training and {len(orders[1])}, or others, in evaluation; "
            "it should run the same in both, so put what differs into one module"
        )
    captured = Captured(LayerGraph.chain(_describe(model, layers, names), *tied_layers(layers)), tuple(layers))
    if not any(map(is_stand_in, [*tree_leaves(sample), *model.parameters(), *model.buffers()])):
        _check_equal_to_model(model, captured, sample, devices)
    return captured


def find_layers(model: nn.Module, names: Sequence[str]) -> Captured:
    """Finds the layers of a chain by the names that a profile or a plan lists. Raises CaptureError."""
    layers = []
    modules = dict(model.named_modules())
    for name in names:
        path = name.split("@")[0]
        if path not in modules and not (path == type(model).__name__ and len(names) == 1):
            raise CaptureError(
                f"the plan has a layer {name!r}, but the model {type(model).__name__} has no module of that name; "
                "plan again from this model's profile"
            )
        layers.append(modules.get(path, model))
    paths = {id(module): name or type(model).__name__ for name, module in model.named_modules()}
    return Captured(LayerGraph.chain(_describe(model, layers, paths), *tied_layers(layers)), tuple(layers))


def chain_values(captured: Captured, sample: tuple[Any, ...]) -> tuple[Value, ...]:
    """Returns what crosses the cuts of a chain: what each layer returns. Moments are the layers' indices."""
    values = []
    with preserve_state(captured.layers, cuda_devices(nn.ModuleList(captured.layers), sample)), torch.enable_grad():
        passed = tree_map(lambda leaf: leaf.detach().clone() if isinstance(leaf, torch.Tensor) else leaf, sample)
        for i, layer in enumerate(captured.layers[:-1]):
            passed = layer(*passed) if i == 0 else layer(passed)
            name = captured.graph.layers[i].name
            for path, leaf in walk(passed):
                if isinstance(leaf, torch.Tensor):
                    values.append(Value(leaf.nbytes, leaf.requires_grad, i, i + 1, (ValueSite(name, "out", path, i),)))
    return tuple(values)


def tied_layers(layers: Sequence[nn.Module]) -> tuple[tuple[tuple[int, ...], ...], tuple[tuple[int, ...], ...]]:
    """Returns the groups of layers that share a trained parameter or state, and those of them that share state.

    To share is to use the same storage. State means running statistics, or a module with buffers that runs twice; other
    shared buffers are constants (masks, tables) and tie nothing. Different parameters of one storage count as state:
    their gradients cannot be summed.
    """
    users: dict[int, set[int]] = {}
    views: dict[int, set[int]] = {}
    moving: dict[int, set[int]] = {}
    for index, layer in enumerate(layers):
        for parameter in (p for p in layer.parameters() if p.requires_grad):
            storage = parameter.untyped_storage()._cdata
            users.setdefault(storage, set()).add(index)
            views.setdefault(storage, set()).add(id(parameter))
        for module in layer.modules():
            if any(buffer is not None for buffer in module._buffers.values()):
                moving.setdefault(id(module), set()).add(index)
            if isinstance(module, _NormBase):
                for statistics in (module.running_mean, module.running_var):
                    if statistics is not None:
                        moving.setdefault(statistics.untyped_storage()._cdata, set()).add(index)
    apart = [group for storage, group in users.items() if len(views[storage]) > 1]
    whole = {tuple(sorted(group)) for group in (*moving.values(), *apart) if len(group) > 1}
    groups = whole | {tuple(sorted(group)) for group in users.values() if len(group) > 1}
    return tuple(sorted(groups)), tuple(sorted(whole))


def check_model(model: nn.Module) -> None:
    """Raises a CaptureError for a model that cannot be looked into, or that another tool distributes."""
    for name, module in model.named_modules():
        where = f"the module {name!r}" if name else f"the model {type(model).__name__}"
        if isinstance(module, torch.jit.ScriptModule):
            raise CaptureError(f"{where} is a TorchScript module and cannot be looked into; pass the eager module")
        wrapper = next((kind.__name__ for kind in type(module).__mro__ if kind.__name__ in _DISTRIBUTED), None)
        if wrapper is not None:  # found by name: torch.distributed.fsdp takes long to import
            how = "sharded by fully_shard (an FSDPModule)" if wrapper == "FSDPModule" else f"wrapped in {wrapper}"
            raise CaptureError(
                f"{where} is {how}, which would synchronise by itself; pass the plain module: the plan decides "
                "which stages are replicated"
            )
    if _is_compiled(model):
        raise CaptureError(
            f"the model {type(model).__name__} is compiled as a whole and cannot be looked into; pass the module "
            "before torch.compile, and compile=True to compile what lies within a stage"
        )
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if nn.parameter.is_lazy(tensor):
            raise CaptureError(f"parameter {name!r} has no shape yet (a lazy module); run the model once before")


def _is_compiled(module: nn.Module) -> bool:
    return module._compiled_call_impl is not None or "_orig_mod" in module._modules


def cuda_devices(model: nn.Module, sample: Any) -> list[int]:
    """Returns the indices of the devices on which the model or the sample has tensors."""
    tensors = [*model.parameters(), *model.buffers(), *tree_leaves(sample)]
    indices = {t.device.index for t in tensors if isinstance(t, torch.Tensor) and t.device.type == "cuda"}
    return sorted(index for index in indices if index is not None)


def _explain_keeping_whole(module: nn.Module) -> str:
    hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    if any(hooks):
        return "it has hooks of its own, which its children do not run"
    for word, slots in (("parameter", module._parameters), ("buffer", module._buffers)):
        names = [name for name, tensor in slots.items() if tensor is not None]
        if names:
            return f"it holds the {word} {names[0]!r} itself, outside any of its modules"
    return ""


def _trace_in_mode(model: nn.Module, sample: tuple[Any, ...], training: bool, devices: list[int]) -> TracedCall:
    with preserve_state([model], devices), preserve_weights(model):
        for module in model.modules():
            module.training = training  # a user's own train() may have side effects
        copies: dict[int, torch.Tensor] = {}
        try:
            return trace(model, tree_map(lambda leaf: _copy(leaf, copies), sample))
        except Exception as error:
            raise does_not_run(model, training, error) from error


def does_not_run(model: nn.Module, training: bool, error: Exception) -> CaptureError:
    """Returns the error to raise when the forward raised one on the sample."""
    advice = (
        "it depends on the value of a tensor, and here tensors have none: profile it on a device that computes"
        if isinstance(error, DataDependentOutputException | DynamicOutputShapeException)
        else "give a sample of the shape, dtype and device that it takes"
    )
    note_module(error, model.named_modules())
    return CaptureError(
        f"the forward of {type(model).__name__} should run on the sample, but in "
        f"{'training' if training else 'evaluation'} mode it raised {with_place(error)}; {advice}"
    )


def _copy(leaf: Any, copies: dict[int, torch.Tensor]) -> Any:
    # The forward may write into its input.
    if not isinstance(leaf, torch.Tensor):
        return leaf
    return copies.setdefault(id(leaf), leaf.detach().clone())


def _note_reasons(call: TracedCall, names: dict[int, str], reasons: dict[int, str]) -> None:
    if call.calls and id(call.module) not in reasons:
        reason = why_not_a_chain(call, names)
        if reason:
            reasons[id(call.module)] = reason
    for inner in call.calls:
        _note_reasons(inner, names, reasons)


def _unfold(call: TracedCall, reasons: dict[int, str]) -> list[nn.Module]:
    if not call.calls or id(call.module) in reasons:
        return [call.module]
    return [module for inner in call.calls for module in _unfold(inner, reasons)]


def _describe(model: nn.Module, layers: list[nn.Module], names: dict[int, str]) -> tuple[Layer, ...]:
    owned: dict[int, list[str]] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        for slots in (module._parameters, module._buffers):
            for name, tensor in slots.items():
                if tensor is not None:
                    owned.setdefault(id(module), []).append(f"{path}.{name}" if path else name)
    seen: dict[int, int] = {}
    described = []
    for layer in layers:
        seen[id(layer)] = count = seen.get(id(layer), 0) + 1
        name = names[id(layer)] + (f"@{count}" if count > 1 else "")
        parameters = tuple(text for module in layer.modules() for text in owned.get(id(module), ()))
        described.append(Layer(name, type(layer).__name__, parameters))
    return tuple(described)


def _check_equal_to_model(model: nn.Module, captured: Captured, sample: tuple[Any, ...], devices: list[int]) -> None:
    """Compares the outputs and buffers of the model and the layers bitwise, in training and in evaluation mode.

    Gradients need no comparison: tensors are passed on as the same objects, so the autograd graph is the same.
    """

    def run_layers(*inputs: Any) -> Any:
        value = captured.layers[0](*inputs)
        for layer in captured.layers[1:]:
            value = layer(value)
        return value

    kind = type(model).__name__
    for training in (True, False):
        mode = "training" if training else "evaluation"
        expected, wanted_buffers = _run_copy(model, model, sample, training, devices)
        try:
            actual, found_buffers = _run_copy(model, run_layers, sample, training, devices)
        except Exception as error:
            raise CaptureError(
                f"the layers of {kind}, run one after the other, should give what the model gives, but in {mode} mode "
                f"they raised {type(error).__name__}: {error}; the forward does something besides calling its "
                "modules: put it into a module"
            ) from error
        if not _is_equal(expected, actual):
            raise CaptureError(
                f"the layers of {kind}, run one after the other, should give what the model gives, but in {mode} mode "
                "their output differs; the forward changes tensors or modules in a way that cannot be seen from "
                "outside (writes through .data, sets attributes, draws random numbers): put it into a module"
            )
        for (name, a), (_, b) in zip(wanted_buffers, found_buffers, strict=True):
            if not _is_equal(a, b):
                raise CaptureError(
                    f"the layers of {kind}, run one after the other, should leave the buffers that the model leaves, "
                    f"but in {mode} mode {name!r} differs; the forward writes it outside the module that "
                    "holds it: write it there"
                )


def _run_copy(
    model: nn.Module, forward: Callable[..., Any], sample: tuple[Any, ...], training: bool, devices: list[int]
) -> tuple[Any, list[tuple[str, torch.Tensor]]]:
    with preserve_state([model], devices), preserve_weights(model), torch.no_grad():
        for module in model.modules():
            module.training = training
        inputs = tree_map(lambda leaf: leaf.detach().clone() if isinstance(leaf, torch.Tensor) else leaf, sample)
        return forward(*inputs), list(model.named_buffers())


def _is_equal(expected: Any, actual: Any) -> bool:
    a, spec_a = tree_flatten(expected)
    b, spec_b = tree_flatten(actual)
    return spec_a == spec_b and all(_is_equal_leaf(x, y) for x, y in zip(a, b, strict=True))


def _is_equal_leaf(a: Any, b: Any) -> bool:
    if not isinstance(a, torch.Tensor):
        return isinstance(b, type(a)) and bool(a == b)
    if not isinstance(b, torch.Tensor) or a.shape != b.shape or a.dtype != b.dtype:
        return False
    return torch.equal(a, b) or bool(torch.isclose(a, b, rtol=0.0, atol=0.0, equal_nan=True).all())
