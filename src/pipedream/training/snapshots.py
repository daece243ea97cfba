"""Snapshots: checkpoints in the memory of the machines, from which a restart continues.

Under `pipedream train` they are in its launcher's folder, which the launcher removes. Under torchrun, srun and mpirun
no process of ours outlives the workers: there the run folder names the folder of the snapshots, the same in the memory
of each machine. A run that ends cleanly removes it. The folder of a run that is never continued is removed by the same
user's next run with snapshots, after a day.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
import time
from contextlib import suppress
from pathlib import Path
from uuid import uuid4

from pipedream.core.errors import ArtifactError, PlanError, RecipeError
from pipedream.core.plan.host_memory import find_neighbours
from pipedream.core.units import format_bytes
from pipedream.probe import available_bytes
from pipedream.runtime.checkpoint import folders
from pipedream.runtime.checkpoint.pieces import verify_file
from pipedream.runtime.checkpoint.remote import AnyPath, write_text_at
from pipedream.runtime.checkpoint.writer import FolderLock, name_file
from pipedream.runtime.comm.launcher import detect_launcher
from pipedream.runtime.comm.process_group import (
    broadcast_text,
    gather_texts,
    machine_address,
    process_device,
    world_group,
)
from pipedream.runtime.failure.processes import MEMORY, find_launch_folder, is_torchruns_worker

_POINTER = "snapshots.txt"
_PREFIX = "pipedream-snapshots-"
_ABANDONED_S = 86_400.0


def find_snapshots(run: AnyPath) -> Path | None:
    """Returns the folder of a run's snapshots: its launcher's, or the one that the run folder names.

    None if it has none. Every rank calls it.
    """
    if (folder := _find_launcher_folder()) is not None:
        return folder
    name = ""
    with suppress(OSError, UnicodeDecodeError):
        name = (run / _POINTER).read_text(encoding="utf-8").strip()
    # Machines may have run folders of their own, and one of them may be new.
    name = next(filter(None, gather_texts(name, world_group())), "")
    return MEMORY / name if re.fullmatch(rf"{_PREFIX}[0-9a-f]{{32}}", name) else None


def _find_launcher_folder() -> Path | None:
    folder = find_launch_folder()
    return folder / "snapshots" if folder is not None and folder.parent == MEMORY else None


def open_snapshots(every: int | str, run: AnyPath, *, is_named: bool, is_resumed: bool) -> Path:
    """Returns the folder for a run's snapshots, which exists on each machine. Every rank calls it.

    Args:
        run: the run folder.
        is_named: the user has named the run folder, so a restart has the same.

    Raises:
        RecipeError: nothing would restart from them.
        PlanError: this machine has no folder in memory.
    """
    folder = _find_launcher_folder()
    if folder is None:
        if not is_torchruns_worker() and detect_launcher() is None:
            raise RecipeError(
                f"snapshot_every={every} keeps snapshots in memory for a restart of the workers, and this process was "
                "not started by 'pipedream train' with --max-restarts or --elastic, torchrun, srun or mpirun; start "
                "the run by one of them, or give checkpoint_every instead"
            )
        if not is_named:
            raise RecipeError(
                f"snapshot_every={every} needs a run folder, by which a restart finds the snapshots, and none was "
                "given; add --out DIR"
            )
        folder = find_snapshots(run)
        if folder is not None and not is_resumed:
            shutil.rmtree(folder, ignore_errors=True)
            folder = None
        name = folder.name if folder is not None else broadcast_text(_PREFIX + uuid4().hex, world_group())
        folder = MEMORY / name
        write_text_at(run / _POINTER, name + "\n")
        _remove_abandoned(folder)
    _make_private_folder(folder, every)
    return folder


def _make_private_folder(folder: Path, every: int | str) -> None:
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        is_ours = not folder.is_symlink() and folder.stat().st_uid == os.getuid()
        problem = "" if is_ours else "it is another user's"
    except OSError as error:
        problem = str(error)
    if problem:
        raise PlanError(
            f"snapshot_every={every} keeps snapshots in {folder} of {machine_address()}, which cannot be made: "
            f"{problem}; give each machine a {MEMORY} that can be written, or give checkpoint_every instead"
        )


def _remove_abandoned(kept_folder: Path) -> None:
    """Removes snapshots of this user's runs that ended over a day ago and were not continued."""
    for folder in MEMORY.glob(f"{_PREFIX}*"):
        with suppress(OSError, ArtifactError):
            status = folder.lstat()
            if folder != kept_folder and status.st_uid == os.getuid() and time.time() - status.st_mtime > _ABANDONED_S:
                lock = FolderLock(folder)  # raises if a run uses it
                shutil.rmtree(folder, ignore_errors=True)
                lock.release()


def remove_snapshots(run: AnyPath) -> None:
    """Removes the snapshots of a run that has ended, unless its launcher does. Every rank calls it."""
    folder = find_snapshots(run)
    if folder is not None and folder != _find_launcher_folder():
        shutil.rmtree(folder, ignore_errors=True)
        with suppress(OSError):
            (run / _POINTER).unlink(missing_ok=True)


