"""Finds the chain of modules that a model consists of, from the calls of two forwards.

A module is replaced by the modules that it calls if each of these gets exactly what the one before returned. Any other
module stays one layer, and so does one with parameters, buffers or hooks of its own, which its children would lose.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import TreeSpec, tree_flatten, tree_map

from pipedream.capture.captured import Captured, build_chain
from pipedream.capture.errors import is_compiled
from pipedream.capture.preserve_state import (
    MODULE_ATTRIBUTES,
    list_cuda_devices,
    preserve_state,
    read_python_generators,
    running,
)
from pipedream.capture.stand_ins import has_stand_ins
from pipedream.capture.structure import PLAIN, READS_NUMBERS, walk
from pipedream.core.model.graph import Value, ValueSite


def find_chain(model: nn.Module, sample: tuple[Any, ...]) -> Captured | None:
    """Returns the layers of a model that is a chain in training and in evaluation mode; None for any other."""
    if any(map(is_compiled, model.modules())):
        return None
    if any(parameter.is_meta for parameter in model.parameters()):
        sample = tree_map(lambda leaf: leaf.to("meta") if isinstance(leaf, torch.Tensor) else leaf, sample)
    devices = list_cuda_devices(model, sample)
    try:
        traces = [_trace(model, sample, training, devices) for training in (True, False)]
    except Exception:  # which the general capture raises again, with advice
        return None
    whole = {id(module) for module in model.modules() if _has_hooks_or_tensors(module)}
    for call in traces:
        _note_whole(call, whole)
    if id(model) in whole and any(call.calls for call in traces):
        return None
    layers, in_evaluation = (_unfold(call, whole) for call in traces)
    if list(map(id, layers)) != list(map(id, in_evaluation)):
        return None
    captured = build_chain(model, layers)
    return captured if has_stand_ins(model, sample) or _is_equal_to_model(model, captured, sample, devices) else None


def list_chain_values(captured: Captured, sample: tuple[Any, ...]) -> tuple[Value, ...]:
    """Returns what crosses the cuts of a chain: what each layer returns. Moments are the layers' indices."""
    values = []
    with (
        preserve_state(captured.layers, list_cuda_devices(nn.ModuleList(captured.layers), sample)),
        torch.enable_grad(),
    ):
        passed = tree_map(lambda leaf: leaf.detach().clone() if isinstance(leaf, torch.Tensor) else leaf, sample)
        for i, layer in enumerate(captured.layers[:-1]):
            passed = layer(*passed) if i == 0 else layer(passed)
            name = captured.graph.layers[i].name
            for path, leaf in walk(passed):
                if isinstance(leaf, torch.Tensor):
                    values.append(Value(leaf.nbytes, leaf.requires_grad, i, i + 1, (ValueSite(name, "out", path, i),)))
    return tuple(values)


def _has_hooks_or_tensors(module: nn.Module) -> bool:
    hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    tensors = (*module._parameters.values(), *module._buffers.values())
    return any(hooks) or any(tensor is not None for tensor in tensors)


def _note_whole(call: _Call, whole: set[int]) -> None:
    """Adds the modules that do more than call their inner modules in a row."""
    if call.calls and id(call.module) not in whole and not _is_chain(call):
        whole.add(id(call.module))
    for inner in call.calls:
        _note_whole(inner, whole)


def _unfold(call: _Call, whole: set[int]) -> list[nn.Module]:
    if not call.calls or id(call.module) in whole:
        return [call.module]
    return [module for inner in call.calls for module in _unfold(inner, whole)]


# -- the trace ----------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class _Values:
    """Arguments or an output, as they were at the time of a call.

    Attributes:
        leaves: kept alive so that identity is meaningful.
        marks: for each leaf, what an in-place operation would change.
    """

    leaves: tuple[Any, ...]
    spec: TreeSpec
    marks: tuple[Any, ...]

    @classmethod
    def of(cls, value: Any) -> _Values:
        leaves, spec = tree_flatten(value)
        return cls(tuple(leaves), spec, tuple(_mark(leaf) for leaf in leaves))

    def is_same(self, other: _Values | None) -> bool:
        """Returns whether the other has the very same tensors, unchanged."""
        return (
            other is not None
            and self.spec == other.spec
            and self.marks == other.marks
            and all(
                a is b or (isinstance(a, PLAIN) and type(a) is type(b) and a == b)
                for a, b in zip(self.leaves, other.leaves, strict=True)
            )
        )


@dataclass(eq=False)
class _Call:
    """One call of a module.

    Attributes:
        context: gradient, autocast and saved-tensor modes.
        calls: in order; of its own children or of their children.
        output: as a tuple of one; None if it raised.
        decides: its own forward may branch, and so take another path at another call.
    """

    module: nn.Module
    inputs: _Values
    has_keywords: bool
    context: tuple[Any, ...]
    calls: list[_Call] = field(default_factory=list)
    output: _Values | None = None
    decides: bool = False


