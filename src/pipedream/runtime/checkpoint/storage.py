"""Checkpoints on disk: written atomically, optionally in the background, in the form of torch's distributed checkpoint.

Life of a checkpoint:

1. At a drain each rank provides its tensors, for each stage its replica 0.
2. All ranks write into a folder whose name begins with a dot, one file per rank; rank 0 hears what is where.
3. When all have written, rank 0 adds the manifest (`core.checkpoint`), flushes it and renames the folder: now the
   checkpoint exists. A folder with a dot is never read, and the next save removes it.
4. The oldest beyond `keep` are renamed and then removed.

The manifest is JSON and tensors are read with ``weights_only``: a checkpoint from elsewhere cannot run code. The
``.metadata``, for torch's own tools, is a pickle and is never read here. Torch's `save` agrees on a plan first, in four
times the CPU time, which training has to do without.

Each tensor has a checksum in the manifest, taken of the values in memory as they are written and compared with those
that are read, so it covers disk, file format and the place that the manifest names. CRC-32 finds every single flipped
bit and every damage within 32 bits, other damage with probability 1 - 2^-32; zlib's is the fastest hash of the
standard library (2 GiB/s, BLAKE2b 0.7). It is no protection against somebody who changes both.
"""

from __future__ import annotations

import io
import json
import os
import pickle
import re
import shutil
import threading
import zlib
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from pipedream.core.checkpoint import Checkpoint, Stored
from pipedream.core.errors import ArtifactError, WorkerError
from pipedream.runtime.checkpoint.lock import FolderLock
from pipedream.runtime.comm.process_group import broadcast_text, gather_texts

__all__ = [
    "MANIFEST",
    "Writer",
    "complete_checkpoints",
    "folder_name",
    "minibatches_of",
    "newest_checkpoint",
    "read_manifest",
    "read_tensors",
    "verify_checkpoint",
]

MANIFEST = "checkpoint.json"
"""Name of the file that describes a checkpoint; a folder without it is not a checkpoint."""

_PREFIX = "minibatch-"


def folder_name(minibatches: int) -> str:
    """Returns the name of a checkpoint's folder, e.g. 'minibatch-00000091' after 91 minibatches."""
    return f"{_PREFIX}{minibatches:08d}"


def minibatches_of(name: str) -> int | None:
    """Returns the number in a checkpoint folder's name; None for any other name."""
    found = re.fullmatch(rf"{_PREFIX}(\d+)", name)
    return int(found[1]) if found else None


def complete_checkpoints(folder: Path) -> list[Path]:
    """Returns a folder's complete checkpoints, the oldest first."""
    found = {
        path: number
        for path in folder.glob(f"{_PREFIX}*")
        if (number := minibatches_of(path.name)) is not None and (path / MANIFEST).is_file()
    }
    return sorted(found, key=found.__getitem__)


def newest_checkpoint(folder: str | os.PathLike[str]) -> Path | None:
    """Returns a folder's newest complete checkpoint, or the folder if it is one itself, or None."""
    path = Path(folder)
    if (path / MANIFEST).is_file():
        return path
    return next(reversed(complete_checkpoints(path)), None)


def read_manifest(path: Path) -> Checkpoint:
    """Reads a manifest; raises an `ArtifactError` if it is damaged, or a file is missing or truncated."""
    try:
        return _read_manifest(path)
    except ArtifactError as error:
        raise ArtifactError(f"{error}; {_advice(path)}") from None


def _read_manifest(path: Path) -> Checkpoint:
    manifest = Checkpoint.load(path / MANIFEST)
    for name, size in manifest.files.items():
        if (path / name).is_symlink():
            raise ArtifactError(
                f"the checkpoint {path} is not read: its {name} is a link, which may lead to any file; put a copy of "
                "the file in its place"
            )
        try:
            found = (path / name).stat().st_size
        except OSError as error:
            raise ArtifactError(f"the checkpoint {path} is damaged: {error}") from None
        if found != size:
            raise ArtifactError(
                f"the checkpoint {path} is damaged: {name} has {found} bytes, and had {size} when it was saved"
            )
    return manifest


def read_tensors(path: Path, manifest: Checkpoint, names: Iterable[str]) -> dict[str, torch.Tensor]:
    """Reads the tensors that this rank needs; raises an `ArtifactError` if it cannot, or one is damaged."""
    wanted = list(names)
    missing = [name for name in wanted if name not in manifest.tensors]
    if missing:
        raise ArtifactError(f"the checkpoint {path} has no tensor {missing[0]!r}; it is of another model or optimizer")
    try:
        return {name: _read_tensor(path, name, manifest.tensors[name]) for name in wanted}
    except ArtifactError as error:
        raise ArtifactError(f"the checkpoint {path} is damaged: {error}; {_advice(path)}") from None
    except Exception as error:
        raise ArtifactError(f"the checkpoint {path} cannot be read: {_first_line(error)}; {_advice(path)}") from None


