"""Describes torch's operators as text (`pipedream.layouts.description.text`), and applies them to a rank's part.

A description names the arguments as the operator's schema does, and the result `out`:

    aten.mm: out[i, j] += self[i, k] * mat2[k, j]
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.nn import functional as F

from pipedream.core.errors import PlanError
from pipedream.layouts.description.operator import Operator
from pipedream.layouts.description.operators import Operators, span, unclipped
from pipedream.layouts.description.text import read_lines
from pipedream.layouts.search.cost import halve_index, is_offered

A = torch.ops.aten
_LETTERS = "abcdefghjklmnpqstuvwxyz"


@dataclass(frozen=True)
class OperatorCall:
    """An operator with its arguments.

    Attributes:
        item: which of several results.
        values: argument of the schema -> value; tensors may be without data.
        out: the result, without data.
    """

    function: Any
    item: int | None
    values: Mapping[str, Any]
    out: torch.Tensor

    def tensors(self) -> dict[str, torch.Tensor]:
        """Returns the tensors among the arguments; those of a list have a number after its name."""
        return dict(_tensors(self.values))


def _tensors(values: Mapping[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    for name, value in values.items():
        if isinstance(value, torch.Tensor):
            yield name, value
        elif isinstance(value, list | tuple):
            yield from (
                (f"{name}{at}", element) for at, element in enumerate(value) if isinstance(element, torch.Tensor)
            )


@dataclass(frozen=True)
class Part:
    """What one rank computes of a call.

    Attributes:
        values: arguments, with the parts of tensors that the rank needs.
        shape: of its part of the result.
        step: the operator's line, with the schema's names.
        ranges: index -> values.
    """

    call: OperatorCall
    values: Mapping[str, Any]
    shape: tuple[int, ...]
    step: Operator
    ranges: Mapping[str, range]

    def outside(self, tensor: str) -> list[tuple[int, int]]:
        """Returns for each dimension how many elements before and after a tensor its part would have, as padding."""
        access = next(operand for operand in self.step.line.operands if operand.tensor == tensor)
        padding = []
        for index, size in zip(access.indices, self.call.values[tensor].shape, strict=True):
            values = range(size) if index is None else unclipped(index, self.ranges)
            padding.append((max(0, -values.start), max(0, values.stop - size)))
        return padding


def _whole_call(part: Part) -> torch.Tensor:
    """Applies the operator itself; what it computes of its own parts is its part of the result."""
    result = part.call.function(**part.values)
    return result if part.call.item is None else result[part.call.item]  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Description:
    """How an operator is cut.

    Attributes:
        text: for a call.
        run: computes a part.
    """

    text: Callable[[OperatorCall], str]
    run: Callable[[Part], torch.Tensor] = _whole_call


_KNOWN: dict[tuple[Any, int | None], Description] = {}


def register_operator(operator: Any, spec: str) -> None:
    """Adds an operator of yours, such as ``torch.ops.mine.scan``.

    It is checked where a model uses it, once for each shape: on random numbers, its parts along each index must make
    the whole.

    Args:
        operator: also what `torch.library.custom_op` returns. It has one result.
        spec: one line of the form of `pipedream.layouts.description.text`, with the names of the operator's schema, and
            `out` for its result. The tensors of a list have numbers after its name: `xs0`, `xs1`.

    Raises:
        PlanError: the text cannot be read, or `operator` is not an operator with one result.
    """
    operator = getattr(operator, "_opoverload", operator)
    if not isinstance(operator, torch._ops.OpOverload | torch._ops.OpOverloadPacket):
        raise PlanError(
            f"{operator!r} was described, but is not a torch operator; give one such as torch.ops.mine.scan, or what "
            "torch.library.custom_op returns"
        )
    lines = read_lines(spec)
    if [line.result.tensor for line in lines] != ["out"]:
        raise PlanError(
            f"{operator} was described as {spec!r}; give one line, whose result is out, such as "
            "'out[i, j] = f(x[i, j])'"
        )
    for overload in _overloads(operator):
        if len(overload._schema.returns) != 1:
            raise PlanError(
                f"{overload} was described, but has {len(overload._schema.returns)} results, and only operators with "
                "one can be described; write it as several operators"
            )
        _KNOWN[overload, None] = Description(lambda call: spec)
        _USERS.add(overload)


def contradiction(call: OperatorCall, description: Description) -> str:
    """Returns the index along which the parts of a call do not make the whole, on random numbers; '' if all do."""
    with unset_fake_temporarily():  # a layer may be traced without data
        return _contradiction(call, description)


def _contradiction(call: OperatorCall, description: Description) -> str:
    (step,) = Operators(_shapes(call), description.text(call)).steps
    random = {name: _random(tensor) for name, tensor in call.tensors().items()}
    ranges = {name: range(size) for name, size in step.sizes.items()}
    whole = _computed(call, description, step, random, ranges)
    shapes = [_shapes(call)[access.tensor] for access in step.accesses]
    for index in step.sizes:
        if len(ranges[index]) < 2 or not is_offered(step, shapes, ranges, index):
            continue
        halves = [halve_index(ranges, index, second=second) for second in (False, True)]
        try:
            parts = [_computed(call, description, step, random, half) for half in halves]
        except RuntimeError:
            return index
        boxes = [span(step.line.result, half, shapes[-1]) for half in halves]
        if index in step.reduced:
            joined = COMBINE[step.line.reduction](*parts)
        else:
            joined = torch.empty_like(whole)
            for box, part in zip(boxes, parts, strict=True):
                joined[tuple(slice(values.start, values.stop) for values in box)] = part
        wide = torch.complex128 if whole.is_complex() else torch.float64
        if not torch.allclose(joined.to(wide), whole.to(wide), rtol=1e-4, atol=1e-5, equal_nan=True):
            return index
    return ""


def other_operands(call: OperatorCall, text: str) -> str:
    """Returns in words which tensors a description names that a call does not have, or the other way round."""
    (line,) = read_lines(text)
    named, present = {operand.tensor for operand in line.operands}, set(call.tensors())
    lacks, odd = (", ".join(sorted(names)) for names in (present - named, named - present))
    parts = [f"it does not name {lacks}" if lacks else "", f"it names {odd}, not among its tensors" if odd else ""]
    return "; ".join(filter(None, parts))


COMBINE: Mapping[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "+": torch.add,
    "*": torch.mul,
    "max": torch.maximum,
    "min": torch.minimum,
}
"""Reduction -> what makes one of two partial results."""


def _shapes(call: OperatorCall) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in (call.tensors() | {"out": call.out}).items()}


def _random(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.is_floating_point() or tensor.is_complex():
        return torch.randn(tensor.shape, dtype=tensor.dtype)
    return torch.randint(0, 2, tensor.shape).to(tensor.dtype)


def _computed(
    call: OperatorCall,
    description: Description,
    step: Operator,
    tensors: Mapping[str, torch.Tensor],
    ranges: Mapping[str, range],
) -> torch.Tensor:
    boxes = {
        operand.tensor: span(operand, ranges, tuple(tensors[operand.tensor].shape)) for operand in step.line.operands
    }
    parts = {
        name: tensors[name][tuple(slice(values.start, values.stop) for values in box)] for name, box in boxes.items()
    }
    shape = tuple(map(len, span(step.line.result, ranges, tuple(call.out.shape))))
    return description.run(Part(call, filled(call.values, parts), shape, step, ranges))


def filled(values: Mapping[str, Any], parts: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """Returns arguments with parts in place of tensors; those that a description lacks stay without data."""
    arguments: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, list | tuple):
            arguments[name] = [parts.get(f"{name}{at}", element) for at, element in enumerate(value)]
        else:
            arguments[name] = parts.get(name, value)
    return arguments


def is_added(function: Any) -> bool:
    """Whether `register_operator` has added an operator; the library's own are checked by its tests."""
    return function in _USERS


