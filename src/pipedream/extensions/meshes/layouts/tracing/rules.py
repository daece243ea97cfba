"""Descriptions of torch's operators except convolutions: functions that spell calls of each kind, and a table."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any, TypeVar

import torch

from pipedream.extensions.meshes.layouts.description.operators import find_range
from pipedream.extensions.meshes.layouts.description.text import (
    LETTERS,
    Operator,
    broadcast,
    name_dimensions,
    spell_copy,
    spell_function,
    spell_sum,
)

_Operand = TypeVar("_Operand")

COMBINE: Mapping[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "+": torch.add,
    "*": torch.mul,
    "max": torch.maximum,
    "min": torch.minimum,
}
"""Reduction -> what makes one of two partial results."""


@dataclass(frozen=True)
class OperatorCall:
    """An operator with its arguments.

    Attributes:
        item: number of the result, where there are several.
        values: argument of the schema -> value; tensors may be without data.
        out: the result, without data.
    """

    function: Any
    item: int | None
    values: Mapping[str, Any]
    out: torch.Tensor

    def tensors(self) -> dict[str, torch.Tensor]:
        """Returns the tensors among the arguments; those of a list have a number after its name."""
        return dict(yield_operands(self.values, torch.Tensor))

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Tensor -> its sizes; the result is `out`."""
        return {name: tuple(tensor.shape) for name, tensor in (self.tensors() | {"out": self.out}).items()}


def yield_operands(arguments: Mapping[str, Any], kind: type[_Operand]) -> Iterator[tuple[str, _Operand]]:
    """Yields the tensors among arguments, of the class `kind`; those of a list have a number after its name."""
    for name, value in arguments.items():
        if isinstance(value, kind):
            yield name, value
        elif isinstance(value, list | tuple):
            yield from ((f"{name}{at}", element) for at, element in enumerate(value) if isinstance(element, kind))


@dataclass(frozen=True)
class Part:
    """The part of a call that one rank computes.

    Attributes:
        values: arguments, with the parts of tensors that the rank needs.
        shape: shape of its part of the result.
        step: the operator's line, with the schema's names.
        ranges: index -> values.
    """

    call: OperatorCall
    values: Mapping[str, Any]
    shape: tuple[int, ...]
    step: Operator
    ranges: Mapping[str, range]

    @property
    def source(self) -> torch.Tensor:
        """The argument `self`."""
        source: torch.Tensor = self.values["self"]
        return source

    def outside(self, tensor: str) -> list[tuple[int, int]]:
        """Returns for each dimension how many elements before and after a tensor its part would have, as padding."""
        access = next(operand for operand in self.step.operands if operand.tensor == tensor)
        padding = []
        for index, size in zip(access.indices, self.call.values[tensor].shape, strict=True):
            values = range(size) if index is None else find_range(index, self.ranges)
            padding.append((max(0, -values.start), max(0, values.stop - size)))
        return padding


def _run_operator(part: Part) -> torch.Tensor:
    """Applies the operator itself; what it computes of its own parts is its part of the result."""
    result = part.call.function(**part.values)
    return result if part.call.item is None else result[part.call.item]  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Description:
    """The text of some operators, and how a part of one is computed.

    Attributes:
        operators: torch's, each with all of its overloads.
        text: the text of any call, with the names of the schema, and `out` for the result; or a function that returns
            the text of one.
        run: computes a part.
        items: the results that it describes; None is the only one of an operator.
    """

    operators: Sequence[Any]
    text: Callable[[OperatorCall], str] | str
    run: Callable[[Part], torch.Tensor] = _run_operator
    items: Iterable[int | None] = (None,)

    def spell(self, call: OperatorCall) -> str:
        """Returns the text of a call."""
        return self.text if isinstance(self.text, str) else self.text(call)

    def compute(
        self,
        call: OperatorCall,
        step: Operator,
        parts: Mapping[str, torch.Tensor],
        shape: tuple[int, ...],
        ranges: Mapping[str, range],
    ) -> torch.Tensor:
        """Returns the part of a call that one rank computes; tensors that the text lacks have no parts."""
        values: dict[str, Any] = {}
        for name, value in call.values.items():
            if isinstance(value, list | tuple):
                values[name] = [parts.get(f"{name}{at}", element) for at, element in enumerate(value)]
            else:
                values[name] = parts.get(name, value)
        return self.run(Part(call, values, shape, step, ranges))


