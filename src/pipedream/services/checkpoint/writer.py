"""Checkpoints: written atomically, optionally in the background, in the form of torch's distributed checkpoint.

Life of a checkpoint:

1. At a drain replica 0 of each stage provides the stage's tensors. In a mesh each rank provides its part; of equal
   parts only the first rank's is written.
2. All ranks write into a folder whose name begins with a dot, one file per rank, and send rank 0 the offsets.
3. When all have written, rank 0 adds the manifest (`core.checkpoint`), flushes it and renames the folder: now the
   checkpoint exists. A folder with a dot is never read, and the next save removes it.
4. The oldest checkpoints beyond `keep` are renamed and then removed.

Torch's `save` agrees on a plan first, which takes four times the CPU time.

Two runs cannot write into a store at the same time. The lock of a folder on disk is the kernel's (`flock` on the file
``.lock``), which frees it when a run is killed. On NFS it also holds between hosts; a lost host keeps it until the
server gives it up. Where the file system has no locks, there is no protection. In a store without locks the run that
began last owns the folder; an earlier one finds another name in ``.lock``, and saves nothing more.
"""

import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist

from pipedream.core.artifact import system_error
from pipedream.core.box import Box
from pipedream.core.checkpoint import Checkpoint
from pipedream.core.errors import ArtifactError, WorkerError
from pipedream.runtime.comm.connections import make_gloo_group
from pipedream.runtime.comm.process_group import gather_json, leave_group, wait_for_all
from pipedream.services.checkpoint.folders import (
    commit,
    failing_together,
    find_newest_checkpoint,
    find_ranks_that_see,
    list_checkpoints,
    prune,
    remove_leftovers,
    summarise_error,
)
from pipedream.services.checkpoint.pieces import merge_rows, write_tensors
from pipedream.services.checkpoint.stores.store import CheckpointStore, Lock, name_checkpoint
from pipedream.services.failure.processes import write_checkpoint


