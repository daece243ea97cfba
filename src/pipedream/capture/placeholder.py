"""Placeholders: tensors of other stages, of which a stage knows shape, dtype and device, but not the numbers.

A placeholder computes nothing: an operation on it gives a placeholder of the right shape. Where the numbers are needed
(``if x.sum() > 0``, ``x.nonzero()``), the result must have been sent by an earlier stage (`LayerGraph.replayed`).
A placeholder that turns out to be a tensor that was received becomes that tensor in place (`torch.utils.swap_tensors`),
so that all the user's variables that hold it see an ordinary tensor from then on.
"""

from __future__ import annotations

import operator
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from types import SimpleNamespace
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from pipedream.capture.structure import READS_NUMBERS, find_leaf, is_in_place, map_leaves, walk
from pipedream.core.errors import CaptureError
from pipedream.core.user_code import user_line

T: Any = torch.Tensor
_broadcast: Any = torch.broadcast_shapes
swap_tensors: Any = torch.utils.swap_tensors
_BINARY = {
    T.add, T.__add__, T.__radd__, torch.add, T.sub, T.__sub__, T.__rsub__, torch.sub, T.mul, T.__mul__, T.__rmul__,
    torch.mul, T.div, T.__truediv__, T.__rtruediv__, torch.div, operator.add, operator.mul, operator.sub,
}  # fmt: skip
_UNARY = {
    torch.nn.functional.relu, torch.relu, T.relu, torch.nn.functional.gelu, torch.nn.functional.silu,
    torch.nn.functional.dropout, torch.tanh, T.tanh, torch.sigmoid, T.sigmoid, torch.nn.functional.layer_norm,
    torch.nn.functional.rms_norm, T.detach, T.clone,
}  # fmt: skip


class NumbersNeeded(CaptureError):
    """An operation cannot be evaluated without the numbers of a tensor of another stage.

    Attributes:
        function: its name.
        cause: the error of the operation without numbers.
        needs: whether the operation needs the numbers; otherwise it failed for another reason, such as a dtype.
    """

    def __init__(self, function: str, text: str, cause: str, needs: bool) -> None:
        self.function = function
        self.cause = cause
        self.needs = needs
        super().__init__(text)


_COLLECTED: ContextVar[list[NumbersNeeded] | None] = ContextVar("collected", default=None)


@contextmanager
def collecting_errors() -> Iterator[list[NumbersNeeded]]:
    """Context that yields the errors raised in it. The model may catch them, and go another way."""
    raised: list[NumbersNeeded] = []
    token = _COLLECTED.set(raised)
    try:
        yield raised
    finally:
        _COLLECTED.reset(token)


Origin = tuple[Any, tuple[Any, ...], dict[str, Any], str]
"""A function, its arguments, and where a placeholder is in its result."""

_ORIGINS: ContextVar[dict[int, tuple[torch.Tensor, Origin]] | None] = ContextVar("origins", default=None)


@contextmanager
def noting_origins() -> Iterator[Callable[[Any], None]]:
    """Context that notes how placeholders are computed from others.

    Yields a function that computes the placeholders in a value whose sources have all arrived.
    """
    origins: dict[int, tuple[torch.Tensor, Origin]] = {}
    token = _ORIGINS.set(origins)

    def fill_in(value: Any) -> None:
        for _, leaf in walk(value):
            if type(leaf) is not Placeholder or id(leaf) not in origins:
                continue
            function, args, kwargs, path = origins.pop(id(leaf))[1]
            fill_in([args, kwargs])
            if not any(isinstance(argument, Placeholder) for _, argument in walk([args, kwargs])):
                result = find_leaf(function(*args, **kwargs), path)
                swap_tensors(leaf, result.view_as(result))  # not the result itself, which may be an argument

    try:
        yield fill_in
    finally:
        _ORIGINS.reset(token)