def list_overloads(operator: Any) -> list[Any]:
    """Returns an overload itself, or all those of an operator."""
    if isinstance(operator, torch._ops.OpOverload):
        return [operator]
    return [getattr(operator, name) for name in operator.overloads()]


A = torch.ops.aten

CONSTANT = frozenset(
    overload
    for operator in (
        A.full, A.zeros, A.ones, A.arange, A.scalar_tensor, A.new_zeros, A.new_ones, A.new_full, A.empty, A.new_empty,
        A.new_empty_strided,
    )
    for overload in list_overloads(operator)
)  # fmt: skip
"""Operators whose result depends on sizes alone."""

DRAWN = frozenset(
    [
        A.bernoulli.p,
        *(draw for packet in (A.rand, A.rand_like, A.randn, A.randn_like) for draw in list_overloads(packet)),
    ]
)
"""Operators whose result is random numbers, whose distribution does not depend on other tensors."""


def _spell_pointwise(call: OperatorCall) -> str:
    out = name_dimensions(call.out.shape)
    return spell_function(out, {name: broadcast(out, tensor.shape) for name, tensor in call.tensors().items()})


POINTWISE = Description((), _spell_pointwise)
"""The description of all operators that torch tags as pointwise."""


def _spell_copy_in_place(call: OperatorCall) -> str:
    return _spell_pointwise(OperatorCall(call.function, None, {"src": call.values["src"]}, call.out))


# -- views ------------------------------------------------------------------------------------------------


def _spell_expanded(call: OperatorCall) -> str:
    out = name_dimensions(call.out.shape)
    return spell_copy(broadcast(out, call.values["self"].shape), out)


def _spell_permuted(call: OperatorCall) -> str:
    x = call.values["self"]
    source = name_dimensions(x.shape)
    if "dims" in call.values:
        order = [dim % x.dim() for dim in call.values["dims"]]
    else:
        order = list(range(x.dim()))
        first, other = call.values.get("dim0", 0) % x.dim(), call.values.get("dim1", 1) % x.dim()
        order[first], order[other] = order[other], order[first]
    return spell_copy(source, [source[dim] for dim in order])


def _spell_reshaped(call: OperatorCall) -> str:
    """Dimensions that are merged or split are sums of indices; those that are mixed are whole."""
    letters = iter(LETTERS)
    sides: tuple[list[str], list[str]] = ([], [])
    for group in _pair_dimensions(list(call.values["self"].shape), list(call.out.shape)):
        large = [[size for size in sizes if size > 1] for sizes in group]
        if len(large[0]) > 1 and len(large[1]) > 1:
            for side, sizes in zip(sides, group, strict=True):
                side += [":" if size > 1 else "0" for size in sizes]
            continue
        parts = max(large, key=len)
        split = [next(letters) for _ in parts]
        merged = spell_sum(*((prod(parts[at + 1 :]), name) for at, name in enumerate(split)))
        for side, sizes, large_sizes in zip(sides, group, large, strict=True):
            names = iter(split if len(large_sizes) == len(parts) else [merged])
            side += [next(names) if size > 1 else "0" for size in sizes]
    return spell_copy(*sides)


