"""`pipedream compare`."""

import sys
from functools import partial
from pathlib import Path

from pipedream.apps.cli.options import JSON, RECIPE
from pipedream.apps.compare.compare_options import ComparisonOptions
from pipedream.core.errors import PlanError
from pipedream.core.flags import option


def compare(
    recipe: str = RECIPE,
    *,
    options: ComparisonOptions,
    out: str | None = option(
        None,
        "Folder of the comparison; one that is not complete is continued.",
        metavar="DIR",
        unset="a new one in runs/",
    ),
    as_json: bool = JSON,
) -> None:
    """Train a recipe in several ways, one after the other.

    Compares one worker, torch's DDP (also sharing a minibatch, accumulating 8, in fp16), local SGD, Schedule1F1B, and
    each method: predicted and measured. Writes a run folder for each, compare.html, its picture as compare.svg, and
    compare.json. The same command with the same --out continues.

    \b
    Examples:
      pipedream compare examples/digits.py --workers 2 --link 400mbit/s --link 100mbit/s
      pipedream compare examples/digits.py --emulate-delay --workers 8 --epochs 5 --out delays
    """
    if not Path(recipe).is_file():
        raise PlanError(f"the recipe {recipe} does not exist; give the path of a Python file")
    from pipedream.apps.compare.compare import STATE, compare_recipe

    report = (lambda line: None) if as_json else partial(print, file=sys.stderr, flush=True)
    comparison, folder = compare_recipe(recipe, options, out=out, progress=report)
    print((folder / STATE).read_text(encoding="utf-8") if as_json else f"\n{comparison}")
