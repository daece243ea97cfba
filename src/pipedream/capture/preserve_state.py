"""Runs a model without changing its state."""

import random
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, MutableMapping, MutableSet, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain
from types import BuiltinFunctionType, CellType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from pipedream.capture.structure import PLAIN, is_stand_in
from pipedream.core.errors import CaptureError

_DEPTH = 4  # of containers and objects in a module's attributes
_PLAIN = frozenset(PLAIN)
GENERATORS = (torch.Generator, random.Random, np.random.Generator, np.random.RandomState)
_CODE = (ModuleType, MethodType, BuiltinFunctionType)
_HOLDERS = (list, dict, set, deque)
_NAMED = (*_HOLDERS, type)  # of a function's global variables, those that may change in place
MODULE_ATTRIBUTES = frozenset(nn.Module().__dict__)


class Attributes:
    """The plain attributes, training flags and hooks that modules have now, to be restored.

    Args:
        children: also the parameters, buffers and modules in them.
    """

    def __init__(self, modules: Iterable[nn.Module], *, children: bool = False) -> None:
        self.every = list({id(module): module for root in modules for module in root.modules()}.values())
        names = ("_parameters", "_buffers", "_modules") if children else ()
        items = [item for module in self.every for item in module.__dict__.items()]
        # Hugging Face's models install some hooks in their first forward.
        slots = [slot for name, slot in items if ("_hooks" in name or name in names) and isinstance(slot, dict)]
        self._saved = [(content, dict(content)) for content in [*(module.__dict__ for module in self.every), *slots]]

    def restore(self) -> None:
        for content, saved in self._saved:
            _refill(content, saved, add="update")


def read_attributes(module: nn.Module) -> dict[str, Any]:
    """Returns attributes of a module and its class by value, of others what changes if they are written or replaced."""
    attributes = {name: mark(value) for name, value in module.__dict__.items() if name not in MODULE_ATTRIBUTES}
    of_class = {} if type(module).__module__.startswith("torch.") else vars(type(module))
    return {name: mark(value) for name, value in of_class.items() if isinstance(value, (*PLAIN, *_NAMED))} | attributes


def list_values(modules: Iterable[nn.Module]) -> list[Any]:
    """Returns what modules hold in plain attributes."""
    return [value for m in modules for name, value in m.__dict__.items() if name not in MODULE_ATTRIBUTES]


def mark(value: Any, depth: int = _DEPTH) -> Any:
    """Returns what changes if a value is replaced or written."""
    if isinstance(value, PLAIN):
        return value
    if isinstance(value, torch.Tensor):
        return id(value), 0 if value.is_inference() else value._version
    if isinstance(value, np.ndarray):
        return id(value), value.tobytes()
    if isinstance(value, (nn.Module, type)) or not depth:
        return id(value)
    items = value if isinstance(value, (list, tuple, deque, set)) else getattr(value, "__dict__", {}).values()
    items = value.values() if isinstance(value, dict) else items
    return id(value), *(mark(item, depth - 1) for item in [*items])


