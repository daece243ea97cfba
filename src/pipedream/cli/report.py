"""`pipedream report`."""

from __future__ import annotations

from pathlib import Path

from pipedream.cli.options import JSON, print_json
from pipedream.core.flags import argument


def report(folder: Path = argument("DIR", "Run folder."), as_json: bool = JSON) -> None:
    """Regenerate report.html for a run folder."""
    from pipedream.training.run_folder import write_report

    path = write_report(folder)
    print_json({"report": str(path)}) if as_json else print(path)
