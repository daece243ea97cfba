"""A forward of a slice: the model's own forward, without the calls of other stages.

Life of a forward:

1. The model's forward runs from its beginning. A call of an earlier stage is not made: it returns placeholders of the
   shapes that the earlier stage has sent. What depends on the model's inputs alone is computed again.
2. At the first call of this stage the received tensors take the places of their placeholders, wherever the forward
   keeps them. From here on everything is real, and the modules run as they are.
3. At the first call of a later stage the forward is left, by an exception that passes through the model. What later
   stages read is collected into the bundle that is sent on.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.utils.checkpoint
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import BackwardHook

from pipedream.capture.errors import CutFailed, SliceErrors
from pipedream.capture.placeholder import (
    NumbersNeeded,
    Placeholder,
    collecting_errors,
    converting_placeholders,
    mark_missing,
    meta_like,
    noting_origins,
    placeholder_like,
    plain_meta,
    swap_tensors,
)
from pipedream.capture.preserve_state import seeding_python_generators
from pipedream.capture.structure import (
    PLAIN,
    SameAs,
    SavedAttribute,
    find_leaf,
    find_prefix,
    map_leaves,
    name_next_call,
    walk,
    walk_arguments,
    wrapping_calls,
)
from pipedream.core.model.graph import Value
from pipedream.core.user_code import note_module, split_arguments

if TYPE_CHECKING:
    from pipedream.capture.slice import ModelSlice

Places = dict[str, list[tuple[Value, str]]]
"""For each call, values with their paths in its arguments or its output."""


class _Left(BaseException):
    """Leaves the model's forward; a BaseException, so that ``except Exception`` in the model does not catch it."""


@dataclass(frozen=True)
class Unsent:
    """A part of a bundle in which meta tensors stand for tensors that are not sent; opaque to torch's pytrees."""

    value: Any


def _take_backward_hooks(
    modules: Sequence[tuple[str, nn.Module]], saved: list[SavedAttribute]
) -> dict[str, Callable[[], Any]]:
    """Takes full backward hooks from modules, and returns path -> what makes them for a call, as torch does.

    Torch would set them up on the placeholders with which a call begins, or in a stage in which it does not end.
    """
    makers: dict[str, Callable[[], Any]] = {}
    for path, module in modules:
        if module._backward_pre_hooks or (module._backward_hooks and module._is_full_backward_hook):
            hooks = module._backward_hooks, module._backward_pre_hooks
            makers[path] = partial(BackwardHook, module, *(list(slot_hooks.values()) for slot_hooks in hooks))
            for slot, slot_hooks in zip(("_backward_hooks", "_backward_pre_hooks"), hooks, strict=True):
                saved.append((module.__dict__, slot, slot_hooks))
                module.__dict__[slot] = {}
    return makers