_USERS: set[Any] = set()


def _overloads(operator: Any) -> list[Any]:
    if isinstance(operator, torch._ops.OpOverload):
        return [operator]
    return [getattr(operator, name) for name in operator.overloads()]


def description_of(call: OperatorCall) -> Description | None:
    """Returns the description of a call, if there is one."""
    if torch.Tag.nondeterministic_seeded in call.function.tags:
        return None
    description = _KNOWN.get((call.function, call.item))
    if description is None and torch.Tag.pointwise in call.function.tags and call.item is None:
        description = _POINTWISE
    return description


def is_described(function: Any) -> bool:
    """Whether an operator has a description, or needs none."""
    needs_none = torch.Tag.pointwise in function.tags or is_constant(function) or is_drawn(function)
    return needs_none or (function, None) in _KNOWN or (function, 0) in _KNOWN


def refusal(function: Any, where: str) -> str:
    """Returns why an operator cannot be cut, and what to do."""
    if torch.Tag.nondeterministic_seeded in function.tags:
        return (
            f"{where} calls {function}, which draws random numbers, so that its parts are not those of one process; "
            "describe the model without it, or use a layout by hand"
        )
    return (
        f"{where} calls {function}, which has no description; write one, such as "
        f"pipedream.register_operator(torch.ops.{function}, 'out[i, j] = f(self[i, j])')"
    )


