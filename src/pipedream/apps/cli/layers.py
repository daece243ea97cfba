"""`pipedream layers`."""

from pipedream.apps.cli.options import FINEST, JSON, RECIPE, SEED, print_json
from pipedream.core.artifact import encode_attributes
from pipedream.core.flags import option
from pipedream.core.model.graph import crossings


def layers(
    recipe: str = RECIPE,
    device: str = option("cpu", "Device to run the model on, once.", metavar="cpu|cuda"),
    finest: bool = FINEST,
    seed: int = SEED,
    as_json: bool = JSON,
) -> None:
    """List the layers of a model, and what crosses between them.

    Also where no stage can end, and why. Bytes are those of one minibatch. 'pipedream plan --cuts' takes the names.

    \b
    Example:
      pipedream layers examples/resnet_digits.py
    """
    from pipedream.apps.training.job import capture_recipe
    from pipedream.apps.training.recipe import load_recipe

    capture = capture_recipe(load_recipe(recipe, seed=seed), device=device, finest=finest)
    if not as_json:
        print(capture)
        return
    graph = capture.graph
    across = {crossing.layer: crossing for crossing in crossings(graph)}
    print_json(
        {
            "chain": not graph.calls,
            "layers": [
                {
                    **encode_attributes(layer, "name", "kind", "parameters"),
                    "sent_bytes": across[i].bytes if i else None,
                    "returned_bytes": across[i].gradient_bytes if i else None,
                    "crossing": [
                        encode_attributes(value, "name", "bytes", "gradient")
                        for value in (across[i].values if i else ())
                    ],
                }
                for i, layer in enumerate(graph.layers)
            ],
            "ties": [[graph.layers[i].name for i in group] for group in graph.ties],
            "inseparable": [[graph.layers[i].name for i in group] for group in graph.inseparable],
            "refused": dict(capture.refused),
        }
    )
