"""Traces one forward of a model: which module calls which, with what, and what each returns."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import TreeSpec, tree_flatten

from pipedream.capture.preserve_state import python_generators

_READING = frozenset(("item", "tolist", "numpy", "__bool__", "__int__", "__float__", "__index__", "equal", "allclose"))
_OF_MODULES = frozenset(nn.Module().__dict__)
_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)


@dataclass(frozen=True, eq=False)
class Values:
    """Arguments or an output, as they were at the time of a call.

    Attributes:
        leaves: kept alive so that identity is meaningful.
        marks: for each leaf, what an in-place operation would change.
    """

    leaves: tuple[Any, ...]
    spec: TreeSpec
    marks: tuple[Any, ...]

    @classmethod
    def of(cls, value: Any) -> Values:
        leaves, spec = tree_flatten(value)
        return cls(tuple(leaves), spec, tuple(_mark(leaf) for leaf in leaves))

    def same(self, other: Values | None) -> bool:
        """Whether the other has the very same tensors, unchanged."""
        return (
            other is not None
            and self.spec == other.spec
            and self.marks == other.marks
            and all(
                a is b or (isinstance(a, _PLAIN) and type(a) is type(b) and a == b)
                for a, b in zip(self.leaves, other.leaves, strict=True)
            )
        )

    def last_operation(self) -> str:
        """Returns autograd's name of the operation that produced the first tensor, or ''."""
        for leaf in self.leaves:
            if isinstance(leaf, torch.Tensor) and leaf.grad_fn is not None:
                return leaf.grad_fn.name().rstrip("0123456789").removesuffix("Backward").lower()
        return ""


@dataclass(eq=False)
class TracedCall:
    """One call of a module.

    Attributes:
        keywords: whether there are any.
        context: gradient, autocast and saved-tensor modes.
        calls: in order; of its own children or of their children.
        output: as a tuple of one; None if it raised.
        decides: what its own forward does by which it may take another path at another call; empty if nothing.
    """

    module: nn.Module
    inputs: Values
    keywords: bool
    context: tuple[Any, ...]
    calls: list[TracedCall] = field(default_factory=list)
    output: Values | None = None
    decides: str = ""


class _Reads(TorchFunctionMode):
    """Notes which forward, outside of the modules that it calls, reads the numbers of a tensor."""

    def __init__(self, stack: list[TracedCall]) -> None:
        super().__init__()
        self._stack = stack

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") in _READING:
            self._stack[-1].decides = "it reads the numbers of a tensor, perhaps to decide by them"
        return func(*args, **(kwargs or {}))


def trace(model: nn.Module, sample: tuple[Any, ...]) -> TracedCall:
    """Runs the model once, with gradients on, and returns the tree of calls."""
    top = TracedCall(model, Values.of(sample), False, ())
    stack = [top]
    drawn = _read_generators()
    kept: dict[int, Any] = {}

    def note_draws() -> None:
        nonlocal drawn
        before, drawn = drawn, _read_generators()
        with torch._C.DisableTorchFunction():  # which is not the model's
            same = before[1:] == drawn[1:] and torch.equal(before[0], drawn[0])
        if not same:
            stack[-1].decides = "it draws random numbers outside of the modules that it calls"

    def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        note_draws()
        kept.setdefault(id(module), _read_attributes(module))
        call = TracedCall(module, Values.of(args), bool(kwargs), _read_context())
        stack[-1].calls.append(call)
        stack.append(call)

    def leave(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        # Drops calls that raised an error which the model caught.
        while stack[-1].module is not module:
            stack.pop()
        note_draws()
        if stack[-1].calls and kept[id(module)] != _read_attributes(module):
            stack[-1].decides = "it sets an attribute of its own, perhaps to decide by it at the next call"
        stack.pop().output = Values.of((output,))

    handles = []
    try:
        for module in model.modules():
            # Outside of any hooks of the user.
            handles.append(module.register_forward_pre_hook(enter, prepend=True, with_kwargs=True))
            handles.append(module.register_forward_hook(leave, with_kwargs=True))
        with torch.enable_grad(), _Reads(stack):
            model(*sample)
    finally:
        for handle in handles:
            handle.remove()
    return top.calls[0]


def why_not_a_chain(call: TracedCall, names: dict[int, str]) -> str:
    """Returns why a call is not the same as its inner calls (at least one), one after the other; '' if it is."""
    if call.decides:
        return call.decides
    first, last = call.calls[0], call.calls[-1]
    if call.keywords:
        return "it is called with keyword arguments"
    if not first.inputs.same(call.inputs):
        return f"before {names[id(first.module)]!r} something happens to the input{_describe_maker(first.inputs)}"
    before: TracedCall | None = None
    for child in call.calls:
        name = names[id(child.module)]
        if child.keywords:
            return f"{name!r} is called with keyword arguments"
        if child.context != call.context:
            return f"{name!r} runs in another gradient, autocast or checkpoint mode than the forward around it"
        if before is not None and not child.inputs.same(before.output):
            return (
                f"between {names[id(before.module)]!r} and {name!r} something else happens to the "
                f"tensor{_describe_maker(child.inputs)}"
            )
        before = child
    if call.output is None or not call.output.same(last.output):
        cause = _describe_maker(call.output) if call.output is not None else ""
        return f"after {names[id(last.module)]!r} something else happens to the tensor{cause}"
    return ""


def _read_generators() -> tuple[Any, ...]:
    return torch.default_generator.get_state(), *python_generators()


def _read_attributes(module: nn.Module) -> dict[str, Any]:
    """A module's plain attributes by value, and the identity and length of others."""
    attributes = {name: value for name, value in module.__dict__.items() if name not in _OF_MODULES}
    return {
        name: value
        if isinstance(value, _PLAIN)
        else (id(value), len(value) if isinstance(value, (list, dict, set)) else 0)
        for name, value in attributes.items()
    }


def _describe_maker(values: Values) -> str:
    operation = values.last_operation()
    return f" (what arrives was made by {operation!r})" if operation else ""


def _mark(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        version = 0 if leaf.is_inference() else leaf._version
        return version, leaf.requires_grad, leaf.is_leaf, len(leaf._backward_hooks or ())
    # May contain hidden tensors, so it equals nothing, not even itself.
    return None if isinstance(leaf, _PLAIN) else object()


def _read_context() -> tuple[Any, ...]:
    modes: list[Any] = [torch.is_grad_enabled(), torch.is_inference_mode_enabled()]
    for device in ("cpu", "cuda"):
        enabled = torch.is_autocast_enabled(device)
        modes += [enabled, torch.get_autocast_dtype(device) if enabled else None]
    # Non-reentrant checkpointing is only visible here; private, so it may be missing.
    saved_hooks = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
    return (*modes, saved_hooks(False) if saved_hooks is not None else None)
