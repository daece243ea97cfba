"""Options that several commands share, and how they are read."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from ..core.errors import PlanError

__all__ = ["Depth", "Device", "Json", "Microbatches", "RecipeFile", "ScheduleName", "depth_of", "print_json"]

Json = Annotated[bool, typer.Option("--json", help="One JSON object on standard output, nothing else.")]
Depth = Annotated[
    str, typer.Option("--in-flight", help="Depth: noam (the paper's), full (hides messages), or counts: 3,2,1.")
]
ScheduleName = Annotated[str, typer.Option("--schedule", help="A method: see 'pipedream schedules'.")]
Microbatches = Annotated[
    int | None, typer.Option("--microbatches", min=1, help="Parts of a minibatch, for methods that split it.")
]
Device = Annotated[str, typer.Option("--device", help="cpu or cuda.")]
RecipeFile = Annotated[str, typer.Argument(metavar="RECIPE", help="A Python file with a function recipe().")]


def print_json(value: Any) -> None:
    """Prints one JSON object."""
    print(json.dumps(value, indent=1))


def depth_of(text: str) -> str | tuple[int, ...]:
    """Reads --in-flight. Raises PlanError."""
    if text in ("noam", "full"):
        return text
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise PlanError(f"--in-flight {text!r} is not known; write noam, full or counts as in 3,2,1") from None
