"""A call of a torch operator, the part of it that one rank computes, and what describes both."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from pipedream.extensions.meshes.layouts.description.operators import find_range
from pipedream.extensions.meshes.layouts.description.text import Operator

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
        access = next(operand for operand in self.step.line.operands if operand.tensor == tensor)
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
        """Returns the part of a call that one rank computes, see `Part`.

        Args:
            parts: of the tensors among the arguments; those that the text lacks stay without data.
        """
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
