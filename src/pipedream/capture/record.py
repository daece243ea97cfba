"""Records one forward of a model: the calls of its modules, and who makes, reads and writes each tensor.

A *moment* counts events. A tensor is identified by its Python object, as the forward passes it on.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from threading import get_ident
from traceback import walk_stack
from typing import Any

import torch
from torch import nn
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.hooks import RemovableHandle

from pipedream.capture.placeholder import meta_like
from pipedream.capture.preserve_state import read_python_generators
from pipedream.capture.structure import (
    PLAIN,
    READS_NUMBERS,
    find_prefix,
    is_in_place,
    is_stand_in,
    name_next_call,
    walk,
    walk_arguments,
    wrapping_calls,
)
from pipedream.core.model.graph import ValueSite
from pipedream.core.user_code import user_line

END = 2**40
"""The moment at which the model's output is read, after all others."""

IN_FUNCTION = "inside a custom autograd function"

_METADATA = {"size", "dim", "stride", "numel", "is_floating_point", "is_complex", "is_contiguous", "__len__",
             "get_device", "element_size", "storage_offset", "ndimension", "nelement", "type", "__hash__",
             "has_names", "is_same_size", "__format__", "__repr__", "retain_grad"}  # fmt: skip
"""Functions that read no numbers, for which a stage needs no more than a placeholder."""

_SWITCHES = "train", "training", "dropout", "dropout_p"
"""Arguments of operators that draw no random numbers if one of these is false or 0."""


@dataclass(eq=False)
class TensorRecord:
    """What happened to a tensor.

    Attributes:
        depends: whether its numbers depend on parameters or on random numbers; otherwise they are computed from the
            model's inputs alone, on each stage again.
        sources: names of the inputs ("0", "input_ids") and buffers (":name") that a tensor that does not depend
            is computed from.
        born: moment; -1 for inputs and state.
        last: moment of the last use.
        first_read, last_read: moments of the first and of the last function that has read it.
        parents: what its function has read.
        uses: moments at which something that depends is computed from it, if it does not depend itself.
        sites: where modules take or return it.
        made_by: name of the function.
        tensor: in a finished record without its numbers, except parameters and buffers.
        storage: which storage it is in.
        reads, looks: moments at which a parameter or buffer was read, or its dtype, device, ..., and the calls around.
    """

    tensor: torch.Tensor
    born: int
    depends: bool
    sources: frozenset[str] = frozenset()
    last: int = -1
    first_read: int = END
    last_read: int = -1
    uses: list[int] = field(default_factory=list)
    sites: list[ValueSite] = field(default_factory=list)
    made_by: str = ""
    parents: Sequence[TensorRecord] = ()
    state: str = ""
    storage: int = 0
    reads: list[tuple[int, CallRecord]] = field(default_factory=list)
    looks: list[tuple[int, CallRecord]] = field(default_factory=list)


@dataclass(eq=False)
class CallRecord:
    """One call of a module.

    Attributes:
        depending: operations inside whose results depend.
        opaque: an object in the output that is neither a tensor, a plain value nor an argument.
        whole: why it and the calls inside cannot be cut, or "". Before a "checkpointed" call, or one "hooked" by a full
            backward hook, which takes the gradients of the whole call, there may be a cut.
    """

    name: str
    path: str
    module: nn.Module
    parent: CallRecord | None
    start: int
    end: int = -1
    inner: list[CallRecord] = field(default_factory=list)
    depending: int = 0
    outputs: list[TensorRecord] = field(default_factory=list)
    opaque: str = ""
    whole: str = ""

    @property
    def free(self) -> bool:
        """Whether it computes from the model's inputs alone."""
        return not self.depending and not any(out.depends for out in self.outputs)

    def every(self) -> Iterator[CallRecord]:
        yield self
        for call in self.inner:
            yield from call.every()


