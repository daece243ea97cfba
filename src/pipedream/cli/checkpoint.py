"""`pipedream checkpoint`."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from pipedream.cli.options import Json, print_json
from pipedream.core.errors import ArtifactError
from pipedream.core.units import format_bytes

__all__ = ["checkpoint"]


class _Verb(StrEnum):
    """What to do with checkpoints."""

    VERIFY = "verify"


def checkpoint(
    action: Annotated[_Verb, typer.Argument(help="What to do: read every tensor and compare its checksum (verify).")],
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Run folder, folder of checkpoints, or a checkpoint.")],
    as_json: Json = False,
) -> None:
    """Verify the checkpoints of a run.

    The exit status is 2 if one of them is damaged.

    \b
    Example:
      pipedream checkpoint verify runs/digits
    """
    from pipedream.runtime.checkpoint.storage import verify_checkpoint
    from pipedream.training.resume import checkpoints_of

    results: dict[str, str | None] = {}
    for path in checkpoints_of(folder):
        try:
            manifest = verify_checkpoint(path)
        except ArtifactError as error:
            results[str(path)] = str(error)
            if not as_json:
                print(f"{path}: damaged")
            continue
        results[str(path)] = None
        if not as_json:
            size, note = format_bytes(sum(manifest.files.values())), "" if manifest.has_checksums else ", no checksums"
            print(f"{path}: intact, {len(manifest.tensors)} tensors, {size}{note}")
    if as_json:
        print_json({"damage": results})
    if damage := [text for text in results.values() if text is not None]:
        raise ArtifactError("\n".join(damage))
