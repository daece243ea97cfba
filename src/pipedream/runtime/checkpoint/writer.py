"""Checkpoints on disk: written whole or not at all, in the background if wished, by torch's distributed checkpoint.

Life of a checkpoint:

1. At a drain each rank hands over its tensors; replica 0 of a stage speaks for the stage.
2. All ranks write into a folder whose name begins with a dot (torch's `save`, one file a rank).
3. When all have written, rank 0 adds the contents page (`core.checkpoint`), flushes it to the disk, and renames the
   folder: from that moment on the checkpoint exists. A folder with a dot is never read, and is removed by the
   next save.
4. Beyond `keep` the oldest are removed, renamed first.

The contents page is JSON and tensors are read with ``weights_only``: a checkpoint from elsewhere cannot run code. The
``.metadata`` that torch writes too, for its own tools, is a pickle and is never read here.
"""

from __future__ import annotations

import os
import re
import shutil
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from pipedream.core.checkpoint import Checkpoint, Stored
from pipedream.core.errors import ArtifactError, WorkerError

__all__ = ["CONTENTS", "Writer", "complete", "contents", "newest", "read"]

CONTENTS = "checkpoint.json"
_NAME = re.compile(r"minibatch-(\d+)")


def complete(folder: Path) -> list[Path]:
    """Returns the complete checkpoints in a folder, the oldest first."""
    found = [path for path in folder.glob("minibatch-*") if _NAME.fullmatch(path.name) and (path / CONTENTS).is_file()]
    return sorted(found, key=lambda path: int(path.name.split("-")[1]))


def newest(folder: str | os.PathLike[str]) -> Path | None:
    """Returns the newest complete checkpoint in a folder, the folder itself if it is one; None where there is none."""
    path = Path(folder)
    if (path / CONTENTS).is_file():
        return path
    return next(reversed(complete(path)), None)


def contents(path: Path) -> Checkpoint:
    """Reads a checkpoint's contents page, and checks that its files are there.

    Raises:
        ArtifactError: it cannot be read, or a file is missing or was cut short.
    """
    page = Checkpoint.load(path / CONTENTS)
    for name, size in page.files.items():
        try:
            found = (path / name).stat().st_size
        except OSError as error:
            raise ArtifactError(f"the checkpoint {path} is damaged: {error}; {_others(path)}") from None
        if found != size:
            raise ArtifactError(
                f"the checkpoint {path} is damaged: {name} has {found} bytes, and had {size} when it was saved; "
                f"{_others(path)}"
            )
    return page


def read(path: Path, page: Checkpoint, names: Iterable[str]) -> dict[str, torch.Tensor]:
    """Reads tensors of a checkpoint; each rank those that it needs, without the others.

    Raises:
        ArtifactError: a name is not in it, or a file cannot be read.
    """
    wanted = list(names)
    missing = [name for name in wanted if name not in page.tensors]
    if missing:
        raise ArtifactError(f"the checkpoint {path} has no tensor {missing[0]!r}; it is of another model or optimizer")
    try:
        tensors = {name: _empty(page.tensors[name]) for name in wanted}
        with _alone():
            load(tensors, storage_reader=_Reader(path, page), no_dist=True)
    except (Exception, CheckpointException) as error:
        raise ArtifactError(f"the checkpoint {path} cannot be read: {_words(error)}; {_others(path)}") from None
    return tensors