class Objects:
    """What Python objects hold now, to be restored: containers, tensors, generators, and instances' attributes."""

    def __init__(
        self,
        roots: Iterable[Any],
        modules: Iterable[nn.Module] = (),
        skips: Callable[[Any], bool] = lambda value: False,
    ) -> None:
        self._skips = skips
        self._restore: list[Callable[[], object]] = []
        self._contents: list[tuple[Any, Any]] = []  # containers, and copies
        self._arrays: list[tuple[Any, Any]] = []
        self._tensors: list[tuple[Any, Any]] = []  # and what changes if they are written
        self._ids: set[int] = set()
        for root in roots:
            self._note(root, _DEPTH)
        for kind in dict.fromkeys(map(type, modules)):  # not what their methods use, which is half of a library
            for item in self._note_members(kind):
                self._note(item, _DEPTH - 1)

    def restore(self) -> None:
        for restore in self._restore:
            restore()

    def holds(self) -> bool:
        """Returns whether containers and instances still hold the same objects, and tensors were not written."""
        same = all(_list_ids(content) == _list_ids(saved) for content, saved in self._contents)
        same = same and all(array.tobytes() == saved.tobytes() for array, saved in self._arrays)
        return same and all(mark(tensor) == old for tensor, old in self._tensors)

    def _note(self, value: Any, depth: int) -> None:
        if type(value) in _PLAIN or id(value) in self._ids or not depth:
            return
        if isinstance(value, (nn.Module, nn.Parameter)) or self._skips(value):
            return
        self._ids.add(id(value))
        inner: Iterable[Any] = ()
        if isinstance(value, torch.Tensor):
            if not value.is_meta:
                self._restore.append(partial(copy_back, value, value.detach().clone()))
                self._tensors.append((value, mark(value)))
        elif row := next((row for row in _STATES if isinstance(value, row[0])), None):
            state = row[1](value)
            inner = state.values() if isinstance(state, dict) else state if isinstance(state, list) else ()
            self._restore.append(partial(row[2], value, state))
            if isinstance(value, np.ndarray):
                self._arrays.append((value, state))
            elif isinstance(value, Collection):
                self._contents.append((value, state))
        elif isinstance(value, tuple):
            inner = value
        elif isinstance(value, FunctionType):
            cells = [(cell, cell.cell_contents) for cell in value.__closure__ or () if cell != CellType()]
            names = {name: value.__globals__[name] for name in value.__code__.co_names if name in value.__globals__}
            changing = (item for item in names.values() if isinstance(item, _NAMED))
            inner = [*(item for _, item in cells), *(value.__defaults__ or ()), *changing]
            self._restore += [partial(setattr, cell, "cell_contents", item) for cell, item in cells]
            self._restore.append(partial(value.__globals__.update, names))
        elif isinstance(value, type):
            inner = self._note_members(value, type, FunctionType)
        elif isinstance(value, partial):
            inner = [value.func, *value.args, *value.keywords.values()]
        elif type(getattr(value, "__dict__", None)) is dict and not isinstance(value, _CODE):
            self._contents.append((value.__dict__, saved := dict(value.__dict__)))
            inner = list(saved.values())
            self._restore.append(partial(_refill, value.__dict__, saved, add="update"))
        for item in inner:
            self._note(item, depth - 1)

    def _note_members(self, owner: type, *kinds: type) -> list[Any]:
        """Notes the numbers of a class; returns its containers and members of these kinds."""
        if owner.__module__.startswith("torch"):
            return []
        members = (item for item in vars(owner).values() if isinstance(item, (*_HOLDERS, *kinds)))
        counts = {name: item for name, item in vars(owner).items() if type(item) in (int, float)}
        self._contents.append((vars(owner), dict(vars(owner))))
        self._restore += [partial(_reset, owner, name, item) for name, item in counts.items()]
        return [getattr(item, "__wrapped__", item) for item in members]  # torch wraps an optimizer's step


def _reset(owner: type, name: str, item: Any) -> None:
    if vars(owner)[name] is not item:
        setattr(owner, name, item)


def copy_back(tensor: torch.Tensor, value: torch.Tensor) -> None:
    """Copies a value into a tensor, unless they are equal."""
    if not torch.equal(tensor.to_dense(), value.to_dense()):
        tensor.data.copy_(value)


def _refill(target: Any, items: Any, add: str) -> None:
    if _list_ids(target) != _list_ids(items):
        target.clear()
        getattr(target, add)(items)


def _list_ids(items: Any) -> list[int]:
    return list(map(id, chain.from_iterable(items.items()) if isinstance(items, Mapping) else items))


_STATES: Sequence[tuple[Any, Callable[[Any], Any], Callable[..., object]]] = (
    (torch.Generator, torch.Generator.get_state, torch.Generator.set_state),
    (random.Random, random.Random.getstate, random.Random.setstate),
    (np.random.Generator, lambda g: g.bit_generator.state, lambda g, state: setattr(g.bit_generator, "state", state)),
    (np.random.RandomState, np.random.RandomState.get_state, np.random.RandomState.set_state),
    (np.ndarray, np.copy, np.copyto),
    ((list, deque), list, partial(_refill, add="extend")),
    # Hugging Face has dicts that make what is asked for.
    (MutableMapping, lambda m: dict(dict.items(m) if isinstance(m, dict) else m), partial(_refill, add="update")),
    (MutableSet, set, partial(_refill, add="__ior__")),
)
"""What can be restored: its type, how it is copied, and how it is set to a copy."""


