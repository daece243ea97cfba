"""Results as a line and as a table; what draws them in a notebook is a hook."""

import csv
import io
from collections.abc import Callable, Iterable, Sequence
from itertools import groupby
from typing import Any, ClassVar

from pipedream.core.errors import PipelineError

_MIN_FOLDED_ROWS = 3


def fold(rows: Iterable[Sequence[str]]) -> list[list[str]]:
    """Joins three or more neighbouring rows that differ only in their first cell, which names them.

    >>> fold([["0", "in"], ["1", "block"], ["2", "block"], ["3", "block"], ["4", "out"]])
    [['0', 'in'], ['1 .. 3', 'block'], ['4', 'out']]
    """
    folded = []
    for _, same in groupby(rows, key=lambda row: list(row[1:])):
        group = [list(row) for row in same]
        if len(group) < _MIN_FOLDED_ROWS:
            folded += group
        else:
            folded.append([f"{group[0][0]} .. {group[-1][0]}", *group[0][1:]])
    return folded


def align(rows: Sequence[Sequence[str]], sides: str = "lr") -> str:
    """Returns rows of equal length as lines of columns.

    Args:
        sides: 'l' or 'r' for each column; the last one counts for the rest.

    >>> print(align([["method", "s"], ["1f1b", "12"]]))
    method   s
    1f1b    12
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if side == "l" else cell.rjust(width)
            for cell, width, side in zip(row, widths, sides.ljust(len(widths), sides[-1]), strict=True)
        ).rstrip()
        for row in rows
    )


class Tabular:
    """A result with a table of its parts. The first line of its text describes the whole.

    Attributes:
        drawing: returns the module that draws pictures. `pipedream/__init__.py` sets it, as core may not import it.
    """

    drawing: ClassVar[Callable[[], Any]]

    def rows(self) -> list[dict[str, Any]]:
        """Returns the table: for each row, column -> value, or None."""
        raise NotImplementedError

    def to_csv(self) -> str:
        """Returns the table as CSV with a header."""
        rows, text = self.rows(), io.StringIO()
        writer = csv.DictWriter(text, list(rows[0]) if rows else [], lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
        return text.getvalue()

    def to_frame(self) -> Any:
        """Returns the table as a pandas DataFrame. Raises PipelineError if pandas is not installed."""
        try:
            import pandas
        except ModuleNotFoundError:
            raise PipelineError(
                "to_frame() needs pandas, which is missing; install it (pip install 'torch-pipedream[notebook]'), "
                "or use rows()"
            ) from None
        return pandas.DataFrame(self.rows())

    def __repr__(self) -> str:
        return f"<{str(self).partition(chr(10))[0]}>"

    def _repr_html_(self) -> str:
        text: str = type(self).drawing().html(self)
        return text
