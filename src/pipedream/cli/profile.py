"""`pipedream profile`."""

from __future__ import annotations

from typing import Annotated

import typer

from pipedream.cli.options import AtRest, Finest, Json, LayoutRules, Output, RecipeFile, Seed, check_flags
from pipedream.core.errors import ProfileError

_META = "Prediction, with --device meta"


def profile(
    recipe: RecipeFile,
    device: Annotated[
        str,
        typer.Option(metavar="cpu|cuda|meta", help="Device to measure on; meta predicts without running the model."),
    ] = "cpu",
    as_device: Annotated[
        str | None,
        typer.Option(
            "--as",
            metavar="DEVICE",
            rich_help_panel=_META,
            show_default="here",
            help="Device to predict for: a name such as A100-80GB, H100 or RTX-4090, a device's file, or 'here' for "
            "this machine.",
        ),
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option(
            metavar="DTYPE",
            rich_help_panel=_META,
            show_default="the model's own",
            help="Dtype of all floating-point tensors, e.g. bfloat16.",
        ),
    ] = None,
    microbatches: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="M",
            show_default="2",
            help="Microbatches per minibatch in training; the time of one is measured as well.",
        ),
    ] = None,
    runs: Annotated[int, typer.Option(min=1, metavar="N", help="Measured runs, of which the median counts.")] = 10,
    finest: Finest = False,
    meshes: Annotated[
        list[str] | None,
        typer.Option(
            "--mesh",
            metavar="auto|none|NAME:RANKS[,...]",
            rich_help_panel="Mesh",
            show_default="none",
            help="Also measure one rank of a mesh, e.g. model:2; repeatable. auto measures one of each legal mesh of "
            "2, 4 and 8 ranks, auto:4 of 2 and 4.",
        ),
    ] = None,
    layout: LayoutRules = None,
    at_rest: AtRest = None,
    seed: Seed = 0,
    output: Output = None,
    as_json: Json = False,
) -> None:
    """Measure or predict the seconds and bytes of each layer.

    \b
    Example:
      pipedream profile examples/digits.py -o digits.profile.json
    """
    from pipedream.recipe import load_recipe
    from pipedream.training.job import profile_recipe, with_layout

    if device not in ("cpu", "cuda", "meta") and not device.startswith("cuda:"):
        raise ProfileError(f"device {device!r} cannot be measured; choose cpu, cuda or meta")
    check_flags(device=device, as_device=as_device, dtype=dtype, microbatches=microbatches)
    asked = _meshes(meshes or [])
    made = with_layout(load_recipe(recipe, seed=seed), layout, at_rest)
    found = profile_recipe(
        made,
        device=device,
        as_device=as_device,
        dtype=dtype,
        seed=seed,
        runs=runs,
        finest=finest,
        microbatches=microbatches,
        meshes=asked,
    )
    if output is not None:
        found.save(output)
    print(found.to_json() if as_json else found)


def _meshes(given: list[str]) -> list[str] | str:
    """Returns the meshes, or the one word that stands for several."""
    words = [one for one in given if one == "none" or one.partition(":")[0] == "auto"]
    if words and len(given) > 1:
        raise ProfileError(f"--mesh {words[0]} was given with {len(given) - 1} other --mesh; give it alone")
    return words[0] if words else given
