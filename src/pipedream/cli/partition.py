"""`pipedream partition`."""

from __future__ import annotations

from pipedream.cli.options import JSON, SEED, print_json
from pipedream.cli.shared.steps import ELEMENT_BYTES, STEP, load_step
from pipedream.core.flags import option
from pipedream.layouts import check_request, compare_partitions, format_partitions


def partition(
    step: str = STEP,
    ranks: int = option(..., "Number of ranks, a power of two.", metavar="N"),
    method: str = option(
        "recursive",
        "Search: recursive as published, joint, or a baseline: equal, all-row, spartan, no-reduction, data, model.",
        metavar="NAME",
    ),
    batch: str | None = option(
        None, "Index of the samples, for the method data.", metavar="INDEX", unset="a recipe's samples"
    ),
    no_replicate: bool = option(False, "No tensor is whole on both sides of a cut, as in the paper."),
    element_bytes: int | None = ELEMENT_BYTES,
    seed: int = SEED,
    as_json: bool = JSON,
) -> None:
    """Divide a step's tensors over ranks, as Tofu does.

    The step is that of a recipe, forward, backward and update, or operators as text in JSON (docs/partition.md). All
    methods are compared.

    \b
    Example:
      pipedream partition examples/resnet_digits.py --ranks 4
    """
    check_request(ranks, method)  # before a recipe is loaded
    described = load_step(step, element_bytes, seed)
    comparison = compare_partitions(described, ranks, method, batch=batch or "", replicate=not no_replicate)
    print_json(comparison) if as_json else print(format_partitions(comparison))
