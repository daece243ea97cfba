"""How a noun shows itself: as one line, as a table, and in a notebook."""

from __future__ import annotations

import csv
import io
from typing import Any

from pipedream.core.errors import PipelineError

__all__ = ["Tabular"]


class Tabular:
    """What can be shown as a table: a subclass defines `rows`."""

    def rows(self) -> list[dict[str, Any]]:
        """Returns the rows of the table: name of a column -> value; None where it has none."""
        raise NotImplementedError

    def to_csv(self) -> str:
        """Returns the table as CSV with a header."""
        rows, text = self.rows(), io.StringIO()
        writer = csv.DictWriter(text, list(rows[0]) if rows else [], lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
        return text.getvalue()

    def to_frame(self) -> Any:
        """Returns the table as a pandas DataFrame.

        Raises:
            PipelineError: pandas is not installed.
        """
        try:
            import pandas
        except ModuleNotFoundError:
            raise PipelineError(
                "to_frame() was called, but pandas is not installed; install it (pip install pandas), or use rows()"
            ) from None
        return pandas.DataFrame(self.rows())
