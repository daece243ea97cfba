"""Arrays of the planner. A formula that takes a number or an array serves one stage and all stages at once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

BoolArray = NDArray[np.bool_]
IntArray = NDArray[np.integer[Any]]
FloatArray = NDArray[np.floating[Any]]
WholeArray = NDArray[np.object_]
"""Python integers of any size."""

Cut = int | IntArray
"""The index of a place where a graph may be cut (`planner.tables.search_space`), or an array of them."""
Span = tuple[Cut, Cut]
Bytes = int | IntArray
Seconds = float | FloatArray

_Array = TypeVar("_Array", bound=NDArray[Any])

_KEPT_BYTES = 2**29

_HALF = 52  # bits: two such halves of a whole number, and their differences, are exact as floating-point numbers


class Tables(dict[Any, Any]):
    """Arrays of about the same size by what they depend on; as many are kept as half a gigabyte holds."""

    def look_up(self, key: Any, make: Callable[[], _Array]) -> _Array:
        """Returns the array of a key, made if there is none. Nobody may change it."""
        table: _Array = self[key] if key in self else make()
        if key not in self and len(self) * table.nbytes < _KEPT_BYTES:
            self[key] = table
        return table


@dataclass(frozen=True, eq=False)
class ExactSums:
    """Seconds of all layers before each place, as whole numbers over a power of two: differences are rounded once.

    So equal layers take equal seconds at any place, and ties between plans are exact.
    """

    whole: WholeArray
    scale: int

    def between(self, first: Cut, last: Cut) -> Seconds:
        if self._halves is None:
            exact: Seconds = (self.whole[last] - self.whole[first]) / self.scale
            return exact
        high, low = self._halves
        seconds: Seconds = (high[last] - high[first]) + (low[last] - low[first])  # only this sum rounds
        return seconds

    @cached_property
    def _halves(self) -> tuple[FloatArray, FloatArray] | None:
        """None: they do not fit, and whole numbers, which take many times as long, are subtracted."""
        if max(self.whole) >> 2 * _HALF or self.scale >> 900:  # divided by more, a half may lose bits
            return None
        high, low = self.whole >> _HALF, self.whole & (1 << _HALF) - 1
        return high.astype(float) * (2.0**_HALF / self.scale), low.astype(float) / self.scale


@dataclass(frozen=True, eq=False)
class RunExtremes:
    """The minimum or maximum of any run of a row of numbers, in two look-ups (a sparse table).

    Attributes:
        tables: tables[k][i] is the extreme of the (at most) 2**k numbers from i on.
    """

    tables: FloatArray | IntArray
    extreme: np.ufunc

    @classmethod
    def of(cls, row: FloatArray | IntArray | list[int], extreme: np.ufunc) -> RunExtremes:
        """The row must not be empty."""
        tables, width = [np.asarray(row)], 1
        if (tables[0] == tables[0][0]).all():
            return cls(tables[0][None], extreme)
        while 2 * width <= len(tables[0]):
            before = tables[-1]
            after = before.copy()
            after[:-width] = extreme(before[:-width], before[width:])
            tables.append(after)
            width *= 2
        stacked: Any = np.stack(tables)
        return cls(stacked, extreme)

    def between(self, first: Cut, end: Cut) -> Any:
        """Returns the extremes of the numbers first <= i < end; of `first` alone if that run is empty."""
        first = np.minimum(first, self.tables.shape[1] - 1)
        if len(self.tables) == 1:  # a row of one, or of equal numbers
            return self.tables[0][np.broadcast_arrays(first, end)[0]]  # in the shape of both
        length = np.maximum(np.asarray(end) - first, 1)
        power = np.frexp(length)[1] - 1  # floor(log2), exactly
        return self.extreme(self.tables[power, first], self.tables[power, first + length - (1 << power)])
