"""`pipedream partition`."""

from __future__ import annotations

from dataclasses import replace

from pipedream.cli.options import JSON, SEED, print_json
from pipedream.core.flags import argument, option
from pipedream.layouts import DescribedStep, Operators, check_request, compare_partitions, format_partitions

STEP = argument("RECIPE|OPERATORS", "Python file that defines recipe(), or the JSON of pipedream.Operators.")
ELEMENT_BYTES = option(None, "Bytes of an element of all tensors.", metavar="N", least=1, unset="a recipe's own, or 4")


def load_step(path: str, element_bytes: int | None, seed: int) -> DescribedStep:
    """Describes a recipe's step, or reads operators."""
    if path.endswith(".py"):
        described = _describe_recipe(path, seed)
        if element_bytes is None:
            return described
    else:
        described = DescribedStep(Operators.load(path), {})
    return replace(described, element_bytes=dict.fromkeys(described.operators.tensors, element_bytes or 4))


def _describe_recipe(path: str, seed: int) -> DescribedStep:
    """Describes the step of a recipe's first training batch, with loss and optimizer.

    The batch goes to the model's device, which may be 'meta'.
    """
    from pipedream.layouts import describe_step
    from pipedream.recipe import blaming, load_recipe
    from pipedream.runtime.comm.values import to_device
    from pipedream.training.job import make_batch_loss, make_model_input

    recipe = load_recipe(path, seed=seed)
    device = next((parameter.device for parameter in recipe.model.parameters()), None)
    batch = recipe.first_batch()
    loss = make_batch_loss(recipe, batch, device)
    with blaming("while its step was described on its first batch"):
        sample = make_model_input(recipe, batch)
        sample = sample if device is None else to_device(sample, device)
        batch_dim = recipe.batch_dim if isinstance(recipe.batch_dim, int) else 0
        return describe_step(recipe.model, sample, loss=loss, optimizer=recipe.optimizer, batch_dim=batch_dim)


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
