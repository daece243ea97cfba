"""Finds the chain of modules that a model consists of, from the calls of two forwards.

A module is replaced by the modules that it calls if each of these gets exactly what the one before returned. Any other
module stays one layer, and so does one with parameters, buffers or hooks of its own, which its children would lose.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_map

from pipedream.capture.captured import Captured, build_chain
from pipedream.capture.errors import is_compiled
from pipedream.capture.preserve_state import list_cuda_devices, read_attributes, read_python_generators, running
from pipedream.capture.stand_ins import has_stand_ins
from pipedream.capture.structure import PLAIN, READS_NUMBERS, walk
from pipedream.core.model.graph import Value, ValueSite

_CONVERSIONS = frozenset({"float", "double", "half", "bfloat16", "to", "type", "type_as"})
_GET_DTYPE = torch.Tensor.dtype.__get__  # type: ignore[attr-defined]


def find_chain(model: nn.Module, sample: tuple[Any, ...]) -> Captured | None:
    """Returns the layers of a model that is a chain in training and in evaluation mode; None for any other."""
    if any(map(is_compiled, model.modules())):
        return None
    devices = list_cuda_devices(model, sample)
    modes = (True, False)
    try:
        roots, results = zip(*(_trace(model, sample, training, devices) for training in modes), strict=True)
    except Exception:  # which the general capture raises again, with advice
        return None
    whole = {id(module) for module in model.modules() if _has_hooks_or_tensors(module)}
    whole |= {id(call.module) for root in roots for call in root.every() if call.inner and not call.is_chain}
    if id(model) in whole and any(root.inner for root in roots):
        return None
    calls, in_evaluation = (root.unfold(whole) for root in roots)
    layers = [call.module for call in calls]
    if list(map(id, layers)) != [id(call.module) for call in in_evaluation]:
        return None
    for training, expected in zip(modes, results, strict=True) if not has_stand_ins(model, sample) else ():
        try:
            actual = _run(model, partial(_run_layers, layers), sample, training, devices)
        except Exception:  # the forward does something besides calling its modules
            return None
        if not _is_equal(expected, actual):
            return None
    captured = build_chain(model, layers)
    names = [layer.name for layer in captured.graph.layers]
    values = (
        Value(size, gradient, i, i + 1, (ValueSite(names[i], "out", path, i),))
        for i, call in enumerate(calls[:-1])
        for path, size, gradient in call.tensors
    )
    return replace(captured, graph=replace(captured.graph, values=tuple(values)))


def _has_hooks_or_tensors(module: nn.Module) -> bool:
    hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    tensors = (*module._parameters.values(), *module._buffers.values())
    return any(hooks) or any(tensor is not None for tensor in tensors)


# -- the trace ----------------------------------------------------------------------------------------


@dataclass(eq=False)
class _Call:
    """One call of a module.

    Attributes:
        inputs: as `_Tracer` describes them; equal to nothing if some have keywords.
        context: gradient, autocast and saved-tensor modes.
        inner: in order; of its own children or of their children.
        output: described as a tuple of one; None if it raised.
        tensors: path, bytes and requires_grad of each in the output.
        decides: its own forward may branch, and so take another path at another call.
    """

    module: nn.Module
    inputs: Any
    context: tuple[Any, ...]
    inner: list[_Call] = field(default_factory=list)
    output: Any = None
    tensors: Sequence[tuple[str, int, bool]] = ()
    decides: bool = False

    @property
    def is_chain(self) -> bool:
        """Whether it does nothing but make its inner calls (at least one) in a row."""
        passed = self.inputs
        for call in self.inner:
            if call.context != self.context or call.inputs != passed:
                return False
            passed = call.output
        return not self.decides and self.output is not None and self.output == passed

    def every(self) -> Iterator[_Call]:
        yield self
        for call in self.inner:
            yield from call.every()

    def unfold(self, whole: Container[int]) -> list[_Call]:
        """Returns the calls that it consists of, down to those of modules that stay whole."""
        if not self.inner or id(self.module) in whole:
            return [self]
        return [call for inner in self.inner for call in inner.unfold(whole)]


class _Tracer(TorchFunctionMode):
    """Builds the tree of calls, and notes which modules may branch in their own forward."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.top = _Call(model, None, ())
        self._stack = [self.top]
        self._described: list[Any] = []
        self._drawn = _read_generators()
        self._attributes: dict[int, dict[str, Any]] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, result = getattr(func, "__name__", ""), func(*args, **(kwargs or {}))
        # Under autocast tensors have other types, and a conversion that does nothing here converts them.
        if name in READS_NUMBERS or func == _GET_DTYPE or (name in _CONVERSIONS and result is args[0]):
            self._stack[-1].decides = True
        return result

    def enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._note_draws()
        self._attributes.setdefault(id(module), read_attributes(module))
        call = _Call(module, object() if kwargs else self._describe(args), _read_context())
        self._stack[-1].inner.append(call)
        self._stack.append(call)

    def leave(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        # Drops calls that raised an error which the model caught.
        while self._stack[-1].module is not module:
            self._stack.pop()
        self._note_draws()
        call = self._stack.pop()
        # It may decide by the attribute at its next call.
        call.decides |= bool(call.inner) and self._attributes[id(module)] != read_attributes(module)
        call.output = self._describe((output,))
        tensors = ((path, leaf) for path, leaf in walk(output) if isinstance(leaf, torch.Tensor))
        call.tensors = [(path, leaf.numel() * leaf.itemsize, leaf.requires_grad) for path, leaf in tensors]

    def _describe(self, value: Any) -> tuple[Any, list[Any]]:
        """Returns what is equal for the very same tensors, unchanged, and for equal plain values alone."""
        leaves, spec = tree_flatten(value)
        self._described.append(leaves)  # so that no id is used again
        return spec, list(map(_mark, leaves))

    def _note_draws(self) -> None:
        before, self._drawn = self._drawn, _read_generators()
        with torch._C.DisableTorchFunction():  # which is not the model's
            same = before[1:] == self._drawn[1:] and torch.equal(before[0], self._drawn[0])
        self._stack[-1].decides |= not same


def _trace(model: nn.Module, sample: tuple[Any, ...], training: bool, devices: list[int]) -> tuple[_Call, Any]:
    """Returns the tree of calls of the model's forward, and its results (`_run`)."""
    tracer = _Tracer(model)

    def traced(*inputs: Any) -> Any:
        handles = []
        try:
            for module in model.modules():
                # Outside of any hooks of the user.
                handles.append(module.register_forward_pre_hook(tracer.enter, prepend=True, with_kwargs=True))
                handles.append(module.register_forward_hook(tracer.leave, with_kwargs=True))
            with tracer:
                return model(*inputs)
        finally:
            for handle in handles:
                handle.remove()

    results = _run(model, traced, sample, training, devices)
    return tracer.top.inner[0], results


def _read_generators() -> tuple[Any, ...]:
    return torch.default_generator.get_state(), *read_python_generators()


def _mark(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        version = 0 if leaf.is_inference() else leaf._version
        return id(leaf), version, leaf.requires_grad, leaf.is_leaf, len(leaf._backward_hooks or ())
    # Other objects may contain hidden tensors, and equal nothing, not even themselves.
    return (type(leaf), leaf) if isinstance(leaf, PLAIN) else object()


def _read_context() -> tuple[Any, ...]:
    modes: list[Any] = [torch.is_grad_enabled(), torch.is_inference_mode_enabled()]
    # The depth shows a region in which autocast is off, as it may be around.
    modes += [torch.autocast_increment_nesting(), torch.autocast_decrement_nesting()]
    for device in ("cpu", "cuda"):
        enabled = torch.is_autocast_enabled(device)
        modes += [enabled, torch.get_autocast_dtype(device) if enabled else None]
    # Non-reentrant checkpointing is only visible here; private, so it may be missing.
    saved_hooks = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
    return (*modes, saved_hooks(False) if saved_hooks is not None else None)


# -- the comparison -----------------------------------------------------------------------------------


def _run(
    model: nn.Module, forward: Callable[..., Any], sample: tuple[Any, ...], training: bool, devices: list[int]
) -> Any:
    """Returns the output of a forward on a copy of the sample, with gradients on, and the buffers that it leaves."""
    copies: dict[int, torch.Tensor] = {}

    def copy(leaf: Any) -> Any:  # into which the forward may write
        return copies.setdefault(id(leaf), leaf.detach().clone()) if isinstance(leaf, torch.Tensor) else leaf

    with running(model, devices, training), torch.enable_grad():
        results = forward(*tree_map(copy, sample)), dict(model.named_buffers())
        return tree_map(lambda leaf: leaf.detach() if isinstance(leaf, torch.Tensor) else leaf, results)


def _run_layers(layers: Sequence[nn.Module], *inputs: Any) -> Any:
    value = layers[0](*inputs)
    for layer in layers[1:]:
        value = layer(value)
    return value


def _is_equal(expected: Any, actual: Any) -> bool:
    """Compares bitwise.

    Gradients need no comparison: tensors are passed on as the same objects, so the autograd graph is the same.
    """
    (a, spec_a), (b, spec_b) = map(tree_flatten, (expected, actual))
    return spec_a == spec_b and all(map(_is_equal_leaf, a, b))


def _is_equal_leaf(a: Any, b: Any) -> bool:
    if not isinstance(a, torch.Tensor):
        return isinstance(b, type(a)) and bool(a == b)
    if not isinstance(b, torch.Tensor) or a.shape != b.shape or a.dtype != b.dtype:
        return False
    return torch.equal(a, b) or bool(torch.isclose(a, b, rtol=0.0, atol=0.0, equal_nan=True).all())
