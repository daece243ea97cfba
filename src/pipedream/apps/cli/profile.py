"""`pipedream profile`."""

from pathlib import Path

from pipedream.apps.cli.options import FINEST, JSON, OUTPUT, RECIPE, SEED, check_flags
from pipedream.apps.training.options import TrainingOptions
from pipedream.core.errors import ProfileError
from pipedream.core.flags import Panel, number, option, option_of

_META = "Prediction, with --device meta"


def profile(
    recipe: str = RECIPE,
    device: str = option(
        "cpu", "Device to measure on; meta predicts without running the model.", metavar="cpu|cuda|meta"
    ),
    as_device: str | None = option(
        None,
        "Device to predict for: a name such as A100-80GB, H100 or RTX-4090, a device's file, or 'here' for this "
        "machine.",
        "--as",
        metavar="DEVICE",
        unset="here",
        panel=_META,
    ),
    dtype: str | None = option(
        None,
        "Dtype of all floating-point tensors, e.g. bfloat16.",
        metavar="DTYPE",
        unset="the model's own",
        panel=_META,
    ),
    microbatches: int | None = number(
        None, "Microbatches per minibatch in training; the time of one is measured as well.", metavar="M", unset="2"
    ),
    runs: int = number(10, "Measured runs, of which the median counts."),
    finest: bool = FINEST,
    meshes: list[str] | None = Panel.MESH.option(
        None,
        "Also measure one rank of a mesh, e.g. model:2; repeatable. auto measures one of each legal mesh of 2, 4 and 8 "
        "ranks, auto:4 of 2 and 4.",
        "--mesh",
        metavar="auto|none|NAME:RANKS[,...]",
        unset="none",
    ),
    layout: str | None = option_of(TrainingOptions, "layout"),
    shard_weights: str | None = option_of(TrainingOptions, "shard_weights"),
    seed: int = SEED,
    output: Path | None = OUTPUT,
    as_json: bool = JSON,
) -> None:
    """Measure or predict the seconds and bytes of each layer.

    \b
    Example:
      pipedream profile examples/digits.py -o digits.profile.json
    """
    from pipedream.apps.training.job import profile_recipe, with_layout
    from pipedream.apps.training.recipe import load_recipe

    if device not in ("cpu", "cuda", "meta") and not device.startswith("cuda:"):
        raise ProfileError(f"device {device!r} cannot be measured; choose cpu, cuda or meta")
    check_flags(device=device, as_device=as_device, dtype=dtype, microbatches=microbatches)
    measured = _read_meshes(meshes or [])
    profile = profile_recipe(
        with_layout(load_recipe(recipe, seed=seed), layout, shard_weights),
        device=device,
        as_device=as_device,
        dtype=dtype,
        seed=seed,
        runs=runs,
        finest=finest,
        microbatches=microbatches,
        meshes=measured,
    )
    if output is not None:
        profile.save(output)
    print(profile.to_json() if as_json else profile)


def _read_meshes(texts: list[str]) -> list[str] | str:
    """Returns the meshes, or the one word that stands for several."""
    words = [text for text in texts if text == "none" or text.partition(":")[0] == "auto"]
    if words and len(texts) > 1:
        raise ProfileError(f"--mesh {words[0]} was given with {len(texts) - 1} other --mesh; give it alone")
    return words[0] if words else texts