def verify_checkpoint(path: Path) -> Checkpoint:
    """Reads all of a checkpoint, tensor by tensor; raises an `ArtifactError` if it is damaged."""
    manifest = read_manifest(path)
    for name in manifest.tensors:
        read_tensors(path, manifest, [name])
    return manifest


def _read_tensor(path: Path, name: str, stored: Stored) -> torch.Tensor:
    with open(path / stored.file, "rb") as file:
        file.seek(stored.offset)
        tensor = torch.load(io.BytesIO(file.read(stored.length)), map_location="cpu", weights_only=True)
    if not isinstance(tensor, torch.Tensor):
        raise ArtifactError(f"{name!r} is no tensor")
    found = (_dtype_of(tensor), tuple(tensor.shape))
    if found != (stored.dtype, stored.shape):
        raise ArtifactError(f"{name!r} has dtype and shape {found}, and had {(stored.dtype, stored.shape)}")
    if stored.crc32 is not None and _crc32(tensor) != stored.crc32:
        raise ArtifactError(f"the values of {name!r} have another checksum than when they were saved")
    return tensor


def _dtype_of(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _crc32(tensor: torch.Tensor) -> int:
    """Of a tensor on the CPU."""
    head = zlib.crc32(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
    plain = tensor.resolve_conj().resolve_neg().reshape(-1)
    return zlib.crc32(plain.contiguous().view(torch.uint8).numpy().data, head)


class Writer:
    """Writes a run's checkpoints, one at a time.

    Args:
        group: gloo group for this alone: training continues during a save; None in a single process.
        device: of the tensors.
    """

    def __init__(self, rank: int, group: dist.ProcessGroup | None, device: torch.device) -> None:
        self._rank = rank
        self._group = group
        self._device = device
        self._thread: threading.Thread | None = None
        self._failure: WorkerError | None = None
        self._last: tuple[Path, int] | None = None
        self._locks: dict[Path, FolderLock] = {}

    def begin(self, folder: Path, manifest: Checkpoint, tensors: Mapping[str, torch.Tensor], keep: int | None) -> Path:
        """Starts to write a checkpoint; all ranks call it. Returns its future path.

        Args:
            manifest: only rank 0's is written.
            tensors: must not be modified until `finish`.
            keep: complete checkpoints to keep; None keeps all.

        Raises:
            ArtifactError: another run has saved one of that name, or is writing into the folder.
        """
        path = folder / folder_name(manifest.minibatches)
        if self._last == (path, manifest.minibatches):
            return path
        failure = ""
        if self._rank == 0:
            try:
                self._prepare(folder, path)
            except ArtifactError as error:
                failure = str(error)
        failure = broadcast_text(failure, self._group)
        if failure:
            raise ArtifactError(failure)
        self._last = (path, manifest.minibatches)
        scratch = folder / f".{path.name}"
        what = f"saving the checkpoint of minibatch {manifest.minibatches}"

        def write() -> None:
            failure = ""
            places: list[Any] = []
            try:
                places = _write_tensors(scratch / f"__{self._rank}_0.distcp", tensors)
            except Exception as error:
                failure = _first_line(error)
            texts = gather_texts(json.dumps([failure, places]), self._group)
            rows = [json.loads(text) for text in texts]
            for rank, (failure, _) in enumerate(rows):
                if failure:
                    raise _failed(rank, what, failure)
            if self._rank == 0:
                found = [one for _, places in reversed(rows) for one in places]
                tensors_at = {name: Stored(dtype, tuple(shape), *place) for name, dtype, shape, *place in found}
                _commit(scratch, path, _with_files(manifest, tensors_at, scratch))
                _prune(folder, keep)

        # A daemon, because nothing may wait for it if another rank dies during the save.
        self._thread = threading.Thread(target=self._run, args=(write, what), daemon=True)
        self._thread.start()
        return path

    def _prepare(self, folder: Path, path: Path) -> None:
        """Locks the folder for this run, and removes what a killed save has left."""
        if folder not in self._locks:
            self._locks[folder] = FolderLock(folder)
        last, number = self._last or (None, 0)
        if last is not None and last.resolve().parent == folder.resolve():
            # Resumed from an older one: a later resume must not take those of the course that was left.
            for other in complete_checkpoints(folder):
                if (minibatches_of(other.name) or 0) > number:
                    shutil.rmtree(other.with_name(f"{other.name}.replaced"), ignore_errors=True)
                    other.rename(other.with_name(f"{other.name}.replaced"))
        if path.exists():
            raise ArtifactError(
                f"a checkpoint {path} exists already; resume from it (--resume), or save into another folder"
            )
        for left in folder.glob(f".{_PREFIX}*"):
            shutil.rmtree(left, ignore_errors=True)

    def close(self) -> None:
        """Gives the folders free, unless a save that was given up is still writing."""
        if self._thread is None or not self._thread.is_alive():
            for lock in self._locks.values():
                lock.release()
            self._locks.clear()

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

    def loaded(self, path: Path, minibatches: int) -> None:
        self._last = (path, minibatches)

    def _run(self, write: Callable[[], None], what: str) -> None:
        try:
            if self._device.type == "cuda":
                # In a new thread GPU 0 is current, and torch copies tensors to the CPU, and waits for that, on the
                # current GPU's stream.
                torch.cuda.set_device(self._device)
            write()
        except WorkerError as error:
            self._failure = error
        except Exception as error:
            self._failure = _failed(self._rank, what, _first_line(error))


def _failed(rank: int, what: str, cause: str) -> WorkerError:
    return WorkerError(
        rank, what, cause, "earlier checkpoints are intact; free disk space or choose another folder, and resume"
    )


def _write_tensors(path: Path, tensors: Mapping[str, torch.Tensor]) -> list[tuple[Any, ...]]:
    """Writes tensors one after the other, each by `torch.save`; returns each name with the fields of `Stored`."""
    path.parent.mkdir(exist_ok=True)
    found = []
    with open(path, "wb") as file:
        for name, tensor in tensors.items():
            own = tensor.detach().cpu()
            if own.untyped_storage().nbytes() != own.nbytes:
                own = own.clone()  # the storage is what is written
            start = file.tell()
            torch.save(own, file)
            length = file.tell() - start
            found.append((name, _dtype_of(own), tuple(own.shape), path.name, start, length, _crc32(own)))
        file.flush()
        os.fsync(file.fileno())
    return found


def _commit(scratch: Path, path: Path, manifest: Checkpoint) -> None:
    (scratch / ".metadata").write_bytes(pickle.dumps(_metadata(manifest)))
    with open(scratch / MANIFEST, "w", encoding="utf-8") as file:
        file.write(manifest.to_json() + "\n")
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
    for old in complete_checkpoints(folder)[: -keep if keep else 0]:
        doomed = old.with_name(f".{old.name}")
        old.rename(doomed)
        shutil.rmtree(doomed, ignore_errors=True)


def _with_files(manifest: Checkpoint, tensors: Mapping[str, Stored], scratch: Path) -> Checkpoint:
    """Raises an `ArtifactError` if rank 0 does not see a file of another rank."""
    files = {}
    for name in sorted({stored.file for stored in tensors.values()}):
        file = scratch / name
        if not file.is_file():
            raise ArtifactError(
                f"rank 0 does not see {file}, which another rank has written; save into a folder that all machines "
                "share"
            )
        files[name] = file.stat().st_size
    return replace(manifest, tensors=dict(sorted(tensors.items())), files=files)


def _metadata(manifest: Checkpoint) -> Metadata:
    """Returns what torch's distributed checkpoint keeps about the same tensors."""
    tensors, places = {}, {}
    for name, stored in manifest.tensors.items():
        size, start = torch.Size(stored.shape), torch.Size([0] * len(stored.shape))
        properties = TensorProperties(dtype=getattr(torch, stored.dtype))
        tensors[name] = TensorStorageMetadata(properties, size, [ChunkStorageMetadata(start, size)])
        places[MetadataIndex(name, start, 0)] = _StorageInfo(stored.file, stored.offset, stored.length)
    return Metadata(
        dict(tensors),
        planner_data={name: (name,) for name in tensors},
        storage_data=places,
        storage_meta=StorageMeta(),
        version=CURRENT_DCP_VERSION,
    )


def _first_line(error: BaseException) -> str:
    text = (str(error).strip().splitlines() or [repr(error)])[0]
    return f"{type(error).__name__}: {text}"


def _advice(path: Path) -> str:
    """Names the newest other checkpoint whose manifest is intact; one before this, if there is one."""
    others = [other for other in complete_checkpoints(path.parent) if other.name != path.name]
    for other in sorted(others, key=lambda other: (other.name < path.name, other.name), reverse=True):
        try:
            _read_manifest(other)
        except ArtifactError:
            continue
        return f"resume from {other} (--resume {other})"
    return "its folder has no other checkpoint: start again"
