"""Checkpoints: written atomically, optionally in the background, in the form of torch's distributed checkpoint.

Life of a checkpoint:

1. At a drain replica 0 of each stage provides the stage's tensors. In a mesh each rank provides its part; of equal
   parts only the first rank's is written.
2. All ranks write into a folder whose name begins with a dot, one file per rank, and send rank 0 the offsets.
3. When all have written, rank 0 adds the manifest (`core.checkpoint`), flushes it and renames the folder: now the
   checkpoint exists. A folder with a dot is never read, and the next save removes it.
4. The oldest checkpoints beyond `keep` are renamed and then removed.

Torch's `save` agrees on a plan first, which takes four times the CPU time.

Two runs cannot write into a folder at the same time. Its lock is the kernel's (`flock` on the file ``.lock``), which
frees it when a run is killed. On NFS it also holds between hosts; a lost host keeps it until the server gives it up.
Where the file system has no locks, there is no protection. In an object store, which has no locks either, the run that
began last owns the folder; an earlier one finds another name in ``.lock``, and saves nothing more.
"""

import fcntl
import os
import socket
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch
import torch.distributed as dist

from pipedream.core.artifact import system_error
from pipedream.core.box import Box
from pipedream.core.checkpoint import Checkpoint
from pipedream.core.errors import ArtifactError, WorkerError
from pipedream.runtime.checkpoint.folders import (
    MANIFEST,
    commit,
    find_newest_checkpoint,
    find_ranks_that_see,
    list_checkpoints,
    move,
    name_folder,
    name_scratch,
    parse_minibatches,
    prune,
    remove_leftovers,
    remove_tree,
    set_aside,
    summarise_error,
)
from pipedream.runtime.checkpoint.object_store import AnyPath, RemotePath
from pipedream.runtime.checkpoint.pieces import merge_rows, write_tensors
from pipedream.runtime.comm.process_group import gather_json, gather_texts, leave_group
from pipedream.runtime.failure.processes import write_checkpoint


@dataclass(frozen=True)
class _Save:
    """One checkpoint that is being written."""

    path: AnyPath
    manifest: Checkpoint
    tensors: Mapping[str, torch.Tensor]
    slices: Mapping[str, tuple[Box, Sequence[int]]]
    keep: int | None
    wait_for_tensors: Callable[[], None] | None

    @property
    def scratch(self) -> AnyPath:
        """The folder in which it is written."""
        return name_scratch(self.path)