def is_constant(function: Any) -> bool:
    """Whether a result depends on sizes alone."""
    return function in _CONSTANTS


def is_drawn(function: Any) -> bool:
    """Whether a result is random numbers, whose distribution does not depend on other tensors."""
    return function in _DRAWN


_CONSTANTS = {
    overload
    for packet in (
        A.full,
        A.zeros,
        A.ones,
        A.arange,
        A.scalar_tensor,
        A.new_zeros,
        A.new_ones,
        A.new_full,
        A.empty,
        A.new_empty,
        A.new_empty_strided,
    )
    for overload in _overloads(packet)
}
_DRAWN = {
    A.bernoulli.p,
    *(overload for packet in (A.rand, A.rand_like, A.randn, A.randn_like) for overload in _overloads(packet)),
}


def _described(
    text: Callable[[OperatorCall], str] | str, *functions: Any, item: int | None = None
) -> Callable[..., Any]:
    """Registers what computes a part of some operators."""

    def add(run: Callable[[Part], torch.Tensor]) -> Callable[[Part], torch.Tensor]:
        for packet in functions:
            for overload in _overloads(packet):
                _KNOWN[overload, item] = Description((lambda call: text) if isinstance(text, str) else text, run)
        return run

    return add


def _access(tensor: str, indices: Sequence[str]) -> str:
    return f"{tensor}[{', '.join(indices)}]"


def _letters(shape: Sequence[int], whole: Sequence[int] = ()) -> list[str]:
    """Returns an index for each dimension: 0 where the size is 1, and : where it is to be whole."""
    chosen = [dim % len(shape) for dim in whole]
    return [":" if at in chosen else _LETTERS[at] if size > 1 else "0" for at, size in enumerate(shape)]


def _function(out: Sequence[str], operands: Mapping[str, Sequence[str]], sign: str = "=") -> str:
    return f"{_access('out', out)} {sign} f({', '.join(_access(*operand) for operand in operands.items())})"


def _copy_of(source: Sequence[str], out: Sequence[str]) -> str:
    """Describes an operator that moves elements and computes none."""
    return f"{_access('out', out)} = {_access('self', source)}"


def _pointwise(call: OperatorCall) -> str:
    out = _letters(call.out.shape)
    operands = {}
    for name, tensor in call.tensors().items():
        aligned = out[len(out) - tensor.dim() :]
        operands[name] = ["0" if size == 1 else index for size, index in zip(tensor.shape, aligned, strict=True)]
    return _function(out, operands)


_POINTWISE = Description(_pointwise)
_described(_pointwise, A.zeros_like, A.ones_like, A.full_like, A.empty_like)(_whole_call)


def _copied(call: OperatorCall) -> str:
    return _pointwise(OperatorCall(call.function, None, {"src": call.values["src"]}, call.out))


@_described(_copied, A.copy_, A.copy)
def _copy(part: Part) -> torch.Tensor:
    source: torch.Tensor = part.values["src"]
    return source.expand(part.shape).clone()