@dataclass(eq=False)
class Recording:
    """The result of `record`."""

    root: CallRecord
    tensors: list[TensorRecord]
    writes: dict[int, list[int]]
    """Storage -> moments at which it was written."""
    draws: list[int]
    """Moments at which random numbers were drawn."""
    changed_by_forward: frozenset[str]
    """Names of the buffers that the forward writes or replaces."""
    attributes: tuple[str, ...]
    """Attributes that the forward sets on modules."""
    draws_in_python: bool
    """Whether the forward draws from the generators of Python or NumPy."""
    hooked: Sequence[tuple[int, int]] = ()
    """For each hook on a tensor, moments between which no stage may end, as it would get part of the gradient."""
    transformed: Sequence[tuple[int, CallRecord, str]] = ()
    """Operations inside a torch.func, one for each line: moment, call around them, place in the user's code."""

    def find_transformed(self, name: str) -> str:
        """Returns the last line inside a torch.func that a stage runs again which begins with this call, or ""."""
        start = next((call.start for call in self.root.every() if call.name == name), -1)
        places = [place for moment, call, place in self.transformed if moment < start < call.end]
        return places[-1] if places else ""


class _DrawWatch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes whether an operation draws random numbers, where no generator shows it: for stand-ins and other devices."""

    has_drawn = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded in func.tags:
            arguments = func._schema.arguments
            values = {argument.name: argument.default_value for argument in arguments} | kwargs
            values.update((argument.name, value) for argument, value in zip(arguments, args, strict=False))
            self.has_drawn |= all(values.get(name, True) for name in _SWITCHES)
        return func(*args, **kwargs)


class _Recorder(TorchFunctionMode):
    def __init__(self, model: nn.Module, changed_by_forward: frozenset[str]) -> None:
        super().__init__()
        self.moment = 0
        self.records: dict[int, TensorRecord] = {}  # they keep the tensors alive, so that no id is used again
        self.writes: dict[int, list[int]] = {}
        self.draws: list[int] = []
        self.hooks: list[tuple[int, int, RemovableHandle]] = []
        self.transformed: dict[tuple[int, str], tuple[int, CallRecord]] = {}
        self.names = {id(module): name for name, module in reversed(list(model.named_modules()))}
        self.counts: dict[str, int] = {}
        self.root = CallRecord("", "", model, None, 0)
        self.stack = [self.root]
        self.thread = get_ident()
        for name, parameter in model.named_parameters(remove_duplicate=False):
            self._add_state(name, parameter, depends=True)
        for name, buffer in model.named_buffers(remove_duplicate=False):
            self._add_state(name, buffer, depends=name in changed_by_forward)

    def _add_state(self, name: str, tensor: torch.Tensor, depends: bool) -> None:
        if id(tensor) not in self.records:
            sources = frozenset() if depends else frozenset([f":{name}"])
            self.records[id(tensor)] = TensorRecord(tensor, -1, depends, sources, state=name)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", str(func))
        result, random = self._run(func, args, kwargs)
        # `type` also converts.
        if (name in _METADATA or name == "__get__") and not isinstance(result, torch.Tensor):
            if args and (record := self.records.get(id(args[0]))) is not None and record.state:
                record.looks.append((self.moment, self.stack[-1]))
            return result
        self._note(name, args, kwargs, result, random)
        if torch._C._functorch.peek_interpreter_stack() is not None:
            self.transformed.setdefault((id(self.stack[-1]), user_line()), (self.moment, self.stack[-1]))
        return result

    def _run(self, func: Any, args: Any, kwargs: Any) -> tuple[Any, bool]:
        """Returns a function's result, and whether it has drawn random numbers."""
        tensors = [leaf for _, leaf in walk([list(args), kwargs]) if isinstance(leaf, torch.Tensor)]
        if tensors and "device" not in kwargs and not any(is_stand_in(leaf) or not leaf.is_cpu for leaf in tensors):
            before = self._read_generator()
            return func(*args, **kwargs), before != self._read_generator()
        with _DrawWatch() as watch:  # type: ignore[no-untyped-call]
            return func(*args, **kwargs), watch.has_drawn

    def _read_generator(self) -> bytes:
        # The first words hold seed and position; comparing all 5 KB is as good and simple.
        with temporarily_clear_interpreter_stack():  # a torch.func that surrounds it would wrap the state
            return torch.default_generator.get_state().numpy().tobytes()

    def _note(self, name: str, args: Any, kwargs: Any, result: Any, random: bool) -> None:
        self.moment += 1
        arguments = [self.record_of(leaf) for _, leaf in walk([list(args), kwargs]) if isinstance(leaf, torch.Tensor)]
        results = [leaf for _, leaf in walk(result) if isinstance(leaf, torch.Tensor)]
        depends = random or any(argument.depends for argument in arguments)
        if random:
            self.draws.append(self.moment)
        if depends and not results and name in READS_NUMBERS:
            depends = False  # no tensor is computed: what only looks at numbers makes no call depend
        sources = frozenset().union(*(argument.sources for argument in arguments)) if not depends else frozenset()
        written = self._list_written(name, args, kwargs)
        if depends:
            for call in self.stack:
                call.depending += 1
        for argument in arguments:
            argument.last = argument.last_read = self.moment
            if name == "register_hook":
                # In a later stage it would miss the gradients of what has read the tensor before.
                self.hooks.append((min(argument.first_read, self.moment), self.moment, result))
            else:
                argument.first_read = min(argument.first_read, self.moment)
            if not argument.depends and (depends or name in READS_NUMBERS):  # by which all stages decide again
                argument.uses.append(END if name in READS_NUMBERS else self.moment)
            if argument.state:
                argument.reads.append((self.moment, self.stack[-1]))
        for tensor in results:
            if id(tensor) not in self.records:
                self.records[id(tensor)] = TensorRecord(
                    tensor, self.moment, depends, sources, self.moment, made_by=name, parents=arguments
                )
        for tensor in written:
            target, storage = self.record_of(tensor), _find_storage(tensor)
            self.writes.setdefault(storage, []).append(self.moment)
            if depends and not target.depends:
                for record in list(self.records.values()):
                    if not record.depends and (record is target or _find_storage(record.tensor) == storage):
                        self._make_depend(record, name)
            elif not depends:
                target.sources |= sources

    def _make_depend(self, record: TensorRecord, name: str) -> None:
        if record.born < 0 and not record.state:  # an input, from which what has read it before is computed again
            # Under a key that is no tensor's id, as that of the tensor now finds what was written.
            self.records[-id(record.tensor)] = replace(record, sites=record.sites[:1])
            record.sites = record.sites[1:]
        record.depends, record.born, record.made_by = True, self.moment, name

    def _list_written(self, name: str, args: Any, kwargs: Any) -> list[torch.Tensor]:
        out = kwargs.get("out")
        written = [out] if isinstance(out, torch.Tensor) else []
        if (  # three names only look like those of in-place operators
            is_in_place(name) and name != "__index__" and name != "__int__" and name != "__invert__"
        ) or name == "__setitem__":
            written += [args[0]] if args and isinstance(args[0], torch.Tensor) else []
        if kwargs.get("inplace") is True and args and isinstance(args[0], torch.Tensor):
            written.append(args[0])
        return written

    def list_hooked(self) -> list[tuple[int, int]]:
        """Returns the intervals of `Recording.hooked`; a hook that the forward removes may have gone at any moment."""
        remaining = [handle.id in (handle.hooks_dict_ref() or ()) for _, _, handle in self.hooks]
        return [(first, last if here else END) for (first, last, _), here in zip(self.hooks, remaining, strict=True)]

    def record_of(self, tensor: torch.Tensor) -> TensorRecord:
        while id(tensor) not in self.records and torch._C._functorch.is_functorch_wrapped_tensor(tensor):
            tensor = torch._C._functorch.get_unwrapped(tensor)
        if id(tensor) not in self.records:  # made where no function was seen
            self.records[id(tensor)] = TensorRecord(tensor, self.moment, True, made_by="an operation that was not seen")
        return self.records[id(tensor)]

    def call(self, module: nn.Module, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if torch._C._functorch.peek_interpreter_stack() is not None:  # no stage can begin inside a torch.func
            return original(*args, **kwargs)
        call = self._enter(module, args, kwargs)
        try:
            output = original(*args, **kwargs)
        except BaseException:
            while self.stack.pop() is not call:  # above it are calls that failed as they were entered
                pass
            if call.parent is not None:  # the model may catch the error, and the call has no end
                call.parent.inner.remove(call)
            raise
        self._leave(call, args, kwargs, output)
        return output

    def _enter(self, module: nn.Module, args: Any, kwargs: Any) -> CallRecord:
        self.moment += 1
        path = self.names[id(module)]
        name = name_next_call(self.counts, path)
        hooked = module._backward_pre_hooks or (module._backward_hooks and module._is_full_backward_hook)
        whole = self._explain_whole() or ("hooked" if hooked else "")
        call = CallRecord(name, path, module, self.stack[-1], self.moment, whole=whole)
        self.stack[-1].inner.append(call)
        self.stack.append(call)
        for where, leaf in walk_arguments(args, kwargs):
            if isinstance(leaf, torch.Tensor):
                self.record_of(leaf).sites.append(ValueSite(name, "in", where, self.moment))
        return call

    def _explain_whole(self) -> str:
        """Returns why the present call must not be cut inside, or ""."""
        if get_ident() != self.thread:
            return "in a thread of its own, and stages begin and end in that of the forward"
        for frame, _ in walk_stack(sys._getframe(3)):  # from the caller of `call` outwards
            code = frame.f_code
            if code.co_filename.endswith("torch/utils/checkpoint.py"):
                return "checkpointed"
            if code.co_filename.endswith("torch/autograd/function.py") and code.co_name == "apply":
                return IN_FUNCTION
        return ""

    def _leave(self, call: CallRecord, args: Any, kwargs: Any, output: Any) -> None:
        self.moment += 1
        while self.stack.pop() is not call:
            pass
        call.end = self.moment
        arguments = [leaf for _, leaf in walk_arguments(args, kwargs)]
        for where, leaf in walk(output):
            if isinstance(leaf, torch.Tensor):
                record = self.record_of(leaf)
                record.sites.append(ValueSite(call.name, "out", where, self.moment))
                call.outputs.append(record)
                if call.depending and call.path and record.born > call.start:
                    record.depends = True  # a stage that skips this call does not compute it
            elif not isinstance(leaf, PLAIN) and not any(leaf is argument for argument in arguments):
                call.opaque = type(leaf).__name__


def record(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], changed_by_forward: frozenset[str] = frozenset()
) -> Recording:
    """Records a forward in the model's present mode; buffers `changed_by_forward` earlier belong to one stage."""
    recorder = _Recorder(model, changed_by_forward)
    buffers = dict(model.named_buffers(remove_duplicate=False))
    attributes = {name: dict(module.__dict__) for name, module in model.named_modules()}
    lists = {str(name) for name, value in [*enumerate(args), *kwargs.items()] if _has_item_per_sample(value)}
    for where, leaf in walk_arguments(args, kwargs):
        if isinstance(leaf, torch.Tensor) and id(leaf) not in recorder.records:
            name = find_prefix(where, lists) or where
            record = TensorRecord(leaf, -1, False, frozenset([name]))
            record.sites.append(ValueSite("", "in", name, -1))
            recorder.records[id(leaf)] = record
    generators = read_python_generators()
    with wrapping_calls([(module, module) for module in dict.fromkeys(model.modules())], recorder.call), recorder:
        output = model(*args, **kwargs)
    draws_in_python = read_python_generators() != generators
    root = recorder.root.inner[0] if recorder.root.inner else recorder.root
    for where, leaf in walk(output):
        if isinstance(leaf, torch.Tensor):
            record = recorder.record_of(leaf)
            record.last = END
            record.sites.append(ValueSite("", "out", where, END))
            if not record.depends:
                record.uses.append(END)
    after = dict(model.named_buffers(remove_duplicate=False))
    changed = {
        name
        for name, buffer in buffers.items()
        if _find_storage(buffer) in recorder.writes or after.get(name, buffer) is not buffer
    }
    set_here = tuple(
        f"{name}.{attribute}" if name else attribute
        for name, module in model.named_modules()
        for attribute, value in module.__dict__.items()
        if attributes.get(name, {}).get(attribute, recorder) is not value  # the default is no attribute's value
    )
    records = list(recorder.records.values())
    for record in records:
        record.storage = _find_storage(record.tensor)
    for record in records:
        if not record.state and record.storage != id(record.tensor):  # not if sparse, or wrapped by torch.func
            record.tensor = meta_like(record.tensor)  # frees its memory
    transformed = [(moment, call, place) for (_, place), (moment, call) in recorder.transformed.items()]
    writes, draws, hooked = recorder.writes, recorder.draws, recorder.list_hooked()
    return Recording(root, records, writes, draws, frozenset(changed), set_here, draws_in_python, hooked, transformed)


def _has_item_per_sample(value: Any) -> bool:
    """Returns whether an input is a list whose length differs from batch to batch, such as boxes of each picture."""
    if type(value) not in (list, tuple):
        return False
    shapes = {item.shape for item in value if isinstance(item, torch.Tensor)}
    return len(shapes) > 1 or any(isinstance(item, Mapping) for item in value)


def _find_storage(tensor: torch.Tensor) -> int:
    if tensor.layout is not torch.strided or torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        return id(tensor)
    return int(tensor.untyped_storage()._cdata)
