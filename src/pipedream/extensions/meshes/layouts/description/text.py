"""Reads operators from text, and spells them: which elements of its operands each element of a result needs.

The language is Tofu's tensor description language (Wang et al., EuroSys 2019, section 4.1) as one line per operator:

    y[b, o] += x[b, i] * w[i, o]
    z[n, c, h, w] max= y[n, c, 2*h + r - 1, 2*w + s - 1] where r < 3, s < 3
    p[b, :] = softmax(z[b, :])

An index that is only on the right is reduced, by +=, *=, max= or min=. Indices may be affine, and `:` is a whole
dimension. Functions and constants may be anything: only the tensors and their indices count.
"""

import ast
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple, NoReturn

from pipedream.core.errors import PlanError

_LINE = re.compile(r"(?P<left>\s*\w+\s*\[[^\]]*\])\s*(?P<sign>\+=|\*=|max=|min=|=)(?P<right>[^=].*)")
_TENSOR = re.compile(r"\s*\w+\s*\[[^\]]*\]\s*")
_WHERE = re.compile(r"\bwhere\b(?!\s*[\[(])")  # a tensor or a function may have this name
_BOUND = re.compile(r"\s*(\w+)\s*<\s*(\d+)\s*")
_NAME = re.compile(r"\b[^\W\d]\w*")

LETTERS = "abcdefghjklmnpqstuvwxyz"


class Affine(NamedTuple):
    """An expression of indices.

    Attributes:
        terms: each index and its coefficient.
    """

    terms: tuple[tuple[str, int], ...]
    offset: int = 0

    @property
    def plain(self) -> str | None:
        """The index, if this is one and nothing else."""
        return self.terms[0][0] if not self.offset and len(self.terms) == 1 and self.terms[0][1] == 1 else None


class Access(NamedTuple):
    """A tensor with an expression for each of its dimensions, or None for a whole dimension.

    Attributes:
        column: column in its line, from 1.
    """

    tensor: str
    indices: tuple[Affine | None, ...]
    column: int


@dataclass(frozen=True)
class Operator:
    """One operator.

    Attributes:
        number: line number, from 1.
        reduction: "+", "*", "max", "min", or "" for none.
        bounds: index -> size, as given by `where`.
        is_copy: the right side is a tensor and nothing else, so that nothing is computed.
        sizes: index -> size, in the order in which they occur; {} before the sizes of tensors are known.
    """

    number: int
    text: str
    output: Access
    reduction: str
    operands: tuple[Access, ...]
    bounds: Mapping[str, int]
    is_copy: bool
    sizes: Mapping[str, int] = field(default_factory=dict)

    @property
    def result(self) -> str:
        """The tensor that it computes."""
        return self.output.tensor

    def __str__(self) -> str:
        return self.text

    @cached_property
    def accesses(self) -> tuple[Access, ...]:
        """Operands, then the result."""
        return (*self.operands, self.output)

    @cached_property
    def is_affine(self) -> bool:
        """Whether a dimension has anything but one index, or is whole."""
        return any(
            index and index.terms and index.plain is None for access in self.accesses for index in access.indices
        )

    @cached_property
    def reduced(self) -> frozenset[str]:
        """The indices that the result lacks."""
        in_result = {name for index in self.output.indices if index for name, _ in index.terms}
        return frozenset(self.sizes) - in_result

    def outermost(self, index: Affine | None, size: int) -> str | None:
        """Returns the index whose equal parts are equal parts of a dimension, in order, or None.

        It is there alone, or the first of several that are merged row by row, such as `h` in `64*h + k` with 64 of `k`.

        Args:
            index: the expression of the dimension.
            size: size of the dimension.
        """
        if index is None or index.offset or not index.terms:
            return None
        terms = sorted(index.terms, key=lambda term: -term[1])
        for name, times in terms:
            if times * self.sizes[name] != size:
                return None
            size = times
        return terms[0][0] if size == 1 else None


def read_lines(text: str) -> list[Operator]:
    """Reads one operator from each line that is not empty; `#` begins a comment.

    Raises:
        PlanError: text that is not of this form, with line and column.
    """
    lines = []
    for number, whole in enumerate(text.splitlines(), 1):
        line = whole.partition("#")[0].rstrip()
        if line.strip():
            lines.append(_read_line(number, line))
    return lines


def rename_indices(line: Operator, names: Mapping[str, str]) -> str:
    """Returns a line's text with other names of its indices."""
    where = _WHERE.search(line.text)
    formula, bounds = (line.text[: where.start()], line.text[where.start() :]) if where else (line.text, "")

    def other(match: re.Match[str]) -> str:
        return names.get(match[0], match[0])

    formula = re.sub(r"\[[^\]]*\]", lambda access: _NAME.sub(other, access[0]), formula)
    return formula + _NAME.sub(other, bounds)


def _read_line(number: int, line: str) -> Operator:
    where = _WHERE.search(line)
    formula = line[: where.start()] if where else line
    match = _LINE.fullmatch(formula)
    if match is None:
        column = len(line) - len(line.lstrip()) + 1
        _refuse(
            number, column, line, "is not a result, one of = += *= max= min=, and an expression, as y[i] += x[i, j]"
        )
    (result,) = _Expression(number, line, match["left"], 0).accesses
    operands: dict[object, Access] = {}  # one that is read twice at the same place is one
    for access in _Expression(number, line, match["right"], match.start("right")).accesses:
        operands.setdefault((access.tensor, access.indices), access)
    bounds = _read_bounds(number, line, where.end()) if where else {}
    reduction, is_copy = match["sign"][:-1], _TENSOR.fullmatch(match["right"]) is not None
    return Operator(
        number, line.strip(), result, reduction, tuple(operands.values()), bounds, is_copy and not reduction
    )


