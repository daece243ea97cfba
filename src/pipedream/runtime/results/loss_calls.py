"""Recognises torch's losses where a model calls them, and finds what the model's own loss is a mean over.

Life of a forward that is watched:

1. A call of a loss of `torch.nn.functional` is noted with its arguments, and its result is known to be a mean over
   some amount, a sum, or a tensor of elements (``reduction='none'``).
2. What the model then computes from it is followed: casts, reshapes, factors, sums of losses, means and sums of
   elements, and the division of a sum by a count. Any other function of a loss ends the trail.
3. If the model's loss is at the end of a trail, `amounts` computes what it is a mean over. This alone reads tensors.

To see every function costs 2 us for each, so only the first forward does. It shows whether all losses are called by
their names in `torch.nn.functional`. If so, later forwards watch these names, and the functions after the first loss.
"""

from __future__ import annotations

import inspect
import math
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial, wraps
from itertools import zip_longest
from typing import Any, NamedTuple, Self

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode, _get_current_function_mode

_Arguments = Mapping[str, Any]
_Amount = Callable[[], float]


class Amounts(NamedTuple):
    """The amounts that a loss is a mean over.

    Attributes:
        values: several if it is a sum of means; none if it is itself a sum.
        terms: what is added to the losses of torch, as regularisers and losses of the user's own; read only where its
            values matter, because they may be on a GPU.
        full: as `values`, if no target were ignored and all classes had weight 1; empty if that is unknown, as of a sum
            that is divided by a count.
    """

    is_sum: bool
    samples: int
    values: tuple[float, ...] = ()
    terms: tuple[torch.Tensor, ...] = ()
    full: tuple[float, ...] = ()

    def read_terms(self) -> tuple[float, ...]:
        """Returns the values of the terms but for zeros, from which many sums of losses start."""
        return tuple(value for value in map(float, self.terms) if value)

    def fits(self, other: Amounts) -> bool:
        """Returns whether weights of these two parts give the loss of both.

        None do for a sum of means over amounts whose ratio differs. A term that is not torch's is taken for a mean over
        samples, unless it has the same value in both parts.
        """
        if len(self.values) != len(other.values):
            return False
        mine, others = max(self.values, default=0.0), max(other.values, default=0.0)
        if not mine or not others:
            return True

        def has_ratio(here: float, there: float) -> bool:
            return abs(here / mine - there / others) <= 1e-9 * here / mine

        if not all(map(has_ratio, self.values, other.values)):
            return False
        if has_ratio(self.samples, other.samples):
            return True
        terms = zip(self.read_terms(), other.read_terms(), strict=False)
        return not any(abs(a - b) > 1e-5 * abs(a) for a, b in terms)


class _Noted(NamedTuple):
    kind: str  # "mean", "sum" or "elements"
    amounts: tuple[_Amount, ...] = ()
    terms: tuple[torch.Tensor, ...] = ()
    full: tuple[_Amount, ...] = ()


def class_amount(targets: torch.Tensor, ignore_index: int = -100, classes: torch.Tensor | None = None) -> float:
    """Returns the counted targets of a loss on classes, or the sum of their classes' weights."""
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


def _weigh_elements(arguments: _Arguments) -> float:
    return (
        _count_elements("input", "target")(arguments)
        if arguments["weight"] is None
        else float(arguments["weight"].sum())
    )


def _count_divergence(arguments: _Arguments) -> float:
    return (
        float(len(arguments["input"]))
        if arguments["reduction"] == "batchmean"
        else _count_elements("input", "target")(arguments)
    )


def _count_rows(name: str) -> Callable[[_Arguments], float]:
    return lambda arguments: float(math.prod(arguments[name].shape[:-1]))


_pair = _count_elements("input", "target")
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
    _pair,
)  # fmt: skip
if hasattr(F, "linear_cross_entropy"):
    _AMOUNTS[F.linear_cross_entropy] = _count_classes
_OF_CLASSES = frozenset(function for function, amount in _AMOUNTS.items() if amount is _count_classes)
OF_ELEMENTS = tuple(
    function for function, amount in _AMOUNTS.items() if amount in (_pair, _weigh_elements, _count_divergence)
)
_DEFAULTS = {
    function: {name: parameter.default for name, parameter in inspect.signature(function).parameters.items()}
    for function in _AMOUNTS
}