@contextmanager
def preserve_state(
    modules: Iterable[nn.Module],
    devices: Iterable[int] = (),
    seed: int | None = 0,
    others: Iterable[Any] = (),
    *,
    copies_on_cpu: bool = True,
) -> Iterator[None]:
    """A context in which the modules work on copies of their buffers, and after which they are as before.

    Weights, attributes and random generators, which `seed` seeds for the context, are restored too, and so are
    `others`. Gradients are None within it.

    Args:
        copies_on_cpu: weights are copied there, which takes no memory of a GPU.
    """
    devices, attributes = list(devices), Attributes(modules, children=True)
    every = attributes.every
    objects = Objects([*list_values(every), *others], every)
    parameters = {id(p): p for m in every for p in m._parameters.values() if p is not None and not p.is_meta}
    weights = [_Weight(p, copies_on_cpu) for p in parameters.values() if not is_stand_in(p)]
    copies: dict[int, torch.Tensor] = {}
    with torch.random.fork_rng(devices=devices), seeding_python_generators(seed):
        if seed is not None:
            seed_generators(seed, devices)
        try:
            for module in every:
                for name, buffer in module._buffers.items():
                    if buffer is not None:
                        # A buffer shared by two modules stays one tensor.
                        module._buffers[name] = copies.setdefault(id(buffer), buffer.detach().clone())
            for weight in weights:
                weight.parameter.grad = None
            yield
        finally:
            attributes.restore()
            objects.restore()
            for weight in weights:
                weight.parameter.grad = None  # first: comparing the values may need the memory
            for weight in weights:
                weight.restore()


class _Weight:
    """A parameter as it is now, to be restored."""

    def __init__(self, parameter: nn.Parameter, on_cpu: bool) -> None:
        self.parameter, self._gradient = parameter, parameter.grad
        self._kind, self._items = type(parameter), dict(vars(parameter))
        self._is_trained, self._storage = parameter.requires_grad, parameter.data
        self._value = parameter.detach().to("cpu" if on_cpu else parameter.device, copy=True)

    def restore(self) -> None:
        parameter, storage = self.parameter, self._storage
        if type(parameter) is not self._kind:  # a placeholder was written into it
            swap_tensors: Any = torch.utils.swap_tensors
            swap_tensors(parameter, nn.Parameter(storage, self._is_trained))
            vars(parameter).update(self._items)
        if parameter.data_ptr() != storage.data_ptr() or parameter.shape != storage.shape:
            parameter.data = storage
        if not torch.equal(storage.to(self._value.device), self._value):
            storage.copy_(self._value)
        if parameter.requires_grad != self._is_trained:
            parameter.requires_grad_(self._is_trained)
        parameter.grad = self._gradient


@contextmanager
def running(model: nn.Module, devices: Iterable[int], training: bool) -> Iterator[None]:
    """A context for a forward in a mode, after which the model is as before."""
    with preserve_state([model], devices):
        names = {name for name, _ in model.named_parameters()}
        for module in model.modules():
            module.training = training  # a user's own train() may have side effects
        yield
        if changed := names ^ {name for name, _ in model.named_parameters()}:
            raise CaptureError(
                f"the forward makes or removes the parameter {min(changed)!r}, which no optimizer would train; run the "
                "model once before it is profiled, or make the parameter where the model is made"
            )
        frozen = [parameter for parameter in model.parameters() if not parameter.requires_grad]
    for parameter in frozen:  # by the forward itself, before a plain loop's first update
        parameter.requires_grad_(False)


def list_cuda_devices(model: nn.Module, sample: Any) -> list[int]:
    """Returns the indices of the devices on which the model or the sample has tensors."""
    tensors = [*model.parameters(), *model.buffers(), *tree_leaves(sample)]
    indices = {t.device.index for t in tensors if isinstance(t, torch.Tensor) and t.device.type == "cuda"}
    return sorted(index for index in indices if index is not None)


def seed_generators(seed: int, devices: Iterable[int]) -> None:
    """Seeds the generators of the CPU and of CUDA devices."""
    torch.default_generator.manual_seed(seed)
    for index in devices:
        torch.cuda.default_generators[index].manual_seed(seed)


def read_python_generators() -> tuple[Any, ...]:
    """Returns the states of the generators of Python and NumPy, which compare by value."""
    kind, keys, *rest = np.random.get_state(legacy=True)
    return random.getstate(), kind, np.asarray(keys).tobytes(), *rest


@contextmanager
def seeding_python_generators(seed: int | None) -> Iterator[None]:
    """A context for which the generators of Python and NumPy are seeded, unless by None, and then restored."""
    states = random.getstate(), np.random.get_state()
    if seed is not None:
        random.seed(seed)
        np.random.seed(seed % 2**32)
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