class SliceForward:
    """One forward of a slice."""

    def __init__(self, part: ModelSlice, arriving: Any) -> None:
        self.part = part
        self.begun = part.is_first  # its own part has begun
        self._errors = SliceErrors(part)
        self.counts: dict[str, int] = {}
        self.values: dict[Value, Any] = {}
        self.placeholders: dict[Value, list[torch.Tensor]] = {}
        if part.is_first:
            args, kwargs = split_arguments(arriving)
            self.inputs, self.outputs, self.results = (list(args), kwargs), {}, {}
        else:
            self.inputs, self.outputs, self.results = (arriving[k].value for k in ("inputs", "outputs", "results"))
            self.values = {v: t for v, t in zip(part.received, arriving["values"], strict=True) if t is not None}
        self._input_names = {
            path: find_prefix(path, part.graph.inputs) or path
            for path, leaf in walk_arguments(*self.inputs)
            if isinstance(leaf, torch.Tensor)
        }
        self._differs = set(self._input_names.values()) != set(part.graph.inputs)
        self.described: dict[str, Any] = {}
        tensors = [leaf for _, leaf in walk(arriving) if isinstance(leaf, torch.Tensor) and not leaf.is_meta]
        self.real_device = tensors[0].device if tensors else torch.device("cpu")
        self.frames: list[str] = [""]  # calls that are open, the innermost last
        self.frame_counts: dict[str, int] = {}
        self.backward_hooks: dict[str, Callable[[], Any]] = {}
        self.fill_in: Callable[[Any], None] = _do_nothing
        self.is_done = False  # at the first call of a later stage
        self.last_call = ""

    def result(self) -> Any:
        part = self.part
        self.entered = args, kwargs = _copy_sent(part, self.inputs if part.is_first else self._restore_inputs())
        if part.reseed is not None:
            part.reseed("")
        if part.is_first and part.on_begin is not None:
            part.on_begin()
        if part.is_first and part.is_last:
            with self._seeding_python(), self._wrapping_calls(), _replacing_checkpoints(self._make_repeatable):
                return part.model(*args, **kwargs)
        fast = torch.backends.mha.get_fastpath_enabled()
        torch.backends.mha.set_fastpath_enabled(False)  # it bypasses the modules inside
        output = None
        try:
            with (
                collecting_errors() as raised,
                converting_placeholders(),
                noting_origins() if part.fills_in else nullcontext(_do_nothing) as self.fill_in,
                self._seeding_python(),
                self._wrapping_calls(),
                _replacing_checkpoints(self._make_repeatable),
                _Functions(self) if part.graph.replayed else nullcontext(),
            ):
                output = part.model(*args, **kwargs)
        except _Left:
            # With an error about numbers that the model has caught, it may have come here by another path.
            if not raised:
                return self._make_bundle()
        except NumbersNeeded as error:
            raise self._errors.numbers_needed(error, self.frames[-1]) from error
        except Exception as error:
            if self.is_done:
                raise self._errors.caught_leaving() from error
            note_module(error, part.model.named_modules())
            raise
        finally:
            torch.backends.mha.set_fastpath_enabled(fast)
        if raised:
            raise self._errors.numbers_needed(raised[0], self.frames[-1]) from raised[0]
        if self.is_done:
            raise self._errors.caught_leaving()
        if not part.is_last or not self.begun:
            missed = (part.stop_at if self.begun else part.begin_at) or ""
            raise self._errors.other_path(missed, f"it ended without calling {missed!r}", self.last_call)
        self.fill_in(output)
        mark_missing(output, partial(self._errors.explain_unsent, inputs=self.entered))
        return output

    def _restore_inputs(self) -> Any:
        """The model's inputs: those that a later layer reads were received, the others are placeholders."""
        real = {value.sites[0].path: tensor for value, tensor in self.values.items() if value.born < 0}
        args, kwargs = self.inputs

        def restored(path: str, leaf: Any) -> Any:
            name = find_prefix(path, real)
            if name is not None:
                return find_leaf(real[name], path.removeprefix(name).lstrip("/"))
            return self._restore_placeholder(path, leaf)

        return map_leaves(restored, list(args)), map_leaves(restored, kwargs)

    def _restore_placeholder(self, path: str, leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor) and leaf.is_meta:
            return placeholder_like(leaf.detach(), self.real_device, leaf.requires_grad)
        return leaf

    def _seeding_python(self) -> AbstractContextManager[None]:
        """Seeds the generators of Python and NumPy as torch's is at the beginning of the forward, if they are used."""
        if not self.part.graph.draws_in_python:
            return nullcontext()
        return seeding_python_generators(torch.default_generator.initial_seed())

    def _make_repeatable(self, run: Callable[..., Any], repeats: bool) -> Callable[..., Any]:
        """Returns a function that makes its calls as this forward does now: the first time only if it `repeats`."""
        part, reseed, counts, real_device = self.part, self.part.reseed, dict(self.counts), self.real_device

        def repeatable(*args: Any, **kwargs: Any) -> Any:
            nonlocal repeats
            with part.repeating(reseed, dict(counts), real_device) if repeats else nullcontext():
                repeats = True
                return run(*args, **kwargs)

        return repeatable

    @contextmanager
    def _wrapping_calls(self) -> Iterator[None]:
        part = self.part
        with wrapping_calls(part.watched, self._call) as saved:
            self.backward_hooks = _take_backward_hooks(part.shared_modules, saved)
            for name in part.foreign_glue:
                owner, _, slot = name.rpartition(".")
                module = part.model.get_submodule(owner)
                slots: Any = module._parameters if slot in module._parameters else module._buffers
                tensor = slots[slot]
                if tensor is not None and not isinstance(tensor, Placeholder):
                    saved.append((slots, slot, tensor))
                    slots[slot] = placeholder_like(tensor, self.real_device, tensor.requires_grad)
            yield

    def _call(self, path: str, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if torch._C._functorch.peek_interpreter_stack() is not None:  # as in the recording, no call of its own
            return original(*args, **kwargs)
        part = self.part
        name = name_next_call(self.counts, path)
        if self.is_done:  # the model has caught it
            raise _Left
        self.last_call = name
        if not self.begun:
            if name == part.begin_at:
                self._begin(name, args, kwargs)
            elif name in self.outputs:
                return self._skip(name, args, kwargs)
            else:
                self._find(_find_arguments(part.arrive_in.get(name, ()), args, kwargs))
        if self.begun:
            self._keep(name, _find_arguments(part.leave_in.get(name, ()), args, kwargs))
            if name == part.stop_at:
                self.is_done = True
                raise _Left
            if path in part.seeded and part.reseed is not None:
                part.reseed(name)
        make_hook = self.backward_hooks.get(path) if self.begun and name not in part.open_at_stop else None
        hook = make_hook and make_hook()
        args = hook.setup_input_hook(args) if hook else args
        self.frames.append(name)
        try:
            output = part.compiled.get(name, original)(*args, **kwargs)
        finally:
            self.frames.pop()
        output = hook.setup_output_hook(output) if hook else output
        if self.begun:
            leaving = list(_find_tensors(part.leave_out.get(name, ()), output))
            self.fill_in([tensor for _, tensor in leaving])
            self._keep(name, leaving)
            if name in part.described:
                self._describe(name, args, kwargs, output)
        return output

    def _keep(self, name: str, values: Iterable[tuple[Value, torch.Tensor]]) -> None:
        """Keeps what the call of this name takes or returns and later stages read."""
        for value, tensor in values:
            before = self.values.get(value)
            self.values[value] = tensor
            if before is not None and before is not tensor and self._differs and not _is_cast(tensor, before):
                raise CutFailed(self.part.stop_at or "", self._errors.explain_two_tensors(value, name, self.entered))

    def _skip(self, name: str, args: Any, kwargs: Any) -> Any:
        part = self.part
        # The modules inside are not called; their later calls must keep their numbers.
        for path, count in part.calls_inside[name].items():
            self.counts[path] = self.counts.get(path, 0) + count
        self._find(_find_arguments(part.arrive_in.get(name, ()), args, kwargs))

        def restored(path: str, leaf: Any) -> Any:
            if isinstance(leaf, SameAs):
                return _find_argument(leaf.path, args, kwargs)
            return self._restore_placeholder(path, leaf)

        output = map_leaves(restored, self.outputs[name])
        self._find(_find_tensors(part.arrive_out.get(name, ()), output))
        return output

    def _find(self, placeholders: Iterator[tuple[Value, torch.Tensor]]) -> None:
        for value, placeholder in placeholders:
            self.placeholders.setdefault(value, []).append(placeholder)

    def _begin(self, name: str, args: Any, kwargs: Any) -> None:
        """Puts the received tensors into the places of their placeholders."""
        part = self.part
        self._find(_find_arguments(part.arrive_in.get(name, ()), args, kwargs))
        for value, received in list(self.values.items()):
            if value.born < 0:
                continue
            places = list({id(leaf): leaf for leaf in self.placeholders.get(value, ())}.values())
            if not places:
                raise self._errors.other_path(
                    name, f"it did not use the {value.name!r} that was received,", self.last_call
                )
            for real_device in places:
                if real_device is received:
                    continue
                # All variables of the forward that hold the placeholder see the received tensor from here on.
                swap_tensors(real_device, _make_alias(received))
                self.values[value] = real_device
        self.begun = True
        if part.on_begin is not None:
            part.on_begin()

    def _describe(self, name: str, args: Any, kwargs: Any, output: Any) -> None:
        arguments = {id(leaf): path for path, leaf in walk_arguments(args, kwargs) if not isinstance(leaf, PLAIN)}

        def described(_: str, leaf: Any) -> Any:
            if id(leaf) in arguments:
                return SameAs(arguments[id(leaf)])
            if isinstance(leaf, torch.Tensor):
                return meta_like(leaf)
            # An object that cannot be sent, such as a cache that there is in evaluation only, is None elsewhere.
            return leaf if isinstance(leaf, (*PLAIN, Enum)) else None

        self.described[name] = map_leaves(described, output)

    def _make_bundle(self) -> dict[str, Any]:
        part = self.part
        for value in (value for value in part.sent if part.is_first and value.born < 0):
            path = value.sites[0].path
            if isinstance(value_here := _find_argument(path, *self.inputs), (torch.Tensor, list, tuple)):
                self.values[value] = value_here
            elif value_here is not None or torch.is_grad_enabled():
                raise self._errors.missing_input(path, value_here, self.inputs)
        # An optional input that every stage sees as None, such as the labels of a prediction, is not lacking.
        expected = (v for v in part.sent if v.born >= 0 or _find_argument(v.sites[0].path, *self.inputs) is not None)
        lacking = [value for value in expected if value not in self.values]
        if lacking:
            raise self._errors.other_path(
                part.stop_at or "",
                f"it did not make the {lacking[0].name!r}, which a later stage needs,",
                self.last_call,
            )
        unsent = [value for value in part.sent if isinstance(self.values.get(value), Placeholder)]
        if unsent and self.begun:
            raise CutFailed(
                part.begin_at or "", self._errors.explain_unsent(f"the value {unsent[0].name!r}", self.entered)
            )
        outputs = {**self.outputs, **self.described}
        open_calls = part.open_at_stop
        results = {name: value for name, value in self.results.items() if name.rpartition("/")[0] in open_calls}
        return {
            "inputs": Unsent(
                _strip_inputs(self.inputs, self._input_names, part.graph.inputs) if part.is_first else self.inputs
            ),
            "outputs": Unsent({name: outputs[name] for name in part.described if name in outputs}),
            "values": [self.values.get(value) for value in part.sent],
            "results": Unsent(results),
        }

    # -- functions that need numbers ------------------------------------------------------------------

    def apply(self, function: Any, args: Any, kwargs: Any) -> Any:
        """Applies a function that needs numbers, or returns the result that an earlier stage has sent.

        Both stages run the same code of the same call with the same numbers so far, so the n-th application of the
        function in this call is the same for both.
        """
        if torch._C._functorch.peek_interpreter_stack() is not None:  # torch.func calls it
            return function(*args, **kwargs)
        name = f"{self.frames[-1]}/{function.__name__}"
        count = self.frame_counts[name] = self.frame_counts.get(name, 0) + 1
        name = f"{name}@{count}"
        if not self.begun and name in self.results:
            return map_leaves(self._restore_placeholder, self.results[name])
        result = function(*args, **kwargs)
        if self.begun and self.frames[-1] in self.part.open_at_stop:
            self.results[name] = map_leaves(lambda _, leaf: _strip_numbers(leaf), result)
        return result


@contextmanager
def _replacing_checkpoints(make_repeatable: Callable[..., Callable[..., Any]]) -> Iterator[None]:
    """Makes the calls in checkpointed functions the same way when they are repeated.

    With placeholders among the arguments, which a checkpoint would save, the function runs without one. Of a
    stage's own calls this concerns the first at most, whose activations are then kept.
    """
    module: Any = torch.utils.checkpoint
    name = "_checkpoint_without_reentrant_generator"
    if hasattr(module, f"{name}_impl"):  # from torch 2.14 on, which does not call the other one
        name += "_impl"
    generator, function = getattr(module, name), module.CheckpointFunction

    def nothing() -> Iterator[None]:
        yield

    def passing(run: Any, /, *args: Any, **kwargs: Any) -> Any:
        if _has_placeholder(args, kwargs):
            return nothing()
        return generator(make_repeatable(run, repeats=True), *args, **kwargs)  # the checkpoint calls it first

    class Passing:
        @staticmethod
        def apply(run: Any, preserve: bool, *args: Any) -> Any:
            if _has_placeholder(args, {}):
                return run(*args)
            return function.apply(make_repeatable(run, repeats=False), preserve, *args)

    setattr(module, name, passing)
    module.CheckpointFunction = Passing
    try:
        yield
    finally:
        setattr(module, name, generator)
        module.CheckpointFunction = function


class _Functions(TorchFunctionMode):
    """Sees the functions whose results are sent."""

    def __init__(self, run: SliceForward) -> None:
        super().__init__()
        self._run = run
        self._names = set(run.part.graph.replayed)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") in self._names:
            return self._run.apply(func, args, kwargs or {})
        return func(*args, **(kwargs or {}))


def _make_alias(received: torch.Tensor) -> torch.Tensor:
    """A tensor of its own: a graph may refer to the received one itself, which then cannot be swapped."""
    alias = received.view_as(received)
    # Of a stand-in torch keeps a reference when the shape is new to it, and then cannot swap it either.
    return alias.view_as(received) if weakref.getweakrefs(alias) else alias


def _do_nothing(value: Any) -> None:
    pass


def _has_placeholder(args: Any, kwargs: Any) -> bool:
    return any(isinstance(leaf, Placeholder) for _, leaf in walk_arguments(args, kwargs))


def _copy_sent(part: ModelSlice, inputs: Any) -> Any:
    """Copies those inputs that are sent on as they came: each stage runs the code that writes into them."""
    sent = {value.sites[0].path for value in part.sent if value.born < 0}

    def copied(path: str, leaf: Any) -> Any:
        is_sent = isinstance(leaf, torch.Tensor) and find_prefix(path, sent) is not None
        return leaf.clone() if is_sent else leaf

    return tuple(map_leaves(copied, value) for value in inputs)


def _strip_inputs(inputs: Any, names: Mapping[str, str], usual: Collection[str]) -> list[Any]:
    """Returns the model's inputs without numbers, which are sent for what the sample shows to be read later.

    If the batch has other inputs than the sample, any stage may read those, or make up for the ones that are missing by
    others: a decoder reads ``decoder_input_ids``, or the encoder's words, if there are no labels.

    Args:
        names: path of a tensor -> the name by which the sample had it.
        usual: the names of the sample's inputs.
    """
    differs = set(names.values()) != set(usual)

    def strip(path: str, leaf: Any) -> Any:
        is_read = differs and path in names and (names[path] not in usual or not leaf.is_floating_point())
        return leaf if is_read else _strip_numbers(leaf)

    return [map_leaves(strip, value) for value in inputs]


def _is_cast(tensor: torch.Tensor, before: torch.Tensor) -> bool:
    """Whether a tensor is another in its own dtype, as where the forward undoes what autocast has done."""
    return (
        tensor.dtype != before.dtype and tensor.shape == before.shape and torch.equal(tensor, before.to(tensor.dtype))
    )


def _strip_numbers(leaf: Any) -> Any:
    if isinstance(leaf, Placeholder):
        return meta_like(plain_meta(leaf)).requires_grad_(leaf.wants)
    return meta_like(leaf) if isinstance(leaf, torch.Tensor) and not leaf.is_meta else leaf


def _find_argument(path: str, args: Any, kwargs: Any) -> Any:
    return find_leaf(dict(enumerate(args)) | kwargs, path)


def _find_arguments(sites: Sequence[tuple[Value, str]], args: Any, kwargs: Any) -> Iterator[tuple[Value, torch.Tensor]]:
    return _find_tensors(sites, dict(enumerate(args)) | kwargs)


def _find_tensors(sites: Sequence[tuple[Value, str]], holder: Any) -> Iterator[tuple[Value, torch.Tensor]]:
    leaves = ((value, find_leaf(holder, path)) for value, path in sites)
    return ((value, leaf) for value, leaf in leaves if isinstance(leaf, torch.Tensor))
