"""`pipedream layers`."""

from __future__ import annotations

from typing import Annotated

import typer

from pipedream.cli.options import Finest, Json, RecipeFile, Seed, print_json
from pipedream.core.model.crossings import crossings


def layers(
    recipe: RecipeFile,
    device: Annotated[str, typer.Option(metavar="cpu|cuda", help="Device to run the model on, once.")] = "cpu",
    finest: Finest = False,
    seed: Seed = 0,
    as_json: Json = False,
) -> None:
    """List the layers of a model, and what crosses each cut.

    Also where the model cannot be cut, and why. Bytes are those of one minibatch. The names can be given to 'pipedream
    plan --cuts'.

    \b
    Example:
      pipedream layers examples/resnet_digits.py
    """
    from pipedream.recipe import load_recipe
    from pipedream.training.job import capture_recipe

    found = capture_recipe(load_recipe(recipe, seed=seed), device=device, finest=finest)
    if not as_json:
        print(found)
        return
    graph = found.graph
    across = {crossing.layer: crossing for crossing in crossings(graph)}
    print_json(
        {
            "chain": not graph.calls,
            "layers": [
                {
                    "name": layer.name,
                    "kind": layer.kind,
                    "parameters": list(layer.parameters),
                    "sent_bytes": across[i].bytes if i else None,
                    "returned_bytes": across[i].gradient_bytes if i else None,
                    "crossing": [
                        {"name": value.name, "bytes": value.bytes, "gradient": value.gradient}
                        for value in (across[i].values if i else ())
                    ],
                }
                for i, layer in enumerate(graph.layers)
            ],
            "ties": [[graph.layers[i].name for i in group] for group in graph.ties],
            "inseparable": [[graph.layers[i].name for i in group] for group in graph.whole],
            "refused": dict(found.refused),
        }
    )
