"""`pipedream partition`."""

from __future__ import annotations

from typing import Annotated

import typer

from pipedream.cli.options import Json, Seed, print_json
from pipedream.cli.shared.steps import ElementBytes, StepFile, step_of
from pipedream.partitioner.partition import check_request
from pipedream.report.partition import partition_table
from pipedream.workflows.partition import partitioned


def partition(
    step: StepFile,
    ranks: Annotated[int, typer.Option(metavar="N", help="Number of ranks, a power of two.")],
    method: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="Search: recursive as published, joint, or a baseline: equal, all-row, spartan, no-reduction, data, "
            "model.",
        ),
    ] = "recursive",
    batch: Annotated[
        str | None,
        typer.Option(
            metavar="INDEX", show_default="a recipe's samples", help="Index of the samples, for the method data."
        ),
    ] = None,
    no_replicate: Annotated[
        bool, typer.Option("--no-replicate", help="No tensor is whole on both sides of a cut, as in the paper.")
    ] = False,
    element_bytes: ElementBytes = None,
    seed: Seed = 0,
    as_json: Json = False,
) -> None:
    """Divide a step's tensors over ranks, as Tofu does.

    The step is that of a recipe, forward, backward and update, or operators as text in JSON (docs/partition.md). All
    methods are compared.

    \b
    Example:
      pipedream partition examples/resnet_digits.py --ranks 4
    """
    check_request(ranks, method)  # before a recipe is loaded
    described = step_of(step, element_bytes, seed)
    comparison = partitioned(described, ranks, method, batch=batch or "", replicate=not no_replicate)
    print_json(comparison) if as_json else print(partition_table(comparison))