def _read_bounds(number: int, line: str, start: int) -> dict[str, int]:
    bounds = {}
    column = start
    for part in line[start:].split(","):
        match = _BOUND.fullmatch(part)
        if match is None or int(match[2]) < 1:
            _refuse(
                number, column + 1, line, f"has {part.strip()!r} after `where`; write an index and a size, as r < 3"
            )
        bounds[match[1]] = int(match[2])
        column += len(part) + 1
    return bounds


def _refuse(number: int, column: int, line: str, what: str) -> NoReturn:
    raise PlanError(f"line {number}, column {column} of the operators: {line.strip()!r} {what}")


class _Expression:
    """Some part of a line, read as Python reads it.

    Args:
        start: where the part begins in the line.

    Attributes:
        accesses: the tensors that are read, from left to right.
    """

    def __init__(self, number: int, line: str, part: str, start: int) -> None:
        self._number, self._line = number, line
        shown = part.lstrip()
        self._start = start + len(part) - len(shown)
        # A tensor without dimensions is x[] here, which Python does not read.
        self._source = shown.replace("[]", "[()]")
        self.accesses: list[Access] = []
        try:
            tree = ast.parse(self._source, mode="eval")
        except SyntaxError as error:
            _refuse(number, self._start + (error.offset or 1), line, f"cannot be read: {error.msg}")
        self._read(tree.body)

    def _find_column(self, node: ast.expr) -> int:
        return self._start + node.col_offset - 2 * self._source[: node.col_offset].count("[()]") + 1

    def _refuse(self, node: ast.expr, what: str) -> NoReturn:
        _refuse(self._number, self._find_column(node), self._line, what)

    def _read(self, node: ast.expr) -> None:
        match node:
            case ast.Subscript(value=ast.Name(id=tensor), slice=indices):
                elements = indices.elts if isinstance(indices, ast.Tuple) else [indices]
                self.accesses.append(Access(tensor, tuple(map(self._read_index, elements)), self._find_column(node)))
            case ast.BinOp(left=left, right=right):
                self._read(left)
                self._read(right)
            case ast.UnaryOp(operand=operand):
                self._read(operand)
            case ast.Call(func=ast.Name() | ast.Attribute(), args=arguments, keywords=named):
                for argument in [*arguments, *(word.value for word in named)]:
                    self._read(argument)
            case ast.Constant():
                pass
            case ast.Name(id=name):
                self._refuse(node, f"has {name!r} without indices; write {name}[i, j], or {name}[]")
            case _:
                self._refuse(node, f"has {ast.unparse(node)!r}, which is not a tensor or a function")

    def _read_index(self, node: ast.expr) -> Affine | None:
        if isinstance(node, ast.Slice) and node.lower is node.upper is node.step is None:
            return None
        terms = self._read_terms(node)
        offset = terms.pop("", 0)
        return Affine(tuple((name, times) for name, times in terms.items() if times), offset)

    def _read_terms(self, node: ast.expr) -> dict[str, int]:
        """Returns index -> coefficient; '' is the constant."""
        match node:
            case ast.Name(id=name):
                return {name: 1}
            case ast.Constant(value=int(value)):
                return {"": value}
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                return {name: -times for name, times in self._read_terms(operand).items()}
            case ast.BinOp(left=left, op=ast.Add() | ast.Sub() as op, right=right):
                sums, sign = self._read_terms(left), 1 if isinstance(op, ast.Add) else -1
                for name, times in self._read_terms(right).items():
                    sums[name] = sums.get(name, 0) + sign * times
                return sums
            case ast.BinOp(left=left, op=ast.Mult(), right=right):
                constant, rest = self._read_terms(left), self._read_terms(right)
                if not set(constant) <= {""}:
                    constant, rest = rest, constant
                if set(constant) <= {""}:
                    return {name: times * constant.get("", 0) for name, times in rest.items()}
        self._refuse(node, f"has the index {ast.unparse(node)!r}; write sums of indices times numbers, or :")


def name_dimensions(shape: Sequence[int], whole: Sequence[int] = ()) -> list[str]:
    """Returns an index for each dimension: 0 where the size is 1, and : where it is to be whole."""
    chosen = [dim % len(shape) for dim in whole]
    return [":" if at in chosen else LETTERS[at] if size > 1 else "0" for at, size in enumerate(shape)]


def broadcast(indices: Sequence[str], shape: Sequence[int]) -> list[str]:
    """Returns the indices of a tensor of this shape that is broadcast to one with `indices`."""
    aligned = indices[len(indices) - len(shape) :]
    return ["0" if size == 1 else index for index, size in zip(aligned, shape, strict=True)]


def _spell_access(tensor: str, indices: Sequence[str]) -> str:
    return f"{tensor}[{', '.join(indices)}]"


def spell_function(out: Sequence[str], operands: Mapping[str, Sequence[str]], sign: str = "=") -> str:
    """Spells an operator that computes `out` from operands."""
    accesses = ", ".join(_spell_access(name, indices) for name, indices in operands.items())
    return f"{_spell_access('out', out)} {sign} f({accesses})"


def spell_copy(source: Sequence[str], out: Sequence[str]) -> str:
    """Spells an operator that moves the elements of `self` and computes none."""
    return f"{_spell_access('out', out)} = {_spell_access('self', source)}"


def spell_sum(*terms: tuple[int, str]) -> str:
    """Spells a sum of indices with their coefficients."""
    return " + ".join(f"{times}*{name}" for times, name in terms)


def rename_tensors(text: str, names: Mapping[str, str]) -> str:
    """Returns a line with other names of tensors."""
    return re.sub(r"\b(\w+)\[", lambda match: f"{names.get(match[1], match[1])}[", text)
