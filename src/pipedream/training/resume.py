"""Resuming from a checkpoint: which one, and what its run folder has kept."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from pipedream.core.checkpoint import Checkpoint
from pipedream.core.errors import ArtifactError
from pipedream.core.model.profile import Profile
from pipedream.runtime.checkpoint.folders import (
    complete_checkpoints,
    find_newest_of_all,
    newest_checkpoint,
    read_shared_manifest,
)
from pipedream.runtime.checkpoint.lock import FolderLock
from pipedream.runtime.checkpoint.remote import AnyPath, any_path
from pipedream.runtime.comm import process_group

CHECKPOINTS = "checkpoints"
"""Name of the folder in a run folder that holds its checkpoints."""


@dataclass(frozen=True)
class ResumePoint:
    """The checkpoint that a run continues from; the folder is the run's, if it is in one."""

    path: AnyPath
    manifest: Checkpoint
    folder: AnyPath | None

    @property
    def profile(self) -> Profile | None:
        path = self.folder / "profile.json" if self.folder is not None else None
        if path is None or not path.exists():
            return None
        return Profile.from_json(path.read_text(encoding="utf-8"), str(path))

    @property
    def losses(self) -> list[tuple[int, float]]:
        """(number, loss) before the checkpoint, as far as kept."""
        if self.folder is None:
            return []
        try:
            rows = json.loads((self.folder / "losses.json").read_text(encoding="utf-8"))
            return [(int(number), float(loss)) for number, loss in rows if int(number) < self.manifest.minibatches]
        except (OSError, ValueError, TypeError):
            return []


def checkpoints_of(folder: AnyPath) -> list[AnyPath]:
    """Returns the complete checkpoints of a run folder or a folder of checkpoints, the oldest first, or the one given.

    Raises:
        ArtifactError: there are none.
    """
    for inside in (folder / CHECKPOINTS, folder):
        if newest_checkpoint(inside) == inside:
            return [inside]
        if checkpoints := complete_checkpoints(inside):
            return checkpoints
    raise ArtifactError(f"there is no complete checkpoint in {folder}; give the run folder of a run that has saved one")


def resume_point(resume: str | os.PathLike[str] | None, out: str | os.PathLike[str] | None) -> ResumePoint | None:
    """Returns the requested checkpoint, or after a launcher's restart the run's newest; every rank calls it.

    Args:
        resume: a run folder, a folder of checkpoints, or a checkpoint, on disk or a URL; or None. The folder `out` may
            still be empty.

    Raises:
        ArtifactError: there is no complete checkpoint, or it is damaged.
    """

    if resume is not None:
        checkpoint = newest_checkpoint(any_path(resume) / CHECKPOINTS) or newest_checkpoint(resume)
    else:
        restarted = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0
        checkpoint = newest_checkpoint(any_path(out) / CHECKPOINTS) if restarted and out is not None else None
    group = process_group.world_group()
    path = find_newest_of_all(checkpoint, group)
    if path is None:
        # One command may start a run and continue it.
        if resume is None or (out is not None and any_path(out) == any_path(resume)):
            return None
        raise ArtifactError(
            f"there is no complete checkpoint in {resume} to resume from; give the run folder of a run that has saved "
            "one, or start without --resume"
        )
    inside = path.resolve().parent.name == CHECKPOINTS
    manifest, _ = read_shared_manifest(path, group)
    return ResumePoint(path, manifest, path.parent.parent if inside else None)


@contextmanager
def locked(folder: Path, rank: int) -> Iterator[None]:
    """Context in which no other run writes into a run folder; every rank enters it.

    Raises:
        ArtifactError: another run does, or it cannot be written (on other ranks than 0 a `PlanError`).
    """
    locks: list[FolderLock] = []

    def lock() -> str:
        locks.append(FolderLock(folder))
        return ""

    process_group.make_on_rank_0(lock, rank)
    try:
        yield
    finally:
        for folder_lock in locks:
            folder_lock.release()


def check_unused(folder: AnyPath) -> None:
    """Raises an `ArtifactError` if a new run would overwrite the folder's checkpoints."""
    if complete_checkpoints(folder / CHECKPOINTS):
        raise ArtifactError(
            f"the run folder {folder} holds checkpoints of an earlier run; continue it (--resume {folder}), or "
            "give another folder (--out)"
        )