def _pair_dimensions(source: list[int], out: list[int]) -> Iterator[tuple[list[int], list[int]]]:
    """Yields, from left to right, the fewest sizes of both shapes that have as many elements."""
    rest = source, out
    while any(rest):
        group: tuple[list[int], list[int]] = ([], [])
        while not all(group) or prod(group[0]) != prod(group[1]):
            side = int(prod(group[1]) < prod(group[0])) if all(group) else int(bool(group[0]))
            if not rest[side]:  # ones at the end
                side = 1 - side
            if not rest[side]:
                break
            group[side].append(rest[side].pop(0))
        yield group


def _spell_selected(call: OperatorCall) -> str:
    x = call.values["self"]
    dim, index = call.values["dim"] % x.dim(), call.values["index"]
    source = name_dimensions(x.shape)
    source[dim] = str(index % x.shape[dim])
    return spell_copy(source, source[:dim] + source[dim + 1 :])


def _spell_sliced(call: OperatorCall) -> str:
    x = call.values["self"]
    dim = call.values.get("dim", 0) % x.dim()
    start, step = call.values.get("start") or 0, call.values.get("step", 1)
    start = min(max(start + x.shape[dim] if start < 0 else start, 0), x.shape[dim])
    return _spell_window(call, dim, lambda index: f"{step}*{index} + {start}")


def _slice(part: Part) -> torch.Tensor:
    x, values = part.source, part.call.values
    return x[(slice(None),) * (values.get("dim", 0) % x.dim()) + (slice(None, None, values.get("step", 1)),)]


def _spell_split(call: OperatorCall) -> str:
    values, item = call.values, call.item or 0
    start = sum(values["split_sizes"][:item]) if "split_sizes" in values else item * values["split_size"]
    return _spell_window(call, values.get("dim", 0) % values["self"].dim(), lambda index: f"{index} + {start}")


def _spell_window(call: OperatorCall, dim: int, place: Callable[[str], str]) -> str:
    """Spells a part of one dimension, whose index does not reach the end of the source."""
    out = name_dimensions(call.out.shape)
    bound = f" where {out[dim]} < {call.out.shape[dim]}" if out[dim].isidentifier() else ""
    return spell_copy([*out[:dim], place(out[dim]), *out[dim + 1 :]], out) + bound


def _take_triangle(part: Part) -> torch.Tensor:
    """The diagonal of a part lies where its rows and columns begin."""
    (access,) = part.step.operands
    *_, rows, columns = [range(1) if index is None else find_range(index, part.ranges) for index in access.indices]
    diagonal = part.call.values.get("diagonal", 0) + rows.start - columns.start
    triangle: torch.Tensor = part.call.function(part.source, diagonal)
    return triangle


def _spell_diagonal(call: OperatorCall) -> str:
    """The rows and columns of a diagonal are whole, and it is the last dimension."""
    is_scattered = "src" in call.values
    matrices = call.out if is_scattered else call.values["self"]
    dims = [call.values.get(name, at) % matrices.dim() for at, name in enumerate(("dim1", "dim2"))]
    matrix = name_dimensions(matrices.shape, dims)
    diagonal = [*(index for at, index in enumerate(matrix) if at not in dims), ":"]
    if is_scattered:
        return spell_function(matrix, {"self": matrix, "src": diagonal})
    return spell_function(diagonal, {"self": matrix})


# -- functions of whole dimensions, and reductions --------------------------------------------------------


def _list_dims(call: OperatorCall, rank: int) -> list[int]:
    """Returns the dimensions that a call names; all, where it names none."""
    dims = call.values.get("dim", call.values.get("dims"))
    if dims is None or dims == []:
        return list(range(rank))
    return [dim % rank for dim in ([dims] if isinstance(dims, int) else dims)]


