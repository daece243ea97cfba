"""`pipedream report`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pipedream.cli.options import Json, print_json


def report(folder: Annotated[Path, typer.Argument(metavar="DIR", help="Run folder.")], as_json: Json = False) -> None:
    """Write report.html of a run folder again."""
    from pipedream.training.run_folder import write_report

    path = write_report(folder)
    if as_json:
        print_json({"report": str(path)})
    else:
        print(path)