@dataclass(frozen=True)
class Save:
    """One checkpoint to write.

    Attributes:
        manifest: only rank 0's is written.
        tensors: must not be modified until `Writer.finish`.
        keep: complete checkpoints to keep; None keeps all.
        slices: name -> (box, shape of the whole), for tensors that are parts.
        wait_for_tensors: called by the writing thread before it reads the tensors.
    """

    store: CheckpointStore
    manifest: Checkpoint
    tensors: Mapping[str, torch.Tensor]
    keep: int | None
    slices: Mapping[str, tuple[Box, Sequence[int]]] = field(default_factory=dict)
    wait_for_tensors: Callable[[], None] | None = None

    @property
    def name(self) -> str:
        return name_checkpoint(self.manifest.minibatches)

    @property
    def checkpoint(self) -> CheckpointStore:
        return self.store.within(self.name)

    def make_error(self, rank: int, cause: str) -> WorkerError:
        """Returns the error of a rank that could not write its part."""
        newest = None
        with suppress(OSError, ArtifactError):
            newest = find_newest_checkpoint(self.store)
        no_other = f"there is no earlier checkpoint in {self.store}"
        intact = no_other if newest is None else f"earlier checkpoints are intact ({newest})"
        action = f"saving the checkpoint of minibatch {self.manifest.minibatches}"
        return WorkerError(rank, action, cause, f"{intact}; free disk space or choose another folder, and resume")


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
        self._last_saved: dict[CheckpointStore, int] = {}  # store -> minibatches of the newest checkpoint of this run
        self._locks: dict[CheckpointStore, Lock] = {}
        self._separate_ranks: dict[CheckpointStore, set[int]] = {}

    def begin(self, save: Save) -> CheckpointStore:
        """Starts to write a checkpoint; all ranks call it. Returns the future one.

        Raises:
            ArtifactError: another run has saved one of that name, or is writing into the folder.
        """
        store, checkpoint = save.store, save.checkpoint
        if self._last_saved.get(store) == save.manifest.minibatches:
            return checkpoint
        if self._distributed and self._group is None:  # a separate group: training continues during a save
            wait_for_all()
            self._group = make_gloo_group()
        with failing_together(self._group, ArtifactError, OSError):
            if self._rank == 0:
                self._prepare(store, save.name)
        self._last_saved[store] = save.manifest.minibatches
        if store not in self._separate_ranks:
            sees = find_ranks_that_see(store, self._rank, self._group)
            self._separate_ranks[store] = {rank for rank, sees_it in enumerate(sees) if not sees_it}
        if self._rank in self._separate_ranks[store]:
            store.make_folder()
            with suppress(FileNotFoundError):
                store.set_aside(save.name)  # left by an unfinished save, or from before a resume at an older one
            remove_leftovers(store, except_for=save.name)  # another rank of this machine may have begun
        if self._separate_ranks[store]:
            self._wait_until_written(save)  # no rank may commit before all have removed leftovers
        # A daemon: if another rank dies during the save, nothing may wait for this thread.
        self._thread = threading.Thread(target=self._run, args=(save,), daemon=True)
        self._thread.start()
        return checkpoint

    def _write(self, save: Save) -> None:
        """Writes this rank's part, and waits for the others."""
        store, name = save.store, save.name
        separate_ranks = self._separate_ranks[store]
        is_separate = self._rank in separate_ranks
        failure = ""
        rows_written: list[Any] = []
        try:
            if save.wait_for_tensors is not None:
                save.wait_for_tensors()
            file_name = f"__{self._rank}_0.distcp"
            with store.write(name, file_name) as file:
                rows_written = write_tensors(file, file_name, save.tensors, save.slices)
        except Exception as error:
            failure = _describe_failure(error, save.checkpoint)
        try:
            rows = self._wait_until_written(save, failure, rows_written)
        except WorkerError:
            # No rank writes any more, and the disk may be full.
            if is_separate or self._rank == 0:
                with suppress(OSError):
                    store.abandon(name)
            raise
        if is_separate:
            with suppress(FileNotFoundError):  # another rank of this machine has committed it
                store.commit(name)
            prune(store, save.keep and save.keep + 1, parts=True)  # the oldest counts until rank 0 is done
        if separate_ranks:
            self._wait_until_written(save)
        if self._rank == 0:
            self._locks[store].check()
            commit(store, name, replace(save.manifest, **merge_rows(rows)))
            write_checkpoint(str(save.checkpoint))
            prune(store, save.keep)

    def _wait_until_written(self, save: Save, failure: str = "", rows_written: Sequence[Any] = ()) -> list[Any]:
        """Waits for all ranks; returns the rows of each, or raises the error of the first that failed."""
        rows = gather_json([failure, rows_written], self._group)
        for rank, (failed, _) in enumerate(rows):
            if failed:
                raise save.make_error(rank, failed)
        return [pieces for _, pieces in rows]

    def _prepare(self, store: CheckpointStore, name: str) -> None:
        """Locks the store for this run, and removes leftovers of a killed save."""
        if store not in self._locks:
            self._locks[store] = store.lock()
        self._locks[store].check()
        if (number := self._last_saved.get(store)) is not None:
            # After a resume from an older checkpoint, no later resume may take the newer ones.
            for other in list_checkpoints(store):
                if other.minibatches > number:
                    store.set_aside(other.name)
        if store.exists(name):
            raise ArtifactError(
                f"a checkpoint {store.locate(name)} exists already; resume from it (--resume), or save into another "
                "folder"
            )
        remove_leftovers(store)

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

    def note_loaded(self, checkpoint: CheckpointStore, minibatches: int) -> None:
        self._last_saved[checkpoint.resolve().above()] = minibatches
        if self._rank == 0:
            write_checkpoint(str(checkpoint))

    def _run(self, save: Save) -> None:
        try:
            if self._device.type == "cuda":
                # In a new thread GPU 0 is current, but torch copies to the CPU on the current GPU's stream.
                torch.cuda.set_device(self._device)
            self._write(save)
        except WorkerError as error:
            self._failure = error
        except Exception as error:
            self._failure = save.make_error(self._rank, _describe_failure(error, save.checkpoint))


def _describe_failure(failure: Exception, checkpoint: CheckpointStore) -> str:
    error = system_error(failure)
    if isinstance(error, OSError) and error.strerror:
        return f"cannot write {checkpoint}: {error.strerror}"
    return summarise_error(error)