_described("out[i, j] += self[i, k] * mat2[k, j]", A.mm)(_whole_call)
_described("out[b, i, j] += self[b, i, k] * mat2[b, k, j]", A.bmm)(_whole_call)
_described("out[i] += self[i, k] * vec[k]", A.mv)(_whole_call)
_described("out[] += self[k] * tensor[k]", A.dot)(_whole_call)


def _permuted(call: OperatorCall) -> str:
    x = call.values["self"]
    source = _letters(x.shape)
    if "dims" in call.values:
        order = [dim % x.dim() for dim in call.values["dims"]]
    else:
        order = list(range(x.dim()))
        first, second = call.values.get("dim0", 0) % x.dim(), call.values.get("dim1", 1) % x.dim()
        order[first], order[second] = order[second], order[first]
    return _copy_of(source, [source[dim] for dim in order])


_described(_permuted, A.permute, A.transpose)(_whole_call)


def _reshaped(call: OperatorCall) -> str:
    """Dimensions that are merged or split are sums of indices; those that are mixed are whole."""
    x, out = list(call.values["self"].shape), list(call.out.shape)
    letters = iter(_LETTERS)
    sides: tuple[list[str], list[str]] = ([], [])

    while len(sides[0]) < len(x) or len(sides[1]) < len(out):
        taken: tuple[list[int], list[int]] = ([], [])
        rest = (x[len(sides[0]) :], out[len(sides[1]) :])
        while not all(taken) or prod(taken[0]) != prod(taken[1]):
            at = int(prod(taken[1]) < prod(taken[0]) if all(taken) else not taken[1] and bool(taken[0]))
            if not rest[at]:  # ones at the end
                at = 1 - at
            if not rest[at]:
                break
            taken[at].append(rest[at].pop(0))
        many = [[size for size in side if size > 1] for side in taken]
        if len(many[0]) > 1 and len(many[1]) > 1:
            for side, sizes in zip(sides, taken, strict=True):
                side += [":" if size > 1 else "0" for size in sizes]
            continue
        parts = max(many, key=len)
        split = [next(letters) for _ in parts]
        summed = " + ".join(f"{prod(parts[at + 1 :])}*{name}" for at, name in enumerate(split))
        for side, sizes, big in zip(sides, taken, many, strict=True):
            names = iter(split if len(big) == len(parts) else [summed])
            side += [next(names) if size > 1 else "0" for size in sizes]
    return _copy_of(*sides)


@_described(_reshaped, A.view, A.reshape, A._unsafe_view, A.unsqueeze, A.squeeze, A.view_copy, A._reshape_copy)
def _reshape(part: Part) -> torch.Tensor:
    x: torch.Tensor = part.values["self"]
    return x.reshape(part.shape)


def _expanded(call: OperatorCall) -> str:
    x, out = call.values["self"], _letters(call.out.shape)
    return _copy_of(
        ["0" if size == 1 else index for size, index in zip(x.shape, out[len(out) - x.dim() :], strict=True)], out
    )


_described(_expanded, A.clone, A.alias, A.detach, A._to_copy, A.lift_fresh_copy)(_whole_call)


@_described(_expanded, A.expand)
def _expand(part: Part) -> torch.Tensor:
    x: torch.Tensor = part.values["self"]
    return x.expand(part.shape)


def _selected(call: OperatorCall) -> str:
    x = call.values["self"]
    dim, index = call.values["dim"] % x.dim(), call.values["index"]
    source = _letters(x.shape)
    source[dim] = str(index % x.shape[dim])
    return _copy_of(source, source[:dim] + source[dim + 1 :])


@_described(_selected, A.select, A.select_copy)
def _select(part: Part) -> torch.Tensor:
    x: torch.Tensor = part.values["self"]
    return x.select(part.call.values["dim"], 0)


def _sliced(call: OperatorCall) -> str:
    x = call.values["self"]
    dim = call.values.get("dim", 0) % x.dim()
    start, step = call.values.get("start") or 0, call.values.get("step", 1)
    start = min(max(start + x.shape[dim] if start < 0 else start, 0), x.shape[dim])
    out = _letters(call.out.shape)
    source = list(out)
    source[dim] = f"{step}*{out[dim]} + {start}"
    return _copy_of(source, out) + _first(out[dim], call.out.shape[dim])


