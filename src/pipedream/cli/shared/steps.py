"""A described step, as an argument of a command."""

from __future__ import annotations

from dataclasses import replace

from pipedream.core.flags import argument, option
from pipedream.core.operators.operators import Operators
from pipedream.workflows.partition import DescribedStep

STEP = argument("RECIPE|OPERATORS", "Python file that defines recipe(), or the JSON of pipedream.Operators.")
ELEMENT_BYTES = option(None, "Bytes of an element of all tensors.", metavar="N", least=1, unset="a recipe's own, or 4")


def step_of(path: str, element_bytes: int | None, seed: int) -> DescribedStep:
    """Describes a recipe's step, or reads operators."""
    if path.endswith(".py"):
        from pipedream.recipe import load_recipe
        from pipedream.training.job import describe_recipe

        described = describe_recipe(load_recipe(path, seed=seed))
        if element_bytes is None:
            return described
    else:
        described = DescribedStep(Operators.load(path), {})
    return replace(described, element_bytes=dict.fromkeys(described.operators.tensors, element_bytes or 4))