class Writer:
    """Writes a run's checkpoints, one at a time.

    Args:
        distributed: there are other ranks.
        device: where the tensors are.
    """

    def __init__(self, rank: int, distributed: bool, device: torch.device) -> None:
        self._rank = rank
        self._distributed = distributed
        self._group: dist.ProcessGroup | None = None
        self._device = device
        self._thread: threading.Thread | None = None
        self._failure: WorkerError | None = None
        self._last_saved: dict[AnyPath, int] = {}  # folder -> minibatches of the newest checkpoint of this run
        self._locks: dict[AnyPath, FolderLock | RemoteLock] = {}
        self._separate_ranks: dict[AnyPath, set[int]] = {}

    def begin(
        self,
        folder: AnyPath,
        manifest: Checkpoint,
        tensors: Mapping[str, torch.Tensor],
        keep: int | None,
        slices: Mapping[str, tuple[Box, Sequence[int]]] | None = None,
        wait_for_tensors: Callable[[], None] | None = None,
    ) -> AnyPath:
        """Starts to write a checkpoint; all ranks call it. Returns its future path.

        Args:
            manifest: only rank 0's is written.
            tensors: must not be modified until `finish`.
            keep: complete checkpoints to keep; None keeps all.
            slices: name -> (box, shape of the whole), for tensors that are parts.
            wait_for_tensors: called by the writing thread before it reads the tensors.

        Raises:
            ArtifactError: another run has saved one of that name, or is writing into the folder.
        """
        path = folder / name_folder(manifest.minibatches)
        if self._last_saved.get(folder.resolve()) == manifest.minibatches:
            return path
        if self._distributed and self._group is None:  # a separate group: training continues during a save
            self._group = dist.new_group(backend="gloo")
        failure = ""
        if self._rank == 0:
            try:
                self._prepare(folder, path)
            except (ArtifactError, OSError) as error:
                failure = str(error)
        if failure := next(filter(None, gather_texts(failure, self._group)), ""):
            raise ArtifactError(failure)
        save = _Save(path, manifest, tensors, slices or {}, keep, wait_for_tensors)
        self._last_saved[folder.resolve()] = manifest.minibatches
        if folder not in self._separate_ranks:
            sees = find_ranks_that_see(folder, self._rank, self._group)
            self._separate_ranks[folder] = {rank for rank, sees_it in enumerate(sees) if not sees_it}
        is_separate, any_separate = self._rank in self._separate_ranks[folder], bool(self._separate_ranks[folder])
        if is_separate:
            folder.mkdir(parents=True, exist_ok=True)
            with suppress(FileNotFoundError):
                set_aside(path)  # left by an unfinished save, or from before a resume at an older one
            remove_leftovers(folder, except_for=save.scratch)  # another rank of this machine may have begun
        if any_separate:
            self._wait_until_written("", [])  # no rank may rename before all have removed leftovers
        # A daemon: if another rank dies during the save, nothing may wait for this thread.
        self._thread = threading.Thread(target=self._run, args=(save, is_separate, any_separate), daemon=True)
        self._thread.start()
        return path

    def _write(self, save: _Save, is_separate: bool, any_separate: bool) -> None:
        """Writes this rank's part, and waits for the others.

        Args:
            is_separate: this rank does not see rank 0's folder.
            any_separate: at least one rank does not see it.
        """
        path, scratch = save.path, save.scratch
        failure = ""
        rows_written: list[Any] = []
        try:
            if save.wait_for_tensors is not None:
                save.wait_for_tensors()
            rows_written = write_tensors(scratch / f"__{self._rank}_0.distcp", save.tensors, save.slices)
        except Exception as error:
            failure = _describe_failure(error, path)
        try:
            rows = self._wait_until_written(failure, rows_written)
        except _SaveError:
            # No rank writes any more, and the disk may be full.
            if is_separate or self._rank == 0:
                with suppress(OSError):
                    remove_tree(scratch)
            raise
        if is_separate:
            with suppress(FileNotFoundError):  # another rank of this machine has moved it
                move(scratch, path)
            prune(path.parent, save.keep and save.keep + 1, parts=True)  # the oldest counts until rank 0 is done
        if any_separate:
            self._wait_until_written("", [])
        if self._rank == 0:
            self._locks[path.parent].check()
            commit(scratch, path, replace(save.manifest, **merge_rows(rows)))
            write_checkpoint(str(path))
            prune(path.parent, save.keep)

    def _wait_until_written(self, failure: str, rows_written: list[Any]) -> list[Any]:
        """Waits for all ranks; returns the rows of each, or raises the `_SaveError` of the first that failed."""
        rows = gather_json([failure, rows_written], self._group)
        for rank, (failed, _) in enumerate(rows):
            if failed:
                raise _SaveError(rank, failed)
        return [pieces for _, pieces in rows]

    def _prepare(self, folder: AnyPath, path: AnyPath) -> None:
        """Locks the folder for this run, and removes leftovers of a killed save."""
        if folder not in self._locks:
            self._locks[folder] = RemoteLock(folder) if isinstance(folder, RemotePath) else FolderLock(folder)
        self._locks[folder].check()
        if (number := self._last_saved.get(folder.resolve())) is not None:
            # After a resume from an older checkpoint, no later resume may take the newer ones.
            for other in list_checkpoints(folder):
                if (parse_minibatches(other.name) or 0) > number:
                    set_aside(other)
        if (path / MANIFEST if isinstance(path, RemotePath) else path).exists():
            raise ArtifactError(
                f"a checkpoint {path} exists already; resume from it (--resume), or save into another folder"
            )
        remove_leftovers(folder)

    def close(self, *, failed: bool) -> None:
        """Leaves the group, and unlocks the folders unless an abandoned save is still writing."""
        if self._rank == 0 and not failed:
            write_checkpoint("")
        if self._group is not None:
            leave_group(self._group)
            self._group = None
        if not self.is_writing():
            for lock in self._locks.values():
                lock.release()
            self._locks.clear()

    def is_writing(self) -> bool:
        """Returns whether this rank's part is still being written."""
        return self._thread is not None and self._thread.is_alive()

    def finish(self) -> None:
        """Waits for this rank's part; raises a `WorkerError` if it could not be written."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self.check()

    def check(self) -> None:
        """Raises the `WorkerError` of a save in the background."""
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure

    def note_loaded(self, path: AnyPath, minibatches: int) -> None:
        self._last_saved[path.resolve().parent] = minibatches
        if self._rank == 0:
            write_checkpoint(str(path))

    def _run(self, save: _Save, is_separate: bool, any_separate: bool) -> None:
        try:
            if self._device.type == "cuda":
                # In a new thread GPU 0 is current, but torch copies to the CPU on the current GPU's stream.
                torch.cuda.set_device(self._device)
            self._write(save, is_separate, any_separate)
        except WorkerError as error:
            self._failure = error
        except Exception as error:
            save_error = (
                error if isinstance(error, _SaveError) else _SaveError(self._rank, _describe_failure(error, save.path))
            )
            action = f"saving the checkpoint of minibatch {save.manifest.minibatches}"
            advice = _advise_after_failure(save.path.parent)
            self._failure = WorkerError(save_error.rank, action, save_error.cause, advice)


class _SaveError(Exception):
    """A rank could not write its part."""

    def __init__(self, rank: int, cause: str) -> None:
        super().__init__(cause)
        self.rank = rank
        self.cause = cause


def _describe_failure(failure: Exception, path: AnyPath) -> str:
    error = system_error(failure)
    if isinstance(error, OSError) and error.strerror:
        return f"cannot write {path}: {error.strerror}"
    return summarise_error(error)


def _advise_after_failure(folder: AnyPath) -> str:
    newest = None
    with suppress(OSError, ArtifactError):
        newest = find_newest_checkpoint(folder)
    intact = (
        f"there is no earlier checkpoint in {folder}"
        if newest is None
        else f"earlier checkpoints are intact ({newest})"
    )
    return f"{intact}; free disk space or choose another folder, and resume"


class FolderLock:
    """A folder's lock, held until `release` or the end of this process; makes the folder if needed.

    Raises:
        ArtifactError: another run holds it, or the folder cannot be written.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._path = folder / ".lock"
        try:
            self._made_folder = not folder.exists()
            folder.mkdir(parents=True, exist_ok=True)
            self._descriptor = descriptor = self._open_locked()
            os.ftruncate(descriptor, 0)
            os.write(descriptor, _name_process().encode())
        except OSError as error:
            raise ArtifactError(f"cannot write into the folder {folder}: {error}; choose another one") from None
        self._closed = weakref.finalize(self, os.close, descriptor)
        os.register_at_fork(after_in_child=self._closed)  # otherwise a loader's process would hold it too

    def _open_locked(self) -> int:
        while True:
            descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o644)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                holder = os.read(descriptor, 1000).decode(errors="replace")
                os.close(descriptor)
                raise ArtifactError(
                    f"another run writes into the folder {self._folder} ({holder}); wait for its end, or choose "
                    "another folder"
                ) from None
            except OSError:
                return descriptor  # the file system has no locks
            with suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(descriptor), os.stat(self._path)):
                    return descriptor
            os.close(descriptor)  # the file was removed before it was locked: try again

    def check(self) -> None:
        """Raises an `ArtifactError` if the folder was removed."""
        try:
            is_here = os.path.samestat(os.fstat(self._descriptor), os.stat(self._path))
        except OSError:
            is_here = False
        if not is_here:
            raise ArtifactError(
                f"the folder {self._folder} was removed or replaced while this run was writing into it; give the run "
                "a folder of its own"
            )

    def release(self) -> None:
        """Removes the lock, and the folder if the lock created it and it is empty."""
        if self._closed.alive:
            with suppress(OSError):
                self._path.unlink()
                if self._made_folder:
                    self._folder.rmdir()
            self._closed()


class RemoteLock:
    """A lock on a folder in an object store, until another run begins to write there.

    Raises:
        OSError: it cannot be written.
    """

    def __init__(self, folder: RemotePath) -> None:
        self._folder = folder
        self._path = folder / ".lock"
        self._text = f"{_name_process()}, {uuid4().hex}"
        self._path.write_text(self._text)

    def check(self) -> None:
        """Raises an `ArtifactError` if another run has taken the folder."""
        try:
            holder = self._path.read_text()
        except FileNotFoundError:
            holder = "its .lock was removed"
        if holder != self._text:
            raise ArtifactError(
                f"another run has begun to write into the folder {self._folder} ({holder}); give each run a folder of "
                "its own"
            )

    def release(self) -> None:
        """Removes the lock if it is this run's."""
        with suppress(ArtifactError, OSError):
            self.check()
            self._path.unlink()


def _name_process() -> str:
    return f"process {os.getpid()} on {socket.gethostname()}"