def _is_chain(call: _Call) -> bool:
    """Returns whether a call does nothing but make its inner calls (at least one) in a row."""
    if call.decides or call.has_keywords:
        return False
    passed: _Values | None = call.inputs
    for inner in call.calls:
        if inner.has_keywords or inner.context != call.context or not inner.inputs.is_same(passed):
            return False
        passed = inner.output
    return call.output is not None and call.output.is_same(passed)


class _Tracer(TorchFunctionMode):
    """Builds the tree of calls, and notes which modules may branch in their own forward."""

    def __init__(self, top: _Call) -> None:
        super().__init__()
        self._stack = [top]
        self._drawn = _read_generators()
        self._attributes: dict[int, dict[str, Any]] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") in READS_NUMBERS:
            self._stack[-1].decides = True
        return func(*args, **(kwargs or {}))

    def enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._note_draws()
        self._attributes.setdefault(id(module), _read_attributes(module))
        call = _Call(module, _Values.of(args), bool(kwargs), _read_context())
        self._stack[-1].calls.append(call)
        self._stack.append(call)

    def leave(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        # Drops calls that raised an error which the model caught.
        while self._stack[-1].module is not module:
            self._stack.pop()
        self._note_draws()
        call = self._stack.pop()
        # It may decide by the attribute at its next call.
        call.decides |= bool(call.calls) and self._attributes[id(module)] != _read_attributes(module)
        call.output = _Values.of((output,))

    def _note_draws(self) -> None:
        before, self._drawn = self._drawn, _read_generators()
        with torch._C.DisableTorchFunction():  # which is not the model's
            same = before[1:] == self._drawn[1:] and torch.equal(before[0], self._drawn[0])
        self._stack[-1].decides |= not same


def _trace(model: nn.Module, sample: tuple[Any, ...], training: bool, devices: list[int]) -> _Call:
    """Runs the model once, with gradients on, and returns the tree of calls."""
    copies: dict[int, torch.Tensor] = {}

    def copy(leaf: Any) -> Any:  # into which the forward may write
        return copies.setdefault(id(leaf), leaf.detach().clone()) if isinstance(leaf, torch.Tensor) else leaf

    handles = []
    with running(model, devices, training):
        inputs = tree_map(copy, sample)
        top = _Call(model, _Values.of(()), False, ())
        tracer = _Tracer(top)
        try:
            for module in model.modules():
                # Outside of any hooks of the user.
                handles.append(module.register_forward_pre_hook(tracer.enter, prepend=True, with_kwargs=True))
                handles.append(module.register_forward_hook(tracer.leave, with_kwargs=True))
            with torch.enable_grad(), tracer:
                model(*inputs)
        finally:
            for handle in handles:
                handle.remove()
    return top.calls[0]


def _read_generators() -> tuple[Any, ...]:
    return torch.default_generator.get_state(), *read_python_generators()


def _read_attributes(module: nn.Module) -> dict[str, Any]:
    """Returns a module's plain attributes by value, and the identity and length of others."""
    return {
        name: value
        if isinstance(value, PLAIN)
        else (id(value), len(value) if isinstance(value, (list, dict, set)) else 0)
        for name, value in module.__dict__.items()
        if name not in MODULE_ATTRIBUTES
    }


def _mark(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        version = 0 if leaf.is_inference() else leaf._version
        return version, leaf.requires_grad, leaf.is_leaf, len(leaf._backward_hooks or ())
    # May contain hidden tensors, so it equals nothing, not even itself.
    return None if isinstance(leaf, PLAIN) else object()


def _read_context() -> tuple[Any, ...]:
    modes: list[Any] = [torch.is_grad_enabled(), torch.is_inference_mode_enabled()]
    for device in ("cpu", "cuda"):
        enabled = torch.is_autocast_enabled(device)
        modes += [enabled, torch.get_autocast_dtype(device) if enabled else None]
    # Non-reentrant checkpointing is only visible here; private, so it may be missing.
    saved_hooks = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
    return (*modes, saved_hooks(False) if saved_hooks is not None else None)


# -- the comparison -----------------------------------------------------------------------------------


def _is_equal_to_model(model: nn.Module, captured: Captured, sample: tuple[Any, ...], devices: list[int]) -> bool:
    """Compares the outputs and buffers of the model and the layers bitwise, in training and in evaluation mode.

    Gradients need no comparison: tensors are passed on as the same objects, so the autograd graph is the same.
    """

    def run_layers(*inputs: Any) -> Any:
        value = captured.layers[0](*inputs)
        for layer in captured.layers[1:]:
            value = layer(value)
        return value

    for training in (True, False):
        expected = _run_copy(model, model, sample, training, devices)
        try:
            actual = _run_copy(model, run_layers, sample, training, devices)
        except Exception:  # the forward does something besides calling its modules
            return False
        if not _is_equal(expected, actual):
            return False
    return True


def _run_copy(
    model: nn.Module, forward: Callable[..., Any], sample: tuple[Any, ...], training: bool, devices: list[int]
) -> Any:
    """Returns the output of a forward on a copy of the sample, and the buffers that it leaves."""
    with running(model, devices, training), torch.no_grad():
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
