"""Recognises calls of torch's losses inside a model, and finds what the model's own loss is a mean over.

Life of a forward that is watched:

1. A call of a loss of `torch.nn.functional` is noted with its arguments: its result is a mean over some amount, a sum,
   or a tensor of elements (``reduction='none'``).
2. What the model then computes from it is followed: casts, reshapes, factors, sums of losses, means and sums of
   elements, and the division of a sum by a count. Any other function of a loss ends the trail.
3. If the model's loss is at the end of a trail, `amounts` computes what it is a mean over. Only this reads tensors.

Watching every function costs 2 us for each, so only the first forward does. It shows whether all losses are called by
their names in `torch.nn.functional`. If so, later forwards watch these names, and all functions after the first loss.
"""

from __future__ import annotations

import inspect
import math
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache, partial, wraps
from itertools import zip_longest
from typing import Any, NamedTuple, Self

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn._reduction import legacy_get_string
from torch.overrides import TorchFunctionMode, _get_current_function_mode

_Arguments = Mapping[str, Any]
_Amount = Callable[[], float]


class Amounts(NamedTuple):
    """The amounts that a loss is a mean over.

    Attributes:
        values: several for a sum of means; empty for a sum.
        terms: what is added to torch's losses, such as regularisers and the user's own losses; read only if the values
            matter, because they may be on a GPU.
        full: what `values` would be if no target were ignored and all classes had weight 1; empty if that is unknown,
            as for a sum that is divided by a count.
    """

    is_sum: bool
    samples: int
    values: tuple[float, ...] = ()
    terms: tuple[torch.Tensor, ...] = ()
    full: tuple[float, ...] = ()

    def read_terms(self) -> tuple[float, ...]:
        """Returns the values of the terms, except zeros, with which many sums of losses start."""
        return tuple(value for value in map(float, self.terms) if value)

    def fits(self, other: Amounts) -> bool:
        """Returns whether the loss of both parts together is a weighted mean of their losses.

        A sum of means over amounts in different ratios is not. A term that is not torch's is taken for a mean over
        samples, unless it has the same value in both parts.
        """
        if len(self.values) != len(other.values):
            return False
        own_amount, other_amount = max(self.values, default=0.0), max(other.values, default=0.0)
        if not own_amount or not other_amount:
            return True

        def has_ratio(value: float, other_value: float) -> bool:
            return abs(value / own_amount - other_value / other_amount) <= 1e-9 * value / own_amount

        if not all(map(has_ratio, self.values, other.values)):
            return False
        if has_ratio(self.samples, other.samples):
            return True
        terms = zip(self.read_terms(), other.read_terms(), strict=False)
        return not any(abs(a - b) > 1e-5 * abs(a) for a, b in terms)


class LossNote(NamedTuple):
    """How a loss, or what is computed from losses, follows from its elements; the fields are those of `Amounts`."""

    kind: str  # "mean", "sum" or "elements"
    amounts: tuple[_Amount, ...] = ()
    terms: tuple[torch.Tensor, ...] = ()
    full: tuple[_Amount, ...] = ()