def _first(index: str, size: int) -> str:
    """Says that an index does not reach the end of a dimension."""
    return f" where {index} < {size}" if index.isidentifier() else ""


@_described(_sliced, A.slice)
def _slice(part: Part) -> torch.Tensor:
    x: torch.Tensor = part.values["self"]
    call = part.call.values
    return x[(slice(None),) * (call.get("dim", 0) % x.dim()) + (slice(None, None, call.get("step", 1)),)]


def _split(item: int) -> None:
    def text(call: OperatorCall) -> str:
        x, values = call.values["self"], call.values
        dim = values.get("dim", 0) % x.dim()
        start = sum(values["split_sizes"][:item]) if "split_sizes" in values else item * values["split_size"]
        out = _letters(call.out.shape)
        source = [*out[:dim], f"{out[dim]} + {start}", *out[dim + 1 :]]
        return _copy_of(source, out) + _first(out[dim], call.out.shape[dim])

    functions = (A.split, A.unsafe_split, A.split_with_sizes, A.unsafe_split_with_sizes)
    _described(text, *functions, item=item)(lambda part: part.values["self"])


for _item in range(64):
    _split(_item)


def _joined(call: OperatorCall) -> str:
    """The dimension that is joined is whole."""
    out = _letters(call.out.shape, [call.values.get("dim", 0)])
    return _function(out, dict.fromkeys(call.tensors(), out))


_described(_joined, A.cat)(_whole_call)


def _along_dim(call: OperatorCall) -> str:
    """Some dimensions, and those in which the tensors differ, are whole in all tensors that have them."""
    rank, tensors = call.out.dim(), call.tensors()
    dims = _dims(call, rank)
    same = [x.shape for x in (*tensors.values(), call.out) if x.dim() == rank]
    out = _letters(call.out.shape, [*dims, *(at for at in range(rank) if len({shape[at] for shape in same}) > 1)])
    operands = {}
    for name, x in tensors.items():
        aligned = out if x.dim() == rank else [index for at, index in enumerate(out) if at not in dims]
        operands[name] = [
            ":" if index == ":" else "0" if size == 1 else index for index, size in zip(aligned, x.shape, strict=True)
        ]
    return _function(out, operands)


def _dims(call: OperatorCall, rank: int) -> list[int]:
    """Returns the dimensions that a call names; all, where it names none."""
    dims = call.values.get("dim", call.values.get("dims"))
    if dims is None or dims == []:
        return list(range(rank))
    return [dim % rank for dim in ([dims] if isinstance(dims, int) else dims)]


_described(
    _along_dim,
    A._softmax, A._safe_softmax, A._log_softmax, A._softmax_backward_data, A._log_softmax_backward_data, A.cumsum,
    A.cumprod, A.logcumsumexp, A.gather, A.scatter, A.scatter_add, A.select_scatter, A.slice_scatter, A.flip, A.roll,
)(_whole_call)  # fmt: skip
for _item in (0, 1):
    _described(_along_dim, A.sort, A.topk, item=_item)(_whole_call)


def _without_dim(call: OperatorCall) -> str:
    """The dimensions that go are whole."""
    x = call.values["self"]
    gone = _dims(call, x.dim())
    source = _letters(x.shape, gone)
    keeps = call.values.get("keepdim", False)
    return _function(
        ["0" if at in gone else index for at, index in enumerate(source) if keeps or at not in gone], {"self": source}
    )


_described(_without_dim, A.argmax, A.argmin, A.any, A.all, A.prod)(_whole_call)
for _item in (0, 1):
    _described(_without_dim, A.max, A.min, item=_item)(_whole_call)