def find_newest_snapshot(folder: Path, saved_count: int) -> tuple[Path, list[int]] | None:
    """Returns the newest snapshot that is complete across the machines, if it is newer than the checkpoint on disk.

    Also returns the ranks whose part is on another machine, in place of a missing or damaged one here. A checkpoint
    that is as new is preferred, because a run that had ended would save it again. Every rank calls it.

    Args:
        saved_count: minibatches of the newest checkpoint on disk, or -1.
    """
    group, rank = world_group(), int(os.environ.get("RANK", "0"))
    local_numbers = " ".join(
        str(folders.parse_minibatches(path.name) or 0) for path in folders.list_checkpoints(folder)
    )
    numbers = {int(number) for text in gather_texts(local_numbers, group) for number in text.split()}
    newer = sorted((number for number in numbers if number > saved_count), reverse=True)
    if not newer:
        return None
    folder.mkdir(mode=0o700, exist_ok=True)
    ranks = next(ranks for ranks in folders.list_machines(folder, rank, group) if rank in ranks)
    for path in (folder / folders.name_folder(number) for number in newer):
        _remove_damaged(path, ranks.index(rank), len(ranks))
        try:
            manifest, _ = folders.read_shared_manifest(path, group)
        except ArtifactError as error:
            _report(f"the snapshot in memory is not used: {error}", rank)
            continue
        missing_names = folders.find_file_problems(path, manifest).keys()
        mark = "elsewhere" * (name_file(rank) in missing_names or missing_names == manifest.files.keys())
        return path, [other for other, text in enumerate(gather_texts(mark, group)) if text]
    return None


def _remove_damaged(path: Path, index: int, count: int) -> None:
    """Removes damaged files of a snapshot.

    Args:
        index, count: of this rank among those that share the folder, which divide the files.
    """
    try:
        manifest = folders.read_manifest(path, check_files=False)
    except ArtifactError as error:
        if (path / folders.MANIFEST).exists():
            _report(f"a part of the snapshot in memory is not used: {error}")
            (path / folders.MANIFEST).unlink(missing_ok=True)
        return
    missing_names = folders.find_file_problems(path, manifest)
    for name in sorted(manifest.files.keys() - missing_names)[index::count]:
        try:
            verify_file(path, manifest, name)
        except ArtifactError as error:
            _report(f"a part of the snapshot in memory is not used: {error}")
            (path / name).unlink()


def _report(text: str, rank: int = 0) -> None:
    if rank == 0:
        print(f"pipedream: {text}", file=sys.stderr, flush=True)


def check_memory(every: int | None, folder: Path, saved_bytes: list[int], rank: int) -> int:
    """Returns the bytes of two snapshots on the machine with the most. Every rank calls it.

    Args:
        saved_bytes: of each rank.

    Raises:
        PlanError: two snapshots, and the copies from which a third is written, do not fit a machine's memory; raised on
            every rank.
    """
    group = world_group()
    machines = folders.list_machines(folder, rank, group)
    neighbours = find_neighbours(machines)
    snapshot_bytes = [
        sum(
            saved_bytes[other] * ((other in ranks) + (neighbours.get(other) in ranks))
            for other in range(len(saved_bytes))
        )
        for ranks in machines
    ]
    problem = ""
    for ranks, size in zip(machines, snapshot_bytes, strict=True):
        if ranks[0] == rank:
            copied_bytes = sum(saved_bytes[other] for other in ranks)
            where = f" of rank {rank}'s machine, {machine_address()}" if len(machines) > 1 else ""
            problem = describe_missing(every or "auto", folder, size, copied_bytes, where)
    for text in gather_texts(problem, group):
        if text:
            raise PlanError(text)
    return 2 * max(snapshot_bytes)


def describe_missing(every: int | str, folder: Path, snapshot_bytes: int, copied_bytes: int, where: str = "") -> str:
    """Says how much memory is missing on this machine; '' if none is.

    Args:
        snapshot_bytes: of one snapshot.
        copied_bytes: of the copies from which the next one is written.
        where: words for the machine.
    """
    file_system = os.statvfs(MEMORY)
    used_bytes = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    places = {
        f"in {MEMORY}{where}": (2 * snapshot_bytes, file_system.f_bavail * file_system.f_frsize),
        f"in memory{where}": (2 * snapshot_bytes + copied_bytes, available_bytes(process_device("cpu"), 1)),
    }
    for place, (needed_bytes, free_bytes) in places.items():
        if (missing_bytes := needed_bytes - free_bytes - used_bytes) > 0:
            return (
                f"--snapshot-every {every} takes {format_bytes(needed_bytes)} {place} (a snapshot has "
                f"{format_bytes(snapshot_bytes)} there), and {format_bytes(free_bytes + used_bytes)} are free: "
                f"{format_bytes(missing_bytes)} are missing; enlarge {MEMORY} (docker run --shm-size, mount -o "
                "remount,size=...), free memory, or give --checkpoint-every instead"
            )
    return ""