def class_amount(targets: torch.Tensor, ignore_index: int = -100, classes: torch.Tensor | None = None) -> float:
    """Returns how many targets of a loss on classes count, or the sum of their classes' weights."""
    if targets.is_floating_point():  # probabilities
        return float(targets.numel() // targets.shape[1] if targets.ndim > 1 else 1)
    counts = targets != ignore_index
    return float(torch.count_nonzero(counts) if classes is None else classes[targets[counts]].sum())


def _count_classes(arguments: _Arguments) -> float:
    ignored = arguments["ignore_index"]
    return class_amount(arguments["target"], -100 if ignored is None else ignored, arguments["weight"])


def _count_targets(arguments: _Arguments) -> float:
    targets = arguments["target"]
    return class_amount(targets) if targets.is_floating_point() else float(targets.numel())


def _count_elements(*names: str) -> Callable[[_Arguments], float]:
    return lambda arguments: float(
        math.prod(map(max, zip_longest(*(arguments[n].shape[::-1] for n in names), fillvalue=1)))
    )


_count_pairs = _count_elements("input", "target")


def _weigh_elements(arguments: _Arguments) -> float:
    return _count_pairs(arguments) if arguments["weight"] is None else float(arguments["weight"].sum())


def _count_divergence(arguments: _Arguments) -> float:
    return float(len(arguments["input"])) if arguments["reduction"] == "batchmean" else _count_pairs(arguments)


def _count_rows(name: str) -> Callable[[_Arguments], float]:
    return lambda arguments: float(math.prod(arguments[name].shape[:-1]))


_AMOUNTS: dict[Any, Callable[[_Arguments], float]] = {
    F.cross_entropy: _count_classes,
    F.nll_loss: _count_classes,
    F.mse_loss: _weigh_elements,
    F.kl_div: _count_divergence,
    F.cosine_embedding_loss: lambda arguments: float(arguments["target"].numel()),
    F.ctc_loss: lambda arguments: float(torch.as_tensor(arguments["target_lengths"]).numel()),
    F.margin_ranking_loss: _count_elements("input1", "input2", "target"),
    F.multi_margin_loss: lambda arguments: float(arguments["target"].numel()),
    F.multilabel_margin_loss: _count_rows("input"),
    F.multilabel_soft_margin_loss: _count_rows("input"),
    F.triplet_margin_loss: _count_rows("anchor"),
    F.triplet_margin_with_distance_loss: _count_rows("anchor"),
}
_AMOUNTS |= dict.fromkeys(
    (
        F.l1_loss, F.smooth_l1_loss, F.huber_loss, F.binary_cross_entropy, F.binary_cross_entropy_with_logits,
        F.poisson_nll_loss, F.gaussian_nll_loss, F.soft_margin_loss, F.hinge_embedding_loss,
    ),
    _count_pairs,
)  # fmt: skip
if hasattr(F, "linear_cross_entropy"):
    _AMOUNTS[F.linear_cross_entropy] = _count_classes
_CLASS_LOSSES = frozenset(function for function, amount in _AMOUNTS.items() if amount is _count_classes)
_DEFAULTS = {
    function: {name: parameter.default for name, parameter in inspect.signature(function).parameters.items()}
    for function in _AMOUNTS
}

# Functions whose result is their first argument in another form, or parts of it.
_FORM_CHANGES = frozenset((
    "to", "type", "type_as", "float", "double", "half", "bfloat16", "cuda", "cpu", "clone", "contiguous", "detach",
    "alias", "requires_grad_", "view", "view_as", "reshape", "reshape_as", "flatten", "unflatten", "ravel", "squeeze",
    "unsqueeze", "expand", "expand_as", "permute", "transpose", "t", "neg", "neg_", "nan_to_num", "nan_to_num_",
    "__getitem__", "masked_select", "masked_fill", "masked_fill_", "index_select", "where", "as_tensor",
))  # fmt: skip
_SUMS = frozenset(("add", "add_", "sub", "sub_", "rsub", "__rsub__", "subtract"))
_PRODUCTS = frozenset(("mul", "mul_", "multiply"))
_QUOTIENTS = frozenset(("div", "div_", "divide", "true_divide"))
_JOINS = frozenset(("stack", "cat", "concat", "concatenate", "hstack", "vstack"))


class LossCalls(TorchFunctionMode):
    """Watches the forwards of a model; use it as a context around each, then call `amounts`.

    Attributes:
        recognised: whether the first loss was recognised; None before it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.recognised: bool | None = None
        self._sees_all = True
        self._only_by_name = True
        self._by_name = False
        self._is_active = False
        self._notes: dict[int, tuple[torch.Tensor, LossNote]] = {}
        # By id; the values keep the tensors, so that no id is used again.
        self._inputs: dict[int, torch.Tensor] = {}
        self._input_numbers: set[float] = set()
        self._targets: list[tuple[torch.Tensor, torch.Tensor, int]] = []  # where they are read, on the CPU, version
        self._copied_weights: tuple[torch.Tensor, int, torch.Tensor] | None = None
        self._samples = 1
        self._thread = 0
        self._names = {function.__name__: (function, self._watch_function(function)) for function in _AMOUNTS}
        # While a function is watched, its wrapper passes itself to the mode as the function.
        self._functions = {key: function for function, watched in self._names.values() for key in (function, watched)}

    def watch(self, inputs: Any, samples: int, targets: Iterable[tuple[torch.Tensor, torch.Tensor]] = ()) -> Self:
        """Takes the next forward's inputs: a sum divided by a number among them remains a sum.

        Such a number, like Hugging Face's ``num_items_in_batch``, is not split with the batch.

        Args:
            targets: (on the device, on the CPU); they are counted on the CPU, so that no host waits for a GPU.
        """
        self.clear()
        self._samples = samples
        self._targets = [
            (on_device, on_cpu, on_device._version)
            for on_device, on_cpu in targets
            if on_device is not on_cpu and on_device.layout is torch.strided and not on_device.is_inference()
        ]
        for item in iterate_leaves(inputs):
            if isinstance(item, torch.Tensor):
                if item.numel() == 1 and not item.ndim:
                    self._inputs[id(item)] = item
            elif isinstance(item, (int, float)) and not isinstance(item, bool):
                self._input_numbers.add(float(item))
        return self

    def end(self) -> None:
        """Ends a forward whose loss is not a scalar; if it is the first, the losses are not recognised."""
        if self.recognised is None:
            self.recognised = False
        self.clear()

    def clear(self) -> None:
        self._notes.clear()
        self._inputs.clear()
        self._input_numbers.clear()
        self._targets.clear()

    def __enter__(self) -> Self:
        self._thread = threading.get_ident()
        for name, (_, watched) in self._names.items():
            setattr(F, name, watched)
        if self._sees_all:
            self._activate()
        return self

    def __exit__(self, *error: Any) -> None:
        self._thread = 0
        if self._is_active:
            self._is_active = False
            super().__exit__(*error)  # type: ignore[no-untyped-call]
        for name, (function, _) in self._names.items():
            setattr(F, name, function)

    def amounts(self, loss: torch.Tensor) -> Amounts | None:
        """Returns what the loss of the watched forward is a mean over, if it was recognised."""
        entry = self._notes.get(id(loss))
        amounts = None if entry is None or entry[1].kind == "elements" else _evaluate_note(entry[1], self._samples)
        if self.recognised is None:
            self._sees_all = not self._only_by_name
            self.recognised = amounts is not None
        self.clear()
        return amounts

    def _activate(self) -> None:
        super().__enter__()  # type: ignore[no-untyped-call]
        self._is_active = True

    def _watch_function(self, function: Any) -> Any:
        @wraps(function)
        def call(*args: Any, **keywords: Any) -> Any:
            if torch.compiler.is_compiling() or threading.get_ident() != self._thread:
                return function(*args, **keywords)
            if self._is_active:
                # Below another mode, this one could not have been pushed here.
                self._by_name = _get_current_function_mode() is self  # type: ignore[no-untyped-call]
                return function(*args, **keywords)
            result = function(*args, **keywords)
            self._notes[id(result)] = result, self._make_note(function, args, keywords)
            if not self._is_active:  # one loss may have called another
                self._activate()
            return result

        return call

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.compiler.is_compiling():
            return func(*args, **kwargs)
        if function := self._functions.get(func):
            self._only_by_name &= self._by_name
            self._by_name = False
            result = function(*args, **kwargs)
            self._notes[id(result)] = result, self._make_note(function, args, kwargs)
            return result
        if not self._notes:
            return func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        derive = self._derive_note(name, args, kwargs)
        result = func(*args, **kwargs)
        if isinstance(result, torch.Tensor):
            note = None if derive is None else derive(result)
            if note is not None:
                self._notes[id(result)] = (result, note)
            elif name != "__get__":
                self._notes.pop(id(result), None)  # changed in place
        return result

    # -- what is noted ------------------------------------------------------------------------------

    def note_torch_loss(self, loss: Any, output: Any, targets: torch.Tensor) -> LossNote | None:
        """Returns what one of torch's own losses is a mean over, if it is known."""
        function, keywords = unwrap_loss(loss)
        if isinstance(function, nn.Module):
            module, (function, names) = function, _read_forward(type(function).forward)
            keywords = {name: getattr(module, name) for name in names}
        return self._make_note(function, (output, targets), keywords) if function in _AMOUNTS else None

    def _make_note(self, function: Any, args: tuple[Any, ...], keywords: Mapping[str, Any]) -> LossNote:
        defaults = _DEFAULTS[function]
        arguments = {**defaults, **dict(zip(defaults, args, strict=False)), **keywords}
        average, reduce = arguments.get("size_average"), arguments.get("reduce")  # deprecated
        is_legacy = average is not None or reduce is not None
        reduction = legacy_get_string(average, reduce, emit_warning=False) if is_legacy else arguments["reduction"]
        if reduction in ("none", "sum"):
            return LossNote("elements" if reduction == "none" else "sum")
        amount = full = partial(_AMOUNTS[function], arguments)
        if function in _CLASS_LOSSES:
            arguments["target"] = target = self._find_on_cpu(arguments["target"])
            arguments["weight"] = self._copy_weights(arguments["weight"], target.device)
            full = partial(_count_targets, arguments)
        return LossNote("mean", (amount,), full=(full,))

    def _find_on_cpu(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns the copy on the CPU of one of the targets, or of a view of one; else the tensor itself."""
        for on_device, on_cpu, version in self._targets:
            if on_device._version != version:  # the loss has written into it
                continue
            if tensor is on_device:
                return on_cpu
            if _is_part(tensor, on_device) and tensor._version == version and on_cpu.is_contiguous():
                offset = on_cpu.storage_offset() + tensor.storage_offset() - on_device.storage_offset()
                return on_cpu.as_strided(tensor.shape, tensor.stride(), offset)
        return tensor

    def _copy_weights(self, weights: torch.Tensor | None, device: torch.device) -> torch.Tensor | None:
        """Returns a loss's weights of classes on the targets' device; copies them there once."""
        if weights is None or weights.device == device:
            return weights
        copied = self._copied_weights
        if copied is None or copied[0] is not weights or copied[1] != weights._version:
            copied = self._copied_weights = weights, weights._version, weights.to(device)
        return copied[2]

    def _find_note(self, item: Any) -> LossNote | None:
        entry = self._notes.get(id(item)) if isinstance(item, torch.Tensor) else None
        return None if entry is None else entry[1]

    def _derive_note(
        self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Callable[[torch.Tensor], LossNote | None] | None:
        """Returns how to note a function's result; called before the function, which may write in place."""
        operands = [*iterate_leaves(args), *kwargs.values()]
        notes = [note for note in map(self._find_note, operands) if note is not None]
        if not notes:
            if name in _FORM_CHANGES and args and id(args[0]) in self._inputs:
                return self._note_input
            return None
        first = notes[0]
        if name in _FORM_CHANGES:
            return lambda result: first
        if name in ("sum", "mean"):
            return lambda result: _reduce_note(first, name, args[0], result)
        if name in _JOINS:
            return lambda result: _join_notes(notes)
        if name in _SUMS:
            others = [item for item in operands[:2] if self._find_note(item) is None]
            joined = _add_terms(_join_notes(notes), others)
            return lambda result: joined
        if name in _PRODUCTS and len(notes) == 1:
            scaled = all(
                _is_number(item) or first.kind == "elements" for item in operands[:2] if not self._find_note(item)
            )
            factors = [item for item in operands[:2] if isinstance(item, torch.Tensor) and not self._find_note(item)]
            product = _scale_amounts(first, factors[0], -1) if scaled and factors else first
            return lambda result: product if scaled else None
        if name in _QUOTIENTS and self._find_note(operands[0]) and len(notes) == 1:
            divided = self._divide_note(first, *operands[:2])
            return lambda result: divided
        return None

    def _note_input(self, result: torch.Tensor) -> None:
        self._inputs[id(result)] = result

    def _divide_note(self, note: LossNote, divided: torch.Tensor, divisor: Any) -> LossNote | None:
        if note.kind == "elements":
            return note
        if not _is_number(divisor):
            return None
        if isinstance(divisor, torch.Tensor):
            if id(divisor) in self._inputs:
                return note
            if note.kind == "mean":
                return _scale_amounts(note, divisor, 1)
            count, total = divisor.detach().clone(), divided.detach().clone()
            return LossNote("mean", (lambda: _read_count(count, total),))
        if note.kind == "mean":
            return note
        number = float(divisor)
        if number == self._samples or (number not in self._input_numbers and not number % self._samples):
            return LossNote("mean", (lambda: number,))
        return note  # a factor that does not depend on the batch


def _is_part(tensor: torch.Tensor, base: torch.Tensor) -> bool:
    """Returns whether all of a tensor's memory belongs to `base`, a contiguous tensor of its dtype."""
    if tensor.dtype != base.dtype or tensor.is_inference() or not (base.is_contiguous() and tensor.numel()):
        return False
    try:
        if tensor.untyped_storage().data_ptr() != base.untyped_storage().data_ptr():
            return False
    except RuntimeError:  # one without a storage, as within torch.func.vmap
        return False
    begin = tensor.storage_offset() - base.storage_offset()
    last = begin + sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    return begin >= 0 and last < base.numel()


def _reduce_note(note: LossNote, name: str, argument: Any, result: torch.Tensor) -> LossNote:
    if note.kind != "elements" or result.ndim:
        return note
    if name == "sum":
        return LossNote("sum")
    count = float(argument.numel())
    return LossNote("mean", (lambda: count,))


def _scale_amounts(note: LossNote, number: torch.Tensor, power: int) -> LossNote:
    """Returns the note of a mean that is divided by a number, such as the mean of weights; multiplied, for power -1."""
    if note.kind != "mean":
        return note
    copy = number.detach().clone()

    def scale(amount: _Amount) -> float:
        return amount() * (abs(float(copy)) or 1.0) ** power

    return note._replace(amounts=tuple(partial(scale, amount) for amount in note.amounts), full=())


def _join_notes(notes: list[LossNote]) -> LossNote | None:
    if len({note.kind for note in notes}) > 1:
        return None
    amounts = tuple(amount for note in notes for amount in note.amounts)
    full = tuple(amount for note in notes for amount in note.full)
    return LossNote(notes[0].kind, amounts, tuple(term for note in notes for term in note.terms), full)


def _add_terms(note: LossNote | None, others: list[Any]) -> LossNote | None:
    """Returns the note of a sum with terms that are not losses of torch."""
    if note is None or note.kind == "elements":
        return note
    for other in others:
        if not _is_number(other):
            return None
        if isinstance(other, torch.Tensor):
            note = note._replace(terms=(*note.terms, other.detach().clone()))
        elif note.kind == "sum" and other:
            return None
    return note


def _read_count(divisor: torch.Tensor, divided: torch.Tensor) -> float:
    """Returns the count that a sum is divided by; 0 for a sum of nothing, whose count is often raised to 1."""
    return float(divisor) if float(divisor) != 1.0 or float(divided) else 0.0


def _evaluate_note(note: LossNote, samples: int) -> Amounts | None:
    if note.kind == "mean":
        values, full = ([amount() for amount in amounts] for amounts in (note.amounts, note.full))
        return Amounts(False, samples, tuple(values), note.terms, tuple(full if len(full) == len(values) else ()))
    amounts = Amounts(True, samples, terms=note.terms)
    return None if amounts.read_terms() else amounts


def _is_number(item: Any) -> bool:
    return item.numel() == 1 if isinstance(item, torch.Tensor) else isinstance(item, (int, float))


@cache
def _read_forward(forward: Any) -> tuple[Any, list[str]]:
    """Returns the function that a module's forward calls, and its arguments that are the module's attributes."""
    names = forward.__code__.co_names
    function = next((function for name in names if (function := getattr(F, name, None)) in _AMOUNTS), None)
    return function, [name for name in names if name in _DEFAULTS.get(function, ())]


def unwrap_loss(loss: Any) -> tuple[Any, dict[str, Any]]:
    """Returns what a `functools.partial` calls, and its keywords; for another loss itself."""
    keywords: dict[str, Any] = {}
    while isinstance(loss, partial):
        keywords = {**loss.keywords, **keywords}
        loss = loss.func
    return loss, keywords


def iterate_leaves(value: Any) -> Iterator[Any]:
    """Yields what is in nested tuples, lists and mappings."""
    if isinstance(value, (tuple, list)):
        for item in value:
            yield from iterate_leaves(item)
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from iterate_leaves(item)
    else:
        yield value