def _diagonal(call: OperatorCall) -> str:
    """The rows and columns of a diagonal are whole, and it is the last dimension."""
    key = "src" if "src" in call.values else "self"
    matrices = call.out if key == "src" else call.values["self"]
    dims = [call.values.get(name, at) % matrices.dim() for at, name in enumerate(("dim1", "dim2"))]
    matrix = _letters(matrices.shape, dims)
    diagonal = [*(index for at, index in enumerate(matrix) if at not in dims), ":"]
    return (
        _function(matrix, {"self": matrix, "src": diagonal}) if key == "src" else _function(diagonal, {"self": matrix})
    )


_described(_diagonal, A.diagonal, A.diagonal_copy, A.diagonal_scatter)(_whole_call)


@_described(_expanded, A.tril, A.triu)
def _triangle(part: Part) -> torch.Tensor:
    """The diagonal of a part lies where its rows and columns begin."""
    (access,) = part.step.line.operands
    spans = [range(1) if index is None else unclipped(index, part.ranges) for index in access.indices]
    call = part.call.values
    diagonal = call.get("diagonal", 0) + spans[-2].start - spans[-1].start
    result: torch.Tensor = part.call.function(part.values["self"], diagonal)
    return result


def _summed(sign: str) -> Callable[[OperatorCall], str]:
    def text(call: OperatorCall) -> str:
        x = call.values["self"]
        source = _letters(x.shape)
        named_dims = call.values.get("dim")
        dims = (
            range(x.dim()) if named_dims in (None, []) else [named_dims] if isinstance(named_dims, int) else named_dims
        )
        reduced = {dim % x.dim() for dim in dims}
        keeps = call.values.get("keepdim", False)
        out = ["0" if at in reduced else index for at, index in enumerate(source) if keeps or at not in reduced]
        # There is nothing to reduce over in a dimension of size 1.
        return _function(out, {"self": source}, f"{sign}=" if any(source[dim] != "0" for dim in reduced) else "=")

    return text


_described(_summed("+"), A.sum)(_whole_call)
_described(_summed("max"), A.amax)(_whole_call)
_described(_summed("min"), A.amin)(_whole_call)


def _embedded(call: OperatorCall) -> str:
    words, indices = _letters(call.values["weight"].shape, [0]), call.values["indices"]
    looked_up = [_LETTERS[2 + at] if size > 1 else "0" for at, size in enumerate(indices.shape)]
    return _function([*looked_up, words[1]], {"weight": words, "indices": looked_up})


_described(_embedded, A.embedding)(_whole_call)


def _embedded_back(call: OperatorCall) -> str:
    out, indices = _letters(call.out.shape, [0]), call.values["indices"]
    looked_up = [_LETTERS[2 + at] if size > 1 else "0" for at, size in enumerate(indices.shape)]
    return _function(out, {"grad_output": [*looked_up, out[1]], "indices": looked_up}, "+=")


_described(_embedded_back, A.embedding_dense_backward)(_whole_call)


class _Picked:
    """What an index by tensors, as in ``x[:, rows, columns]``, takes from a tensor: its dimensions are whole."""

    def __init__(self, call: OperatorCall) -> None:
        x, indices = call.values["self"], call.values["indices"]
        dims = [at for at, positions in enumerate(indices) if positions is not None]
        shape: torch.Size = torch.broadcast_shapes(*(indices[at].shape for at in dims))  # type: ignore[no-untyped-call]
        self.source = _letters(x.shape, dims)
        # Where the dimensions are not next to each other, torch puts what is picked first.
        first = dims[0] if dims[-1] - dims[0] == len(dims) - 1 else 0
        self._rest = [index for at, index in enumerate(self.source) if at not in dims]
        self.picked = [_LETTERS[x.dim() + at] if size > 1 else "0" for at, size in enumerate(shape)]
        self.out = [*self._rest[:first], *self.picked, *self._rest[first:]]
        self.indices = {f"indices{at}": indices[at].shape for at in dims}

    @staticmethod
    def aligned(indices: Sequence[str], shape: Sequence[int]) -> list[str]:
        """Returns the indices of a tensor that is broadcast."""
        aligned = indices[len(indices) - len(shape) :]
        return ["0" if size == 1 else index for index, size in zip(aligned, shape, strict=True)]