def _note_origin(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> Any:
    origins = _ORIGINS.get()
    if origins is None:
        return result
    before = {id(leaf) for _, leaf in walk([args, kwargs])}
    for path, leaf in walk(result):
        if id(leaf) in before:
            origins.pop(id(leaf), None)  # it was written
        elif type(leaf) is Placeholder:
            copies = map_leaves(lambda _, argument: argument, [args, kwargs])  # lists may change
            origins[id(leaf)] = leaf, (function, tuple(copies[0]), copies[1], path)
    return result


class Placeholder(torch.Tensor):
    """See above; made by `placeholder_like`. It reports `real_device` and, as requires_grad, `wants`."""

    real_device: torch.device
    wants: bool

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        reported = _REPORTED.get(func)
        if reported is not None:
            return reported(args[0])
        if func is T.type:
            return _read_type(*args, **(kwargs or {}))
        with torch._C.DisableTorchFunctionSubclass():
            if getattr(func, "__name__", "") == "__get__":
                value = func(*args)
                if isinstance(value, torch.Tensor) and not isinstance(value, Placeholder):
                    value = placeholder_like(value, args[0].real_device, False)
                return _note_origin(func, args, {}, value)
            grad = torch.is_grad_enabled()
            with torch.no_grad():
                return _note_origin(func, args, kwargs or {}, _evaluate(func, args, kwargs or {}, grad))


@contextmanager
def converting_placeholders() -> Iterator[None]:
    """Context in which functions that make tensors of data take placeholders too; torch lets no subclass see them."""
    functions = {name: getattr(torch, name) for name in ("as_tensor", "asarray", "tensor")}
    with torch.device("cpu"):  # torch lists its constructors at the first use of such a context, for good
        torch.empty(())

    def take_placeholders(function: Callable[..., Any]) -> Callable[..., Any]:
        def convert(data: Any, *args: Any, **kwargs: Any) -> Any:
            if not isinstance(data, Placeholder):
                return function(data, *args, **kwargs)
            options = {name: kwargs[name] for name in ("dtype", "device") if kwargs.get(name) is not None}
            return data.to(*args, **options) if args or options else data

        return convert

    for name, function in functions.items():
        setattr(torch, name, take_placeholders(function))
    try:
        yield
    finally:
        for name, function in functions.items():
            setattr(torch, name, function)


class MissingOutput(Placeholder):
    """A part of the model's output that the last stage cannot compute; a use raises an error with its `reason`."""

    reason: str

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if getattr(func, "__name__", "") in ("__get__", "__repr__", "size", "dim"):
            return super().__torch_function__(func, types, args, kwargs)
        missing = next(leaf for _, leaf in walk([list(args), kwargs or {}]) if isinstance(leaf, MissingOutput))
        line = user_line()
        raise CaptureError(missing.reason + f" (it is used at {line})" * bool(line))


def mark_missing(output: Any, reason: Callable[[str], str]) -> None:
    """Makes placeholders in an output raise an error on use, whose text `reason` makes from their place in it."""
    for path, leaf in walk(output):
        if type(leaf) is Placeholder:
            leaf.__class__ = MissingOutput
            leaf.reason = reason(f"the field {path!r} of the output" if path else "the output")  # type: ignore[attr-defined]


def _ignore_hook(*_: Any) -> RemovableHandle:
    return RemovableHandle(OrderedDict())  # it acts on the stage that has the tensor


_NODE = SimpleNamespace(register_hook=_ignore_hook, register_prehook=_ignore_hook)
_REPORTED: dict[Any, Callable[[Placeholder], Any]] = {
    T.device.__get__: lambda placeholder: placeholder.real_device,
    T.requires_grad.__get__: lambda placeholder: placeholder.wants,
    T.is_cpu.__get__: lambda placeholder: placeholder.real_device.type == "cpu",
    T.is_cuda.__get__: lambda placeholder: placeholder.real_device.type == "cuda",
    T.is_meta.__get__: lambda placeholder: False,
    T.grad_fn.__get__: lambda placeholder: _NODE if placeholder.wants else None,
    T.register_hook: _ignore_hook,
    T.retain_grad: lambda placeholder: None,
    T.cpu: lambda placeholder: _move(placeholder, "cpu"),
    T.cuda: lambda placeholder: _move(placeholder, "cuda"),
}


def _move(placeholder: Placeholder, kind: str) -> Placeholder:
    if placeholder.real_device.type == kind:
        return placeholder
    return placeholder_like(torch.empty_like(plain_meta(placeholder)), torch.device(kind), placeholder.wants)


def _read_type(placeholder: Placeholder, dtype: Any = None, non_blocking: bool = False) -> Any:
    """Returns what `Tensor.type` does: a name such as "torch.FloatTensor", or what is converted to such a type."""
    if dtype is None:
        name: str = plain_meta(placeholder).type()
        kind = placeholder.real_device.type
        return name.replace("meta.", "" if kind == "cpu" else f"{kind}.")
    if isinstance(dtype, torch.dtype):
        return placeholder.to(dtype)
    module, _, name = dtype.rpartition(".") if isinstance(dtype, str) else (dtype.__module__, "", dtype.__name__)
    kind = "cuda" if module == "torch.cuda" else "cpu"
    return _move(placeholder, kind).to(getattr(torch, name).dtype)


def placeholder_like(tensor: torch.Tensor, real_device: torch.device, wants: bool) -> Placeholder:
    """Returns a placeholder of the shape, strides and dtype of a tensor, of which a meta tensor is taken as it is."""
    placeholder = torch.Tensor._make_subclass(Placeholder, tensor if tensor.is_meta else _make_empty_meta(tensor))
    placeholder.real_device, placeholder.wants = real_device, wants
    return placeholder


def meta_like(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a meta tensor with the shape, strides, dtype and requires_grad of a tensor."""
    empty = _make_empty_meta(tensor)
    return empty.requires_grad_() if tensor.requires_grad else empty


def _make_empty_meta(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="meta")


class _Castable(torch.Tensor):
    """A meta tensor that reports a device, so that autocast casts it like the tensors there.

    Torch's own kernels of autocast see it, above `__torch_dispatch__`: no list of operations is kept here.

    Attributes:
        meta: what operations are evaluated with.
    """

    meta: torch.Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def wrap(cls, meta: torch.Tensor, real_device: torch.device) -> _Castable:
        make: Any = torch.Tensor._make_wrapper_subclass
        wrapper: _Castable = make(cls, meta.size(), strides=meta.stride(), dtype=meta.dtype, device=real_device)
        wrapper.meta = meta
        return wrapper

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        wrappers: dict[int, _Castable] = {}

        def bare(_: str, leaf: Any) -> Any:
            if isinstance(leaf, _Castable):
                wrappers[id(leaf.meta)] = leaf
                return leaf.meta
            if isinstance(leaf, torch.Tensor) and not leaf.is_meta:  # a number, or made inside the operation
                return _make_empty_meta(leaf)
            return torch.device("meta") if isinstance(leaf, torch.device) else leaf

        result = func(*map_leaves(bare, args), **map_leaves(bare, kwargs or {}))
        real_device = next(iter(wrappers.values())).device

        def wrapped(_: str, leaf: Any) -> Any:
            if not isinstance(leaf, torch.Tensor):
                return leaf
            return wrappers[id(leaf)] if id(leaf) in wrappers else cls.wrap(leaf, real_device)

        return map_leaves(wrapped, result)


class _Arguments:
    """Arguments of an operation, with meta tensors for the tensors.

    Args:
        reports: they report their devices (`_Castable`).

    Attributes:
        originals: id of a meta tensor -> what it stands for.
        real_devices: devices among the arguments.
        wants: whether a placeholder requires a gradient.
    """

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any], reports: bool) -> None:
        self.originals: dict[int, torch.Tensor] = {}
        self.real_devices: list[torch.device] = []
        self.wants = False
        self._reports = reports
        self.args = [self._convert(argument) for argument in args]
        self.kwargs = {name: self._convert(argument) for name, argument in kwargs.items()}

    def _convert(self, argument: Any) -> Any:
        if type(argument) in (int, float, bool, torch.Size, torch.dtype, slice, type(None)):
            return argument
        if type(argument) in (tuple, list, dict):
            return map_leaves(self._convert_leaf, argument)
        return self._convert_leaf("", argument)

    def _convert_leaf(self, _: str, leaf: Any) -> Any:
        if type(leaf) is Placeholder:
            self.wants |= leaf.wants
            if not self._reports:
                return leaf
            empty: torch.Tensor = _Castable.wrap(plain_meta(leaf), leaf.real_device)
        elif isinstance(leaf, torch.Tensor) and not leaf.is_meta:
            if not leaf.ndim:  # its number may be needed; autocast would keep a cast of a parameter without its graph
                return leaf.detach() if self._reports else leaf
            empty = _make_empty_meta(leaf)
            if self._reports:
                empty = _Castable.wrap(empty, leaf.device)
        elif isinstance(leaf, torch.device) or (isinstance(leaf, str) and leaf.split(":")[0] in ("cpu", "cuda")):
            self.real_devices.append(torch.device(leaf))
            return leaf if self._reports else torch.device("meta")
        else:
            return leaf
        self.originals[id(empty)] = leaf
        return empty


def _evaluate(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], grad: bool, casts: bool = False) -> Any:
    name = getattr(func, "__name__", str(func))
    like = next(leaf for _, leaf in walk([args, kwargs]) if isinstance(leaf, Placeholder))
    writes = is_in_place(name) or name == "__setitem__"
    casts = casts or (torch.is_autocast_enabled(like.real_device.type) and not writes)  # autocast leaves writes alone
    if not casts and func in _UNARY and (result := _evaluate_unary(func, args, kwargs, grad)) is not None:
        return result
    arguments = _Arguments(args, kwargs, casts)
    wants, originals = grad and arguments.wants, arguments.originals
    if not casts and func in _BINARY and len(args) == 2 and not kwargs:
        empty = _evaluate_binary(*arguments.args)
        if empty is not None:
            return placeholder_like(empty, like.real_device, wants)
    try:
        result = func(*arguments.args, **arguments.kwargs)
    except (NotImplementedError, RuntimeError, ValueError, IndexError, TypeError) as error:
        if casts or writes or _lacks_numbers(name, error):
            raise _note_numbers_needed(name, error) from error
        return _evaluate(func, args, kwargs, grad, casts=True)  # meta tensors may not be used beside a number
    if args and writes and id(arguments.args[0]) in originals:
        swap_tensors(args[0], placeholder_like(arguments.args[0], args[0].device, wants))
        return None if name == "__setitem__" else args[0]
    real_device = arguments.real_devices[0] if arguments.real_devices else like.real_device

    def wrapped(_: str, leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        if isinstance(leaf, Placeholder):
            return leaf
        if id(leaf) in originals:
            return originals[id(leaf)]
        return placeholder_like(leaf, real_device, wants and leaf.is_floating_point())

    if isinstance(result, torch.Tensor):
        return wrapped("", result)
    if type(result).__module__ == "torch.return_types":
        return type(result)([wrapped("", leaf) for leaf in result])
    return map_leaves(wrapped, result)


def _evaluate_unary(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], grad: bool) -> Placeholder | None:
    like = args[0] if args else None
    if not isinstance(like, Placeholder) or (func is torch.nn.functional.dropout and not _is_dropping(args, kwargs)):
        return None
    wants = like.wants and func is not T.detach and grad
    return placeholder_like(torch.empty_like(plain_meta(like)), like.real_device, wants)


def _evaluate_binary(a: Any, b: Any) -> torch.Tensor | None:
    if not isinstance(a, torch.Tensor) or not isinstance(b, (torch.Tensor, int, float)):
        return None
    kind = torch.result_type(a, b)
    if not kind.is_floating_point:
        return None
    shape = _broadcast(a.shape, b.shape) if isinstance(b, torch.Tensor) else a.shape
    return torch.empty(shape, dtype=kind, device="meta")


def _note_numbers_needed(name: str, error: Exception) -> NumbersNeeded:
    cause = f"{type(error).__name__}: {error}"
    line = user_line()
    needs = _lacks_numbers(name, error)
    what = "needs the numbers of" if needs else "failed with"
    text = (
        f"{line or 'the loss or a metric'} {what} a tensor that another stage computes and does not send "
        f"({name}; {cause})"
    )
    if not line:
        text += "; let the model return it in its output, in tuples, lists, dicts or dataclasses"
    raised = NumbersNeeded(name, text, cause, needs)
    if (collected := _COLLECTED.get()) is not None:
        collected.append(raised)
    return raised


def _lacks_numbers(name: str, error: Exception) -> bool:
    """Whether an operation failed because its arguments have no numbers, judging by torch's errors."""
    text = str(error).lower()
    return (
        isinstance(error, NotImplementedError)
        or name in READS_NUMBERS
        or "no data" in text
        or "meta tensor" in text
        or "tensor subclass" in text
    )


def plain_meta(placeholder: Placeholder) -> torch.Tensor:
    """Returns an ordinary meta tensor of the same storage."""
    with torch._C.DisableTorchFunctionSubclass():
        return placeholder.as_subclass(torch.Tensor).detach()


def _is_dropping(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether F.dropout returns a new tensor rather than its argument."""
    p = kwargs.get("p", args[1] if len(args) > 1 else 0.5)
    training = kwargs.get("training", args[2] if len(args) > 2 else True)
    inplace = kwargs.get("inplace", args[3] if len(args) > 3 else False)
    return bool(p) and bool(training) and not inplace
