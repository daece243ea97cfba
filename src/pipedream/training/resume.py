"""Going on from a checkpoint: which one, with what settings, and what its run folder still knows."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from uuid import uuid4

from pipedream.core.checkpoint import Checkpoint
from pipedream.core.errors import ArtifactError
from pipedream.core.model.profile import Profile
from pipedream.runtime.checkpoint.writer import complete, contents, newest
from pipedream.runtime.comm import process_group as process_group

__all__ = ["CHECKPOINTS", "Start", "check_unused", "find", "is_shared", "settings"]

CHECKPOINTS = "checkpoints"
"""Folder of the checkpoints in a run folder."""


@dataclass(frozen=True)
class Start:
    """Where a run goes on.

    Attributes:
        path: of the checkpoint.
        page: its contents page.
        folder: the run folder; None where the checkpoint lies in none.
    """

    path: Path
    page: Checkpoint
    folder: Path | None

    @property
    def profile(self) -> Profile | None:
        """The profile that the run folder keeps, for a new plan."""
        path = self.folder / "profile.json" if self.folder is not None else None
        return Profile.load(path) if path is not None and path.exists() else None

    @property
    def losses(self) -> list[tuple[int, float]]:
        """(number, loss) of the minibatches before the checkpoint, as far as the run folder has them."""
        try:
            assert self.folder is not None
            rows = json.loads((self.folder / "losses.json").read_text(encoding="utf-8"))
            return [(int(number), float(loss)) for number, loss in rows if int(number) < self.page.minibatches]
        except (AssertionError, OSError, ValueError, TypeError):
            return []


def find(resume: str | os.PathLike[str] | None, out: str | os.PathLike[str] | None, rank: int) -> Start | None:
    """Returns where to go on: from what the user says, or, restarted by a launcher, from the run's newest checkpoint.

    Args:
        resume: a run folder, a folder of checkpoints, or a checkpoint; None starts anew, unless restarted.
        out: the run folder.
        rank: of this process; rank 0 decides for all.

    Raises:
        ArtifactError: no complete checkpoint is there, or it is damaged.
    """

    def chosen() -> str:
        if resume is None:
            restarted = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0
            found = newest(Path(out) / CHECKPOINTS) if restarted and out is not None else None
            return str(found or "")
        found = newest(Path(resume) / CHECKPOINTS) or newest(resume)
        if found is None:
            raise ArtifactError(
                f"there is no complete checkpoint in {resume} to resume from; give the run folder of a run that has "
                "saved one, or start without --resume"
            )
        return str(found)

    text = process_group.from_rank_0(chosen, rank)
    if not text:
        return None
    path = Path(text)
    inside = path.resolve().parent.name == CHECKPOINTS
    return Start(path, contents(path), path.parent.parent if inside else None)


def settings(
    start: Start | None, schedule: str | None, microbatches: int | None, seed: int | None
) -> tuple[str, int | None, int]:
    """Returns schedule, microbatches and seed: what the user says, else the checkpoint's, else the defaults."""
    if start is None:
        return schedule or "pipedream", microbatches, seed or 0
    page = start.page
    same = schedule in (None, page.schedule)
    if microbatches is None and same and page.microbatches > 1:
        microbatches = page.microbatches
    return schedule or page.schedule, microbatches, page.seed if seed is None else seed


def is_shared(folder: Path, rank: int) -> bool:
    """Tells, alike on every rank, whether all ranks see the folder that rank 0 sees; every rank calls it."""
    mark = folder / ".shared"

    def marked() -> str:
        folder.mkdir(parents=True, exist_ok=True)
        token = uuid4().hex
        mark.write_text(token, encoding="utf-8")
        return token

    token = process_group.from_rank_0(marked, rank)
    try:
        seen = mark.read_text(encoding="utf-8") == token
    except OSError:
        seen = False
    everywhere = all(
        text == "yes" for text in process_group.gather_texts("yes" if seen else "no", process_group.everyone())
    )
    if rank == 0:
        mark.unlink(missing_ok=True)
    return everywhere


def check_unused(folder: Path) -> None:
    """Checks that a new run overwrites no other one's checkpoints.

    Raises:
        ArtifactError: there are some.
    """
    if complete(folder / CHECKPOINTS):
        raise ArtifactError(
            f"the run folder {folder} holds checkpoints of an earlier run; go on from them (--resume {folder}), or "
            "give another folder (--out)"
        )