# Functions whose result is their first argument in another form, or parts of it.
_FORMS = frozenset((
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
        recognised: whether the first loss was; None before it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.recognised: bool | None = None
        self._sees_all = True
        self._only_by_name = True
        self._by_name = False
        self._pushed = False
        self._noted: dict[int, tuple[torch.Tensor, _Noted]] = {}
        # By id; the values keep the tensors, so that no id is used again.
        self._inputs: dict[int, torch.Tensor] = {}
        self._input_numbers: set[float] = set()
        self._targets: list[tuple[torch.Tensor, torch.Tensor, int]] = []  # where they are read, on the CPU, version
        self._samples = 1
        self._thread = 0
        self._names = {function.__name__: (function, self._watch_function(function)) for function in _AMOUNTS}
        # While it is watched, a function names itself by what watches it.
        self._functions = {key: function for function, watched in self._names.values() for key in (function, watched)}

    def watch(self, inputs: Any, samples: int, targets: Iterable[tuple[torch.Tensor, torch.Tensor]] = ()) -> Self:
        """Takes the coming forward's inputs: a sum that is divided by a number among them remains a sum.

        Such a number is not split with the batch, as Hugging Face's ``num_items_in_batch``.

        Args:
            targets: on a GPU and on the CPU, where they are counted, so that no host waits for the GPU.
        """
        self.clear()
        self._samples = samples
        self._targets = [
            (there, here, there._version)
            for there, here in targets
            if there is not here and there.layout is torch.strided and not there.is_inference()
        ]
        for item in iterate_leaves(inputs):
            if isinstance(item, torch.Tensor):
                if item.numel() == 1 and not item.ndim:
                    self._inputs[id(item)] = item
            elif isinstance(item, (int, float)) and not isinstance(item, bool):
                self._input_numbers.add(float(item))
        return self

    def end(self) -> None:
        """Ends a forward whose loss is no scalar; if it is the first, the losses are not recognised."""
        if self.recognised is None:
            self.recognised = False
        self.clear()

    def clear(self) -> None:
        self._noted.clear()
        self._inputs.clear()
        self._input_numbers.clear()
        self._targets.clear()

    def __enter__(self) -> Self:
        self._thread = threading.get_ident()
        for name, (_, watched) in self._names.items():
            setattr(F, name, watched)
        if self._sees_all:
            self._push()
        return self

    def __exit__(self, *error: Any) -> None:
        self._thread = 0
        if self._pushed:
            self._pushed = False
            super().__exit__(*error)  # type: ignore[no-untyped-call]
        for name, (function, _) in self._names.items():
            setattr(F, name, function)

    def amounts(self, loss: torch.Tensor) -> Amounts | None:
        """Returns what the loss of the watched forward is a mean over, if it was recognised."""
        entry = self._noted.get(id(loss))
        amounts = None if entry is None or entry[1].kind == "elements" else _evaluate_note(entry[1], self._samples)
        if self.recognised is None:
            self._sees_all = not self._only_by_name
            self.recognised = amounts is not None
        self.clear()
        return amounts

    def _push(self) -> None:
        super().__enter__()  # type: ignore[no-untyped-call]
        self._pushed = True

    def _watch_function(self, function: Any) -> Any:
        @wraps(function)
        def call(*args: Any, **keywords: Any) -> Any:
            if torch.compiler.is_compiling() or threading.get_ident() != self._thread:
                return function(*args, **keywords)
            if self._pushed:
                # Below another mode, this one could not have been pushed here.
                self._by_name = _get_current_function_mode() is self  # type: ignore[no-untyped-call]
                return function(*args, **keywords)
            result = function(*args, **keywords)
            self._note_call(function, args, keywords, result)
            if not self._pushed:  # one loss may have called another
                self._push()
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
            self._note_call(function, args, kwargs, result)
            return result
        if not self._noted:
            return func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        derive = self._derive_note(name, args, kwargs)
        result = func(*args, **kwargs)
        if isinstance(result, torch.Tensor):
            noted = None if derive is None else derive(result)
            if noted is not None:
                self._noted[id(result)] = (result, noted)
            elif name != "__get__":
                self._noted.pop(id(result), None)  # changed in place
        return result

    # -- what is noted ------------------------------------------------------------------------------

    def _note_call(self, function: Any, args: tuple[Any, ...], keywords: dict[str, Any], result: torch.Tensor) -> None:
        defaults = _DEFAULTS[function]
        arguments = {**defaults, **dict(zip(defaults, args, strict=False)), **keywords}
        if arguments.get("size_average") is not None or arguments.get("reduce") is not None:
            return
        reduction = arguments["reduction"]
        if reduction == "none":
            noted = _Noted("elements")
        elif reduction == "sum":
            noted = _Noted("sum")
        else:
            if function in _OF_CLASSES and arguments["weight"] is None:
                arguments["target"] = self._find_on_cpu(arguments["target"])
            amount = partial(_AMOUNTS[function], arguments)
            noted = _Noted(
                "mean", (amount,), full=(partial(_count_targets, arguments) if function in _OF_CLASSES else amount,)
            )
        self._noted[id(result)] = (result, noted)

    def _find_on_cpu(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns what is equal on the CPU to one of the targets, or to a view of one; else the tensor itself."""
        for there, here, version in self._targets:
            if there._version != version:  # the loss has written into it
                continue
            if tensor is there:
                return here
            if _is_part(tensor, there) and tensor._version == version and here.is_contiguous():
                offset = here.storage_offset() + tensor.storage_offset() - there.storage_offset()
                return here.as_strided(tensor.shape, tensor.stride(), offset)
        return tensor

    def _find_note(self, item: Any) -> _Noted | None:
        entry = self._noted.get(id(item)) if isinstance(item, torch.Tensor) else None
        return None if entry is None else entry[1]

    def _derive_note(
        self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Callable[[torch.Tensor], _Noted | None] | None:
        """Returns from a function's result to its note; called before the function, which may write in place."""
        operands = [*iterate_leaves(args), *kwargs.values()]
        notes = [noted for noted in map(self._find_note, operands) if noted is not None]
        if not notes:
            if name in _FORMS and args and id(args[0]) in self._inputs:
                return self._note_input
            return None
        first = notes[0]
        if name in _FORMS:
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

    def _divide_note(self, noted: _Noted, divided: torch.Tensor, divisor: Any) -> _Noted | None:
        if noted.kind == "elements":
            return noted
        if not _is_number(divisor):
            return None
        if isinstance(divisor, torch.Tensor):
            if id(divisor) in self._inputs:
                return noted
            if noted.kind == "mean":
                return _scale_amounts(noted, divisor, 1)
            count, total = divisor.detach().clone(), divided.detach().clone()
            return _Noted("mean", (lambda: _read_count(count, total),))
        if noted.kind == "mean":
            return noted
        number = float(divisor)
        if number == self._samples or (number not in self._input_numbers and not number % self._samples):
            return _Noted("mean", (lambda: number,))
        return noted  # a factor that has nothing to do with the batch


def _is_part(tensor: torch.Tensor, whole: torch.Tensor) -> bool:
    """Returns whether a tensor reads no memory but that of a contiguous one of its type."""
    if tensor.dtype != whole.dtype or tensor.is_inference() or not (whole.is_contiguous() and tensor.numel()):
        return False
    try:
        if tensor.untyped_storage().data_ptr() != whole.untyped_storage().data_ptr():
            return False
    except RuntimeError:  # one without a storage, as within torch.func.vmap
        return False
    begin = tensor.storage_offset() - whole.storage_offset()
    last = begin + sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    return begin >= 0 and last < whole.numel()


def _reduce_note(noted: _Noted, name: str, argument: Any, result: torch.Tensor) -> _Noted:
    if noted.kind != "elements" or result.ndim:
        return noted
    if name == "sum":
        return _Noted("sum")
    count = float(argument.numel())
    return _Noted("mean", (lambda: count,))


def _scale_amounts(noted: _Noted, number: torch.Tensor, power: int) -> _Noted:
    """Returns the note of a mean that is divided by a number, as by the mean of weights, or for -1 multiplied by it."""
    if noted.kind != "mean":
        return noted
    copy = number.detach().clone()

    def scale(amount: _Amount) -> float:
        return amount() * (abs(float(copy)) or 1.0) ** power

    return noted._replace(amounts=tuple(partial(scale, amount) for amount in noted.amounts), full=())


def _join_notes(notes: list[_Noted]) -> _Noted | None:
    if len({noted.kind for noted in notes}) > 1:
        return None
    amounts = tuple(amount for noted in notes for amount in noted.amounts)
    full = tuple(amount for noted in notes for amount in noted.full)
    return _Noted(notes[0].kind, amounts, tuple(term for noted in notes for term in noted.terms), full)


def _add_terms(noted: _Noted | None, others: list[Any]) -> _Noted | None:
    """Returns the note of a sum with what no loss has made."""
    if noted is None or noted.kind == "elements":
        return noted
    for other in others:
        if not _is_number(other):
            return None
        if isinstance(other, torch.Tensor):
            noted = noted._replace(terms=(*noted.terms, other.detach().clone()))
        elif noted.kind == "sum" and other:
            return None
    return noted


def _read_count(divisor: torch.Tensor, divided: torch.Tensor) -> float:
    """Returns the count that a sum is divided by; 0 for a sum of nothing, whose count is often raised to 1."""
    return float(divisor) if float(divisor) != 1.0 or float(divided) else 0.0


def _evaluate_note(noted: _Noted, samples: int) -> Amounts | None:
    if noted.kind == "mean":
        values, full = ([amount() for amount in amounts] for amounts in (noted.amounts, noted.full))
        return Amounts(False, samples, tuple(values), noted.terms, tuple(full if len(full) == len(values) else ()))
    amounts = Amounts(True, samples, terms=noted.terms)
    return None if amounts.read_terms() else amounts


def _is_number(item: Any) -> bool:
    return item.numel() == 1 if isinstance(item, torch.Tensor) else isinstance(item, (int, float))


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