class Writer:
    """Writes the checkpoints of a run, one at a time.

    Args:
        rank: of this process.
        group: gloo group of all ranks for this purpose alone, because a save in the background uses it while the
            training goes on; None in a lone process.
    """

    def __init__(self, rank: int, group: dist.ProcessGroup | None) -> None:
        self._rank = rank
        self._group = group
        self._thread: threading.Thread | None = None
        self._failure: WorkerError | None = None
        self._last: tuple[Path, int] | None = None

    def begin(self, folder: Path, page: Checkpoint, tensors: Mapping[str, torch.Tensor], keep: int | None) -> Path:
        """Starts to write a checkpoint; `finish` ends it. All ranks call it with their own tensors.

        Args:
            folder: of all checkpoints of the run.
            page: at rank 0, without tensors and files.
            tensors: name -> tensor of this rank; must not be written until `finish`.
            keep: how many complete ones are left; None keeps all.

        Returns where it will be.

        Raises:
            ArtifactError: there is one of that name already, of another run.
        """
        path = folder / f"minibatch-{page.minibatches:08d}"
        if self._last == (path, page.minibatches):
            return path
        if path.exists():
            raise ArtifactError(
                f"a checkpoint {path} exists already; go on from it (--resume), or save into another folder"
            )
        self._last = (path, page.minibatches)
        scratch = folder / f".{path.name}"

        def write() -> None:
            writer = FileSystemWriter(scratch)
            with _alone() if self._group is None else nullcontext():
                written = save(
                    dict(tensors), storage_writer=writer, process_group=self._group, no_dist=self._group is None
                )
            if self._rank == 0:
                _commit(scratch, path, _with_files(page, written, scratch))
                _prune(folder, keep)

        if self._rank == 0:
            folder.mkdir(parents=True, exist_ok=True)
            for left in folder.glob(".minibatch-*"):
                shutil.rmtree(left, ignore_errors=True)
        if self._group is not None:
            dist.barrier(self._group)
        # A daemon: where a peer has died in the middle of it, nothing may wait for this thread.
        self._thread = threading.Thread(
            target=self._run, args=(write, f"saving the checkpoint of minibatch {page.minibatches}"), daemon=True
        )
        self._thread.start()
        return path

    def finish(self) -> None:
        """Waits until the checkpoint that was begun is complete, as far as this rank has to do with it.

        Raises:
            WorkerError: it could not be written.
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self.check()

    def check(self) -> None:
        """Raises what went wrong in the background.

        Raises:
            WorkerError: a checkpoint could not be written.
        """
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure

    def loaded(self, path: Path, minibatches: int) -> None:
        """Notes a checkpoint that the run goes on from: it need not be saved again."""
        self._last = (path, minibatches)

    def _run(self, write: Callable[[], None], what: str) -> None:
        try:
            write()
        except CheckpointException as error:
            rank = min(error.failures)
            self._failure = _failed(rank, what, error)
        except Exception as error:
            self._failure = _failed(self._rank, what, error)


def _failed(rank: int, what: str, error: BaseException) -> WorkerError:
    return WorkerError(
        rank, what, _words(error), "the checkpoints before it are whole; make room, or save elsewhere, and resume"
    )


def _commit(scratch: Path, path: Path, page: Checkpoint) -> None:
    """Makes a written checkpoint exist."""
    with open(scratch / CONTENTS, "w", encoding="utf-8") as file:
        file.write(page.to_json() + "\n")
        file.flush()
        os.fsync(file.fileno())
    scratch.rename(path)
    _flush_folder(path.parent)


def _flush_folder(folder: Path) -> None:
    with suppress(OSError):  # not every file system lets a folder be flushed
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _prune(folder: Path, keep: int | None) -> None:
    for old in complete(folder)[: -keep if keep else 0]:
        doomed = old.with_name(f".{old.name}")
        old.rename(doomed)
        shutil.rmtree(doomed, ignore_errors=True)


def _with_files(page: Checkpoint, written: Metadata, scratch: Path) -> Checkpoint:
    """Returns the contents page with what the ranks have written.

    Raises:
        ArtifactError: rank 0 does not see a file of another rank.
    """
    assert written.storage_data is not None
    tensors, files = {}, {}
    for index, info in written.storage_data.items():
        described = written.state_dict_metadata[index.fqn]
        assert isinstance(described, TensorStorageMetadata)
        dtype = str(described.properties.dtype).removeprefix("torch.")
        shape = tuple(described.size)
        tensors[index.fqn] = Stored(dtype, shape, info.relative_path, info.offset, info.length)
        if info.relative_path not in files:
            file = scratch / info.relative_path
            if not file.is_file():
                raise ArtifactError(
                    f"rank 0 does not see {file}, which another rank has written; save into a folder that all "
                    "machines share"
                )
            files[info.relative_path] = file.stat().st_size
    return replace(page, tensors=dict(sorted(tensors.items())), files=files)


class _Reader(FileSystemReader):
    """Takes what is where from the contents page, and not from a pickle."""

    def __init__(self, path: Path, page: Checkpoint) -> None:
        super().__init__(path)
        self._page = page

    def read_metadata(self, *args: object, **rest: object) -> Metadata:
        """Returns the contents in torch's words."""
        tensors, places = {}, {}
        for name, stored in self._page.tensors.items():
            size, start = torch.Size(stored.shape), torch.Size([0] * len(stored.shape))
            properties = TensorProperties(dtype=getattr(torch, stored.dtype))
            tensors[name] = TensorStorageMetadata(properties, size, [ChunkStorageMetadata(start, size)])
            places[MetadataIndex(name, start, 0)] = _StorageInfo(stored.file, stored.offset, stored.length)
        return Metadata(dict(tensors), storage_data=places, storage_meta=StorageMeta())


@contextmanager
def _alone() -> Iterator[None]:
    """Keeps torch from warning that a lone process is alone."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        yield


def _empty(stored: Stored) -> torch.Tensor:
    dtype = getattr(torch, stored.dtype, None)
    if not isinstance(dtype, torch.dtype):
        raise ArtifactError(f"{stored.dtype!r} is no type of tensors")
    return torch.empty(stored.shape, dtype=dtype)


def _words(error: BaseException) -> str:
    if isinstance(error, CheckpointException) and error.failures:
        error = error.failures[min(error.failures)][0]
    text = (str(error).strip().splitlines() or [repr(error)])[0]
    return f"{type(error).__name__}: {text}"


def _others(path: Path) -> str:
    """Says what can be done where a checkpoint is damaged."""
    rest = [other for other in complete(path.parent) if other != path]
    return f"resume from {rest[-1]}" if rest else "there is no other one beside it: start again"
