"""A slice of a model: the part that a stage runs of a model that runs by its own forward."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import zip_longest
from operator import attrgetter
from types import FunctionType
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import nn

from pipedream.capture.preserve_state import GENERATORS, Objects, list_values
from pipedream.capture.slice_forward import Places, SliceForward
from pipedream.capture.split import list_skipped_calls
from pipedream.capture.structure import name_next_call, wrapping_calls
from pipedream.core.model.graph import LayerGraph, Value, ValueSite

_ABSENT = object()
_SHARED = "_output_capturing_hooks_installed"  # Hugging Face's note that hooks are there, which stay
_Change = tuple[nn.Module, str, Any, Any]  # attribute, value before, value now

_LEFT: WeakKeyDictionary[nn.Module, list[_Change]] = WeakKeyDictionary()
"""Model -> what its last slice has set in its latest forward."""

_NOT_HELD = (*GENERATORS, FunctionType, partial)
_MAX_COPIED = 1024  # numbers
_WATCHED = 4  # forwards of each slice; looking at what modules hold takes up to milliseconds


@dataclass
class Kept:
    """What the slices of a model in one process have left in containers and objects.

    Attributes:
        stages: how many there are in this process.
        watched: forwards that were looked at.
        is_written: one of them has written into a container or object; if none has, none is looked at any more.
        first: what they held before each slice's first forward.
    """

    stages: int = 0
    watched: int = 0
    is_written: bool = False
    latest: _Attributes | None = None
    left: dict[_Attributes, Objects] = field(default_factory=dict)
    first: list[Objects] = field(default_factory=list)

    @property
    def is_watching(self) -> bool:
        return self.stages != 1 and (self.is_written or self.watched < _WATCHED * max(self.stages, 1))


class SliceTables:
    """What slices of a model share; `inside`: paths of calls in a call, `in_leaves`: ids of modules in leaf calls."""

    def __init__(self, model: nn.Module, graph: LayerGraph, kept: Kept | None = None) -> None:
        calls, self.kept = graph.calls, kept or Kept()
        self.starts = {call.name: call.start for call in calls}
        self.leaves = [call for call, after in zip_longest(calls, calls[1:]) if after is None or after.start > call.end]
        self.inside: dict[str, list[str]] = {}
        for number, call in enumerate(calls):
            end = bisect_left(calls, call.end, key=attrgetter("start"))
            self.inside[call.name] = [inner.path for inner in calls[number + 1 : end]]
        self.every = list(model.modules())
        self.modules = dict(model.named_modules(remove_duplicate=False))
        self.tensors: dict[str, torch.Tensor] = dict(model.named_parameters(remove_duplicate=False))
        self.tensors.update(model.named_buffers(remove_duplicate=False))
        self.in_leaves = {id(m) for call in self.leaves for m in self.modules[call.path].modules()}
        called = self.in_leaves | {id(model), *(id(self.modules[call.path]) for call in calls)}
        self.uncalled = [m for m in self.every if id(m) not in called]
        self.evaluation = None if graph.evaluation is None else SliceTables(model, graph.evaluation)


class ModelSlice(nn.Module):
    """Layers first <= i < last of a model that runs by its own forward.

    Called with the model's inputs or the bundle of the previous slice, it returns the next one's bundle or the model's
    output. Its parameters and buffers are those of its layers, under the model's names.

    Attributes:
        on_begin: called when the slice's own part begins.
        reseed: called with "" before the forward, and with the name of each call that is seeded before it.
        begin_at, stop_at: the first call of the slice, and of the next one; None at the ends of the model.
        received, sent: values that cross these cuts.
        arrive_in, arrive_out: for each call, values whose placeholders it takes or returns before the slice begins.
        leave_in, leave_out: for each call, values that it takes or returns in the slice and that are sent.
        described: calls whose outputs' shapes the next slice needs.
        calls_inside: how often each watched module is called inside a call that is skipped.
        watched: modules whose calls are seen, with their paths.
        seeded: paths of modules before whose calls the generator is seeded.
        compiled: call -> what runs in place of its forward.
        shared_modules: paths and modules with calls that begin or end outside of this slice.
        foreign_glue: parameters and buffers that the forward reads but the slice does not own.
        open_at_stop: calls that have begun and not ended at the end of the slice; "" is the model.
        fills_in: what calls return is computed where they end (`postpone_returned`).
    """

    model: Any
    on_begin: Callable[[], None] | None = None
    reseed: Callable[[str], None] | None = None
    compiled: Mapping[str, Callable[..., Any]] = {}
    fills_in: bool = False
    _evaluating: ModelSlice | None

    def __init__(
        self, model: nn.Module, graph: LayerGraph, first: int, last: int, tables: SliceTables | None = None
    ) -> None:
        super().__init__()
        tables = tables or SliceTables(model, graph)
        self.__dict__["model"] = model  # not a submodule: the slice owns a part of it only
        self.graph = graph
        self.is_first, self.is_last = first == 0, last == len(graph.layers)
        self.names = tuple(dict.fromkeys(name for layer in graph.layers[first:last] for name in layer.parameters))
        starts, modules, tensors = tables.starts, tables.modules, tables.tensors
        self.begin_at = None if self.is_first else graph.layers[first].name
        self.stop_at = None if self.is_last else graph.layers[last].name
        begin = -1 if self.begin_at is None else starts[self.begin_at]
        end = max((call.end for call in graph.calls), default=0) + 1
        stop = end if self.stop_at is None else starts[self.stop_at]
        skipped = {call.name for call in list_skipped_calls(graph.calls, begin)}
        open_calls = {call.name for call in graph.calls if call.start <= begin < call.end}
        own_calls = [call for call in tables.leaves if begin <= call.start < stop]
        seeded = [call for call in own_calls if call.path in graph.seeded]
        self.seeded = {call.path for call in seeded}
        around = {c.path for c in graph.calls for moment in (begin, stop) if c.start < moment < c.end}
        self.kept = tables.kept
        whole = [model, *(modules[path] for path in sorted(around)), *tables.uncalled]
        self._attributes = _Attributes(model, whole, self.kept)
        self.open_at_stop = {""} | {call.name for call in graph.calls if call.start < stop < call.end}
        self.described = () if self.is_last else tuple(call.name for call in list_skipped_calls(graph.calls, stop))
        self.received = [] if self.is_first else _list_crossing(graph, begin)
        self.sent = [] if self.is_last else _list_crossing(graph, stop)
        visible, received = skipped | open_calls, set(self.received)
        arrive = _select_sites(self.received, lambda site: site.call in visible and site.moment <= begin)
        made_here = [value for value in self.sent if value not in received]
        leave = _select_sites(made_here, lambda site: begin <= site.moment <= stop)
        self.arrive_in, self.arrive_out = _group_by_call(arrive, "in"), _group_by_call(arrive, "out")
        self.leave_in, self.leave_out = _group_by_call(leave, "in"), _group_by_call(leave, "out")
        watched = skipped | {call.name for call in seeded} | set(self.described)
        watched |= {site.call for site, _ in (*arrive, *leave)}
        watched |= {name for name in (self.begin_at, self.stop_at) if name is not None}
        if graph.replayed:
            watched |= self.open_at_stop | open_calls
        paths = dict.fromkeys(name.partition("@")[0] for name in sorted(watched - {""}))
        self.watched = [(modules[path], path) for path in paths]
        around = skipped | self.open_at_stop | open_calls | {name for name in (self.begin_at, self.stop_at) if name}
        shared = {name.partition("@")[0] for name in around}
        self.shared_modules = (
            [] if self.is_first and self.is_last else [(path, modules[path]) for path in sorted(shared)]
        )
        self._watched_calls, self._interval = watched, (begin, math.inf if self.is_last else stop)
        self.calls_inside = {
            name: Counter(path for path in inside if path in paths)
            for name, inside in tables.inside.items()
            if name in skipped
        }
        owned = {id(tensors[name]) for name in self.names}
        self.foreign_glue = [name for name in graph.glue if id(tensors[name]) not in owned]
        module_ids = {id(m) for call in own_calls for m in modules[call.path].modules()}
        self._owners = [(name, modules[name.rpartition(".")[0]], name.rpartition(".")[2]) for name in self.names]
        module_ids |= {id(owner) for _, owner, _ in self._owners}
        self._modules_here = [m for m in tables.every if id(m) in module_ids or id(m) not in tables.in_leaves]
        self.__dict__["_evaluating"] = _make_evaluating(model, graph, first, last, tables)

    def compile_inside(self, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        """Compiles the outermost modules that lie within the slice, which are then seeded at their entry only.

        Nothing is compiled if functions are seen (`LayerGraph.replayed`), and no module that other stages look into.
        """
        modules = dict(self.model.named_modules(remove_duplicate=False))
        begin, stop = self._interval
        inside: dict[str, set[str]] = {}
        end = -1
        for call in () if self.graph.replayed else self.graph.calls:
            if call.start < begin or call.end > stop or call.start < end or call.hides:
                continue
            module = modules[call.path]
            # Compiling gains nothing for torch's own modules that call one operation.
            is_single = type(module).__module__.startswith("torch.nn.") and not list(module.children())
            if is_single or module._compiled_call_impl is not None:
                continue
            hidden = {other.name for other in self.graph.calls if call.start < other.start < call.end}
            submodules = set(module.modules()) - {module}
            if not any(modules[name.partition("@")[0]] in submodules for name in self._watched_calls - hidden - {""}):
                inside[call.name], end = hidden, call.end
        hidden = {name for names in inside.values() for name in names}
        seeded = {
            name for name, names in inside.items() if any(inner.partition("@")[0] in self.seeded for inner in names)
        }
        self.seeded |= {name.partition("@")[0] for name in seeded}
        self._watched_calls = (self._watched_calls - hidden) | inside.keys()
        paths = dict.fromkeys(name.partition("@")[0] for name in sorted(self._watched_calls - {""}))
        self.watched = [(modules[path], path) for path in paths]
        compiled = {path: make(modules[path].forward) for path in {name.partition("@")[0] for name in inside}}
        self.compiled = {name: compiled[name.partition("@")[0]] for name in inside}

    # -- what it owns -------------------------------------------------------------------------------

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        yield from self._iterate_owned("_parameters", remove_duplicate)

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self._iterate_owned("_buffers", remove_duplicate)

    def _iterate_owned(self, slots: str, remove_duplicate: bool) -> Iterator[tuple[str, Any]]:
        ids: set[int] = set()
        for name, owner, slot in self._owners:
            tensor = getattr(owner, slots).get(slot)
            if tensor is not None and not (remove_duplicate and id(tensor) in ids):
                ids.add(id(tensor))
                yield name, tensor

    def modules(self, remove_duplicate: bool = True) -> Iterator[nn.Module]:
        """Its own modules, and those around them; not those whose calls all belong to other stages."""
        return iter(self._modules_here)

    def train(self, mode: bool = True) -> ModelSlice:
        for module in self._modules_here:
            module.training = mode
        return self

    # -- the forward --------------------------------------------------------------------------------

    def forward(self, arriving: Any) -> Any:
        part = self
        if self._evaluating is not None and not self.model.training:
            part = self._evaluating
            part.on_begin, part.reseed = self.on_begin, self.reseed
        run = SliceForward(part, arriving)
        if self.is_first and self.is_last:
            return run.result()
        with self._attributes.during(remain=self.is_last):
            return run.result()

    @contextmanager
    def repeating(
        self, reseed: Callable[[str], None] | None, counts: dict[str, int], real_device: torch.device
    ) -> Iterator[None]:
        """Seeds calls and makes the compiled ones, as a forward would after the calls in `counts`, and nothing else."""

        def call(path: str, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            name = name_next_call(counts, path)
            if reseed is not None and path in self.seeded:
                reseed(name)
            return self.compiled.get(name, original)(*args, **kwargs)

        paths = self.seeded | {name.partition("@")[0] for name in self.compiled}
        modules = [(module, path) for module, path in self.watched if path in paths]
        with torch.random.fork_rng([real_device] if real_device.type == "cuda" else []), wrapping_calls(modules, call):
            yield


def _make_evaluating(
    model: nn.Module, graph: LayerGraph, first: int, last: int, tables: SliceTables
) -> ModelSlice | None:
    """Returns what runs in evaluation mode, if the calls and values differ there."""
    if graph.evaluation is None:
        return None
    evaluating = ModelSlice(model, graph.evaluation, first, last, tables.evaluation)
    evaluating.fills_in = not evaluating.is_first
    return evaluating


class _Attributes:
    """What a slice's forwards leave on modules whose forwards run on other stages, too: attributes, and what they hold.

    A slice finds what its own forwards have set, as if it had the model to itself.

    Otherwise slices in one process would count ``self.step += 1`` several times, and find each other's placeholders.
    """

    def __init__(self, model: nn.Module, modules: Iterable[nn.Module], kept: Kept) -> None:
        self._model, self._kept = model, kept
        self._set_here: list[tuple[nn.Module, dict[str, Any]]] = [(module, {}) for module in modules]

    @contextmanager
    def during(self, *, remain: bool) -> Iterator[None]:
        """Context of a forward. What it sets is taken away again, or may remain until the next one, for the loss."""
        _take_back(_LEFT.pop(self._model, []))
        before_forward = self._take_kept() if self._kept.is_watching else None
        before = [dict(module.__dict__) for module, _ in self._set_here]
        for module, attributes in self._set_here:
            module.__dict__.update(attributes)
        try:
            yield
        finally:
            if before_forward is not None:
                self._kept.left[self], self._kept.latest = self._read_kept(), self
                self._kept.watched += 1
                self._kept.is_written |= not before_forward.holds()
            changes: list[_Change] = []
            for (module, attributes), was in zip(self._set_here, before, strict=True):
                for name, value in module.__dict__.items():
                    if was.get(name, _ABSENT) is not value and name != _SHARED:
                        attributes[name] = value
                        changes.append((module, name, was.get(name, _ABSENT), value))
            if remain:
                _LEFT[self._model] = changes
            else:
                _take_back(changes)

    def _take_kept(self) -> Objects:
        """Lets containers and objects hold what this slice has left there, unless they were changed since.

        Returns what they hold then.
        """
        kept = self._kept
        if kept.latest is None or not kept.left[kept.latest].holds():  # by the user: for all slices
            kept.left, kept.first = {}, []
        elif kept.latest is not self:
            for objects in [kept.left[self]] if self in kept.left else reversed(kept.first):
                objects.restore()
        before_forward = self._read_kept()
        if self not in kept.left:
            kept.first.append(before_forward)
        return before_forward

    def _read_kept(self) -> Objects:
        modules = [module for module, _ in self._set_here]
        return Objects(list_values(modules), modules, _is_not_held)


def _is_not_held(value: Any) -> bool:
    """Whether slices share a value: what is too large to copy at each forward, or no module's own."""
    if isinstance(value, torch.Tensor):
        return type(value) is not torch.Tensor or value.is_cuda or value.numel() > _MAX_COPIED
    return isinstance(value, _NOT_HELD) or (isinstance(value, np.ndarray) and value.size > _MAX_COPIED)


def _take_back(changes: Iterable[_Change]) -> None:
    for module, name, before, now in changes:
        if module.__dict__.get(name) is not now:
            continue  # set again since, by the user or to restore the model
        if before is _ABSENT:
            del module.__dict__[name]
        else:
            module.__dict__[name] = before


def _list_crossing(graph: LayerGraph, moment: int) -> list[Value]:
    return [value for value in graph.values if value.crosses(moment)]


def _select_sites(values: Sequence[Value], condition: Callable[[ValueSite], bool]) -> list[tuple[ValueSite, Value]]:
    return [(site, value) for value in values for site in value.sites if condition(site)]


def _group_by_call(sites: Sequence[tuple[ValueSite, Value]], end: str) -> Places:
    places: Places = {}
    for site, value in sites:
        if site.end == end:
            places.setdefault(site.call, []).append((value, site.path))
    return places