def _indexed(call: OperatorCall) -> str:
    picked = _Picked(call)
    indices = {name: picked.aligned(picked.picked, shape) for name, shape in picked.indices.items()}
    return _function(picked.out, {"self": picked.source, **indices})


_described(_indexed, A.index, A._unsafe_index)(_whole_call)


def _index_put(call: OperatorCall) -> str:
    """What is put where is whole, as several may be put in one place."""
    picked = _Picked(call)
    out = [":" if index in picked.picked and index != "0" else index for index in picked.out]
    indices = {name: [":" if size > 1 else "0" for size in shape] for name, shape in picked.indices.items()}
    values = picked.aligned(out, call.values["values"].shape)
    return _function(picked.source, {"self": picked.source, **indices, "values": values})


_described(_index_put, A.index_put, A._unsafe_index_put)(_whole_call)


def _pooled(call: OperatorCall) -> str:
    """Samples and channels may be cut."""
    operands = {name: _letters(x.shape, range(2, x.dim())) for name, x in call.tensors().items()}
    return _function(_letters(call.out.shape, range(2, call.out.dim())), operands)


for _item in (0, 1):
    _described(_pooled, A.max_pool2d_with_indices, A.max_pool3d_with_indices, A.adaptive_max_pool2d, item=_item)(
        _whole_call
    )
_described(
    _pooled,
    A.max_pool2d_with_indices_backward, A.avg_pool2d, A.avg_pool2d_backward,
    A._adaptive_avg_pool2d, A._adaptive_avg_pool2d_backward, A.avg_pool3d, A.avg_pool3d_backward,
    A._adaptive_avg_pool3d, A._adaptive_avg_pool3d_backward, A.max_pool3d_with_indices_backward,
    A.adaptive_max_pool2d_backward, A.reflection_pad1d, A.reflection_pad1d_backward, A.reflection_pad2d,
    A.reflection_pad2d_backward, A.replication_pad2d, A.replication_pad2d_backward, A.upsample_nearest1d,
    A.upsample_nearest2d, A.upsample_bilinear2d, A.upsample_bicubic2d, A.upsample_linear1d,
)(_whole_call)  # fmt: skip


@_described(
    _pooled, A.upsample_nearest1d_backward, A.upsample_nearest2d_backward, A.upsample_bilinear2d_backward,
    A.upsample_bicubic2d_backward, A.upsample_linear1d_backward,
)  # fmt: skip
def _resized_back(part: Part) -> torch.Tensor:
    result: torch.Tensor = part.call.function(**{**part.values, "input_size": part.shape})
    return result


