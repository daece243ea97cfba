"""`pipedream compare`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pipedream.cli.options import Device, Json, RecipeFile, Seed, print_json
from pipedream.options import TrainingOptions

__all__ = ["compare"]


def compare(
    recipe: RecipeFile,
    workers: Annotated[int, typer.Option(min=1, metavar="N", help="Worker processes of the parallel variants.")] = 2,
    schedule: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            show_default="pipedream, 1f1b, pipedream_2bw",
            help="Method to compare with one worker and with data parallelism; repeatable.",
        ),
    ] = None,
    epochs: Annotated[int, typer.Option(min=1, metavar="N", help="Epochs of each variant.")] = 1,
    minibatches: Annotated[
        int | None,
        typer.Option(
            min=1, metavar="N", show_default="no limit", help="Stop each variant after this many minibatches."
        ),
    ] = None,
    seed: Seed = 0,
    device: Device = TrainingOptions.device,
    out: Annotated[Path, typer.Option(metavar="DIR", help="Folder for the run folders.")] = Path("runs/compare"),
    as_json: Json = False,
) -> None:
    """Train a recipe by several methods, one after the other.

    Prints a row for each variant: one worker, data parallelism, and each method.

    \b
    Example:
      pipedream compare examples/digits.py --workers 2 --schedule 1f1b
    """
    from pipedream.training.compare import compare_recipe, comparison_table

    rows = compare_recipe(
        recipe,
        tuple(schedule or ("pipedream", "1f1b", "pipedream_2bw")),
        TrainingOptions(workers=workers, epochs=epochs, minibatches=minibatches, seed=seed, device=device),
        out,
    )
    if as_json:
        print_json({"variants": rows})
    else:
        print(comparison_table(rows))
