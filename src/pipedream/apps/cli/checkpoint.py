"""`pipedream checkpoint`."""

from collections.abc import Iterable
from enum import StrEnum
from typing import Any

from pipedream.apps.cli.options import JSON, print_json
from pipedream.core.errors import ArtifactError
from pipedream.core.flags import argument, option
from pipedream.core.progress import progress
from pipedream.core.units import format_bytes


class _Verb(StrEnum):
    VERIFY = "verify"
    GATHER = "gather"


def checkpoint(
    verb: _Verb = argument(
        None,
        "What to do: read every tensor and compare its checksum (verify), or make one folder of the parts that "
        "machines without a shared folder have kept (gather).",
    ),
    folders: list[str] = argument(
        "DIR...", "Run folders, folders of checkpoints, or checkpoints; also URLs, such as s3://bucket/run."
    ),
    output: str | None = option(None, "New run folder, for what is gathered.", "-o", "--output", metavar="DIR"),
    as_json: bool = JSON,
) -> None:
    """Verify a run's checkpoints, or gather their parts.

    The exit status is 2 if one of them is damaged.

    \b
    Example:
      pipedream checkpoint verify runs/digits
      pipedream checkpoint gather host1/digits host2/digits -o runs/digits
    """
    from pipedream.apps.training.run_folder import CHECKPOINTS, find_checkpoints
    from pipedream.services.checkpoint.folders import gather_parts
    from pipedream.services.checkpoint.stores import open_store

    if (verb is _Verb.GATHER) != (output is not None):
        raise ArtifactError("gather needs a folder to write into (-o DIR), verify writes nothing")
    stores = list(map(open_store, folders))
    if output is not None:
        parts = [store.within(CHECKPOINTS) if store.list_names(CHECKPOINTS) else store for store in stores]
        with progress("gathering"):
            checkpoints = [gather_parts(parts, open_store(output).within(CHECKPOINTS))]
    else:
        checkpoints = [checkpoint for store in stores for checkpoint in find_checkpoints(store)]
    _verify(checkpoints, as_json)


def _verify(checkpoints: Iterable[Any], as_json: bool) -> None:
    """Prints which are intact; raises an `ArtifactError` that names the damage of the others."""
    from pipedream.services.checkpoint.pieces import verify_checkpoint

    results: dict[str, str | None] = {}
    for checkpoint in checkpoints:
        try:
            with progress(f"reading {checkpoint}"):
                manifest = verify_checkpoint(checkpoint)
            results[str(checkpoint)] = None
            state = f"intact, {len(manifest.tensors)} tensors, {format_bytes(sum(manifest.files.values()))}"
        except ArtifactError as error:
            results[str(checkpoint)] = str(error)
            state = "damaged"
        if not as_json:
            print(f"{checkpoint}: {state}")
    if as_json:
        print_json({"damage": results})
    if damage := [text for text in results.values() if text is not None]:
        raise ArtifactError("\n".join(damage))