def _spell_along_dims(call: OperatorCall) -> str:
    """Some dimensions, and those in which the tensors differ, are whole in all tensors that have them."""
    rank, tensors = call.out.dim(), call.tensors()
    dims = _list_dims(call, rank)
    shapes = [x.shape for x in (*tensors.values(), call.out) if x.dim() == rank]
    uneven = [at for at in range(rank) if len({shape[at] for shape in shapes}) > 1]
    out = name_dimensions(call.out.shape, [*dims, *uneven])
    operands = {}
    for name, x in tensors.items():
        indices = out if x.dim() == rank else [index for at, index in enumerate(out) if at not in dims]
        operands[name] = [
            "0" if size == 1 and index != ":" else index for index, size in zip(indices, x.shape, strict=True)
        ]
    return spell_function(out, operands)


def _spell_reduced(call: OperatorCall, sign: str = "=") -> str:
    """The dimensions that go are whole, unless a sign reduces over them."""
    x, keeps = call.values["self"], call.values.get("keepdim", False)
    gone = _list_dims(call, x.dim())
    source = name_dimensions(x.shape, gone if sign == "=" else ())
    out = ["0" if at in gone else index for at, index in enumerate(source) if keeps or at not in gone]
    # There is nothing to reduce over in a dimension of size 1.
    return spell_function(out, {"self": source}, sign if any(source[dim] != "0" for dim in gone) else "=")


def _spell_pooled(call: OperatorCall) -> str:
    """Samples and channels may be divided."""
    operands = {name: name_dimensions(x.shape, range(2, x.dim())) for name, x in call.tensors().items()}
    return spell_function(name_dimensions(call.out.shape, range(2, call.out.dim())), operands)


