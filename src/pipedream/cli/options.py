"""Options that several commands share, and how they are read."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from ..core.errors import PlanError

__all__ = [
    "Config",
    "DataParallel",
    "Depth",
    "Device",
    "Json",
    "Lag",
    "Microbatches",
    "RecipeFile",
    "ScheduleName",
    "Straight",
    "depth_of",
    "print_json",
    "shape_of",
]

Json = Annotated[bool, typer.Option("--json", help="One JSON object on standard output, nothing else.")]
Depth = Annotated[
    str,
    typer.Option(
        "--in-flight",
        help="Depth: noam (the paper's), full (hides messages), auto (as near to full as fits), or counts: 3,2,1.",
    ),
]
Straight = Annotated[bool, typer.Option("--straight", help="One stage for each worker.")]
DataParallel = Annotated[bool, typer.Option("--data-parallel", help="One stage on all workers.")]
Config = Annotated[str | None, typer.Option("--config", metavar="R0-R1-...", help="Workers of each stage: 2-1.")]
Lag = Annotated[int, typer.Option("--lag", min=0, max=1, help="1: replicated stages update behind their next forward.")]
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
    if text in ("noam", "full", "auto"):
        return text
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise PlanError(f"--in-flight {text!r} is not known; write noam, full, auto or counts as in 3,2,1") from None


def shape_of(*, straight: bool, data_parallel: bool, config: str | None, usual: str) -> str:
    """Reads --straight, --data-parallel and --config, of which one may be given. Raises PlanError."""
    given = [
        (name, shape)
        for name, shape, said in (
            ("--straight", "straight", straight),
            ("--data-parallel", "data-parallel", data_parallel),
            ("--config", config or "", config is not None),
        )
        if said
    ]
    if len(given) > 1:
        raise PlanError(f"{' and '.join(name for name, _ in given)} exclude each other; give one or none")
    return given[0][1] if given else usual
