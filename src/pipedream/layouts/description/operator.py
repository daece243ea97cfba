"""One operator of a step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from pipedream.layouts.description.text import Access, Affine, Line


@dataclass(frozen=True)
class Operator:
    """A line of the text, checked.

    Attributes:
        sizes: index -> size, in the order in which they occur.
    """

    line: Line
    sizes: Mapping[str, int]

    @property
    def result(self) -> str:
        """The tensor that it computes."""
        return self.line.result.tensor

    @cached_property
    def accesses(self) -> tuple[Access, ...]:
        """Operands, then the result."""
        return (*self.line.operands, self.line.result)

    @cached_property
    def is_affine(self) -> bool:
        """Whether a dimension has anything but one index, or is whole."""
        return any(
            index and index.terms and index.plain is None for access in self.accesses for index in access.indices
        )

    @cached_property
    def reduced(self) -> frozenset[str]:
        """The indices that the result lacks."""
        return frozenset(self.sizes) - _collect_names(self.line.result)

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

    def __str__(self) -> str:
        return self.line.text


def _collect_names(access: Access) -> frozenset[str]:
    return frozenset(name for index in access.indices if index for name, _ in index.terms)