def _padded(call: OperatorCall) -> str:
    """What is padded is whole."""
    pad, rank = call.values["pad"], call.out.dim()
    padded = _letters(call.out.shape, [rank - 1 - at // 2 for at, size in enumerate(pad) if size])
    return _function(padded, {"self": padded})


_described(_padded, A.constant_pad_nd)(_whole_call)


def _sum_of(*terms: tuple[int, str]) -> str:
    return " + ".join(f"{times}*{name}" for times, name in terms)


def _convolution_indices(call: OperatorCall, spatial: Callable[[int], tuple[str, str, str]]) -> str:
    """Returns the text of a convolution, or of one of its gradients.

    Args:
        spatial: dimension -> the indices of input, weight and output there.
    """
    is_transposed = call.values["transposed"]
    tensors = call.tensors() | {"out": call.out}
    roles = {
        "input": "out" if call.item == 0 else "input",
        "weight": "out" if call.item == 1 else "weight",
        "output": "out" if call.item is None else "grad_output",
    }
    groups = call.values["groups"]
    channels = [tensors[roles[role]].shape[1] // groups for role in ("input", "output")]
    index = (
        ["o", "c"] if groups == 1 else [_sum_of((channels[1], "g"), (1, "o")), _sum_of((channels[0], "g"), (1, "c"))]
    )
    rows = [spatial(at) for at in range(tensors[roles["output"]].dim() - 2)]
    role_indices = {
        "input": ["n", index[1], *(row[0] for row in rows)],
        "weight": [*((index[1], "o") if is_transposed else (index[0], "c")), *(row[1] for row in rows)],
        "output": ["n", index[0], *(row[2] for row in rows)],
    }
    for role, tensor in roles.items():  # dimensions of size 1
        role_indices[role] = [
            "0" if size == 1 and name not in (":",) and name.isidentifier() else name
            for name, size in zip(role_indices[role], tensors[tensor].shape, strict=True)
        ]
    out = next(role for role, tensor in roles.items() if tensor == "out")
    operands = {roles[role]: role_indices[role] for role in role_indices if role != out and roles[role] in tensors}
    text = _function(role_indices[out], operands, "+=")
    bounds = {"g": groups, "o": channels[1], "c": channels[0]} if groups > 1 else {}
    listed = {name for row in role_indices.values() for name in row}
    missing = [f"{name} < {size}" for name, size in bounds.items() if name not in listed]
    return text + (f" where {', '.join(missing)}" if missing else "")


def _convolved(call: OperatorCall) -> str:
    values = call.values
    if values["transposed"]:  # each input reaches several outputs, which the text cannot say
        return _convolution_indices(call, lambda at: (":", ":", ":"))
    kernel = values["weight"].shape[2:]

    def spatial(at: int) -> tuple[str, str, str]:
        outer = [] if call.out.shape[2 + at] == 1 else [(values["stride"][at], f"h{at}")]
        inner = [] if kernel[at] == 1 else [(values["dilation"][at], f"r{at}")]
        return f"{_sum_of(*outer, *inner) or 0} - {values['padding'][at]}", f"r{at}", f"h{at}"

    return _convolution_indices(call, spatial)


@_described(_convolved, A.convolution)
def _convolve(part: Part) -> torch.Tensor:
    values = part.values
    groups = len(part.ranges["g"]) if "g" in part.ranges else 1
    if values["transposed"]:
        return part.call.function(**{**values, "groups": groups})  # type: ignore[no-any-return]
    around = [size for pair in reversed(part.outside("input")[2:]) for size in pair]
    x = F.pad(values["input"], around) if any(around) else values["input"]
    spatial = [0] * (x.dim() - 2)
    result: torch.Tensor = A.convolution(
        x, values["weight"], None, values["stride"], spatial, values["dilation"], False, spatial, groups
    )
    return result


def _back(item: int) -> None:
    def run(part: Part) -> torch.Tensor:
        values = part.values
        grad = values["grad_output"]
        # The other argument matters by its size.
        other = grad.new_empty(part.shape)
        x, weight = (other, values["weight"]) if item == 0 else (values["input"], other)
        groups = len(part.ranges["g"]) if "g" in part.ranges else 1
        gradients = A.convolution_backward(
            grad, x, weight, None, values["stride"], values["padding"], values["dilation"], values["transposed"],
            values["output_padding"], groups, [item == 0, item == 1, False],
        )  # fmt: skip
        return gradients[item]  # type: ignore[no-any-return]

    def text(call: OperatorCall) -> str:
        used = {name: value for name, value in call.values.items() if name != ("input", "weight")[item]}
        return _convolution_indices(OperatorCall(call.function, item, used, call.out), lambda at: (":", ":", ":"))

    _described(text, A.convolution_backward, item=item)(run)


_back(0)
_back(1)


def _bias_text(call: OperatorCall) -> str:
    grad = call.values["grad_output"]
    source = ["n" if grad.shape[0] > 1 else "0", "o" if grad.shape[1] > 1 else "0", *[":"] * (grad.dim() - 2)]
    # Not over the samples where there is one.
    return _function([source[1]], {"grad_output": source}, "+=" if source[0] == "n" else "=")


@_described(_bias_text, A.convolution_backward, item=2)
def _bias_gradient(part: Part) -> torch.Tensor:
    grad: torch.Tensor = part.values["grad_output"]
    return grad.sum([dim for dim in range(grad.dim()) if dim != 1])


def renamed(text: str, names: Mapping[str, str]) -> str:
    """Returns a description with other names of tensors."""
    return re.sub(r"\b(\w+)\[", lambda match: f"{names.get(match[1], match[1])}[", text)