def _spell_padded(call: OperatorCall) -> str:
    """Padded dimensions are whole."""
    pad, rank = call.values["pad"], call.out.dim()
    padded = name_dimensions(call.out.shape, [rank - 1 - at // 2 for at, size in enumerate(pad) if size])
    return spell_function(padded, {"self": padded})


# -- look-ups ---------------------------------------------------------------------------------------------


def _spell_embedding(call: OperatorCall) -> str:
    indices, is_backward = call.values["indices"], "grad_output" in call.values
    words = [LETTERS[2 + at] if size > 1 else "0" for at, size in enumerate(indices.shape)]
    weight = name_dimensions((call.out if is_backward else call.values["weight"]).shape, [0])
    looked_up = [*words, weight[1]]
    if is_backward:
        return spell_function(weight, {"grad_output": looked_up, "indices": words}, "+=")
    return spell_function(looked_up, {"weight": weight, "indices": words})


def _spell_indexed(call: OperatorCall) -> str:
    """The elements that an index by tensors takes, as in ``x[:, rows, columns]``; indexed dimensions are whole.

    Where values are put there, they and their positions are whole too, as several may be put in one place.
    """
    x, indices, is_put = call.values["self"], call.values["indices"], "values" in call.values
    dims = [at for at, positions in enumerate(indices) if positions is not None]
    shape: torch.Size = torch.broadcast_shapes(*(indices[at].shape for at in dims))  # type: ignore[no-untyped-call]
    source = name_dimensions(x.shape, dims)
    # Where the dimensions are not next to each other, torch puts what is picked first.
    first = dims[0] if dims[-1] - dims[0] == len(dims) - 1 else 0
    rest = [index for at, index in enumerate(source) if at not in dims]
    picked = ["0" if size == 1 else ":" if is_put else LETTERS[x.dim() + at] for at, size in enumerate(shape)]
    out = [*rest[:first], *picked, *rest[first:]]
    operands = {"self": source} | {f"indices{at}": broadcast(picked, indices[at].shape) for at in dims}
    if is_put:
        return spell_function(source, operands | {"values": broadcast(out, call.values["values"].shape)})
    return spell_function(out, operands)


DESCRIPTIONS = (
    Description((A.zeros_like, A.ones_like, A.full_like, A.empty_like), _spell_pointwise),
    Description((A.copy_, A.copy), _spell_copy_in_place, lambda part: part.values["src"].expand(part.shape).clone()),
    Description((A.mm,), "out[i, j] += self[i, k] * mat2[k, j]"),
    Description((A.bmm,), "out[b, i, j] += self[b, i, k] * mat2[b, k, j]"),
    Description((A.mv,), "out[i] += self[i, k] * vec[k]"),
    Description((A.dot,), "out[] += self[k] * tensor[k]"),
    Description((A.permute, A.transpose), _spell_permuted),
    Description(
        (A.view, A.reshape, A._unsafe_view, A.unsqueeze, A.squeeze, A.view_copy, A._reshape_copy),
        _spell_reshaped,
        lambda part: part.source.reshape(part.shape),
    ),
    Description((A.clone, A.alias, A.detach, A._to_copy, A.lift_fresh_copy), _spell_expanded),
    Description((A.expand,), _spell_expanded, lambda part: part.source.expand(part.shape)),
    Description(
        (A.select, A.select_copy), _spell_selected, lambda part: part.source.select(part.call.values["dim"], 0)
    ),
    Description((A.slice,), _spell_sliced, _slice),
    Description(
        (A.split, A.unsafe_split, A.split_with_sizes, A.unsafe_split_with_sizes),
        _spell_split,
        lambda part: part.source,
        items=range(64),
    ),
    Description((A.tril, A.triu), _spell_expanded, _take_triangle),
    Description((A.diagonal, A.diagonal_copy, A.diagonal_scatter), _spell_diagonal),
    Description(
        (
            A._softmax, A._safe_softmax, A._log_softmax, A._softmax_backward_data, A._log_softmax_backward_data,
            A.cat, A.cumsum, A.cumprod, A.logcumsumexp, A.gather, A.scatter, A.scatter_add, A.select_scatter,
            A.slice_scatter, A.flip, A.roll,
        ),
        _spell_along_dims,
    ),
    Description((A.sort, A.topk), _spell_along_dims, items=(0, 1)),
    Description((A.argmax, A.argmin, A.any, A.all, A.prod), _spell_reduced),
    Description((A.max, A.min), _spell_reduced, items=(0, 1)),
    Description((A.sum,), partial(_spell_reduced, sign="+=")),
    Description((A.amax,), partial(_spell_reduced, sign="max=")),
    Description((A.amin,), partial(_spell_reduced, sign="min=")),
    Description((A.embedding, A.embedding_dense_backward), _spell_embedding),
    Description((A.index, A._unsafe_index, A.index_put, A._unsafe_index_put), _spell_indexed),
    Description(
        (A.max_pool2d_with_indices, A.max_pool3d_with_indices, A.adaptive_max_pool2d), _spell_pooled, items=(0, 1)
    ),
    Description(
        (
            A.max_pool2d_with_indices_backward, A.avg_pool2d, A.avg_pool2d_backward, A._adaptive_avg_pool2d,
            A._adaptive_avg_pool2d_backward, A.avg_pool3d, A.avg_pool3d_backward, A._adaptive_avg_pool3d,
            A._adaptive_avg_pool3d_backward, A.max_pool3d_with_indices_backward, A.adaptive_max_pool2d_backward,
            A.reflection_pad1d, A.reflection_pad1d_backward, A.reflection_pad2d, A.reflection_pad2d_backward,
            A.replication_pad2d, A.replication_pad2d_backward, A.upsample_nearest1d, A.upsample_nearest2d,
            A.upsample_bilinear2d, A.upsample_bicubic2d, A.upsample_linear1d,
        ),
        _spell_pooled,
    ),
    Description(
        (
            A.upsample_nearest1d_backward, A.upsample_nearest2d_backward, A.upsample_bilinear2d_backward,
            A.upsample_bicubic2d_backward, A.upsample_linear1d_backward,
        ),
        _spell_pooled,
        lambda part: part.call.function(**{**part.values, "input_size": part.shape}),
    ),
    Description((A.constant_pad_nd,), _spell_padded),
)  # fmt: skip
"""The operators that this library describes; those that torch tags as pointwise need none."""
