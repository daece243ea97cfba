"""Checkpoints: written atomically, optionally in the background, in the form of torch's distributed checkpoint.

Life of a checkpoint:

1. At a drain each rank provides its tensors, for each stage its replica 0. Of a worker that is a mesh each rank
   provides its part, and of equal parts the first.
2. All ranks write into a folder whose name begins with a dot, one file per rank; rank 0 hears what is where.
3. When all have written, rank 0 adds the manifest (`core.checkpoint`), flushes it and renames the folder: now the
   checkpoint exists. A folder with a dot is never read, and the next save removes it.
4. The oldest beyond `keep` are renamed and then removed.

A rank that does not see rank 0's folder has one of the same name on its own machine, without a manifest, which it
renames before rank 0 does. A rank that resumes gets what its machine lacks from a rank that has it.

An object store (`remote`) has no rename: its files are written where they stay, the manifest last, and removed after
it. A folder without a manifest is what a killed save has left, and the next save removes it.

The manifest is JSON and tensors are read with ``weights_only``: a checkpoint from elsewhere cannot run code. The
``.metadata``, for torch's own tools, is a pickle and is never read here. Torch's `save` agrees on a plan first, in four
times the CPU time, which training has to do without.

A tensor is written in pieces, so that a rank whose worker cuts it in another way reads little that it does not need.
Each piece has a checksum in the manifest, taken of the values in memory as they are written and compared with those
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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import product
from math import prod
from pathlib import Path
from typing import Any, NamedTuple
from uuid import uuid4

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

from pipedream.core.artifact import system_error
from pipedream.core.checkpoint import Checkpoint, Stored, StoredPiece
from pipedream.core.errors import ArtifactError, WorkerError
from pipedream.core.plan.mesh import Box, box_of, overlap
from pipedream.runtime.checkpoint.lock import FolderLock, RemoteLock
from pipedream.runtime.checkpoint.remote import AnyPath, RemotePath, any_path
from pipedream.runtime.comm.process_group import broadcast_text, gather_texts

MANIFEST = "checkpoint.json"
"""Name of the file that describes a checkpoint; a folder without it is not a checkpoint."""

_PREFIX = "minibatch-"
_COPIED_BYTES = 16 << 20  # at once
_READ_BYTES = 64 << 20  # at once, of several pieces
_PIECE_BYTES = 1 << 20
_MOST_PIECES = 64  # of what one rank has of a tensor


def folder_name(minibatches: int) -> str:
    """Returns the name of a checkpoint's folder, e.g. 'minibatch-00000091' after 91 minibatches."""
    return f"{_PREFIX}{minibatches:08d}"


def minibatches_of(name: str) -> int | None:
    """Returns the number in a checkpoint folder's name; None for any other name."""
    match = re.fullmatch(rf"{_PREFIX}(\d+)", name)
    return int(match[1]) if match else None


def complete_checkpoints(folder: AnyPath) -> list[AnyPath]:
    """Returns a folder's complete checkpoints, the oldest first."""
    return _list_checkpoints(folder)


def _list_checkpoints(folder: AnyPath, *, parts: bool = False) -> list[AnyPath]:
    minibatches = {
        path: number
        for path in folder.glob(f"{_PREFIX}*")
        if (number := minibatches_of(path.name)) is not None and (parts or (path / MANIFEST).is_file())
    }
    return sorted(minibatches, key=minibatches.__getitem__)


def newest_checkpoint(folder: str | os.PathLike[str] | RemotePath) -> AnyPath | None:
    """Returns a folder's newest complete checkpoint, or the folder if it is one itself, or None."""
    path = any_path(folder)
    if (path / MANIFEST).is_file():
        return path
    return next(reversed(complete_checkpoints(path)), None)


def newest_of_all(newest_here: AnyPath | None, group: dist.ProcessGroup | None) -> AnyPath | None:
    """Returns the newest of what the ranks have found; every rank calls it.

    Without a shared folder one machine has the manifest: that of rank 0 when it was saved.
    """
    number = -1 if newest_here is None else (minibatches_of(newest_here.resolve().name) or 0)
    rows = [json.loads(row) for row in gather_texts(json.dumps([number, str(newest_here)]), group)]
    newest, path = max(rows, key=lambda row: int(row[0]))
    return any_path(path) if newest >= 0 else None


def read_manifest(path: AnyPath) -> Checkpoint:
    """Reads a manifest; raises an `ArtifactError` if it is damaged, or a file is missing or truncated."""
    try:
        return _read_manifest(path)
    except ArtifactError as error:
        raise ArtifactError(f"{error}; {_advise(path)}") from None


def read_shared_manifest(path: AnyPath, group: dist.ProcessGroup | None) -> tuple[Checkpoint, dict[str, int]]:
    """Reads a manifest that some ranks see, and files of which each rank sees some; every rank calls it.

    Returns the manifest, and for each file the first rank that has it whole.

    Raises:
        ArtifactError: the same on every rank: see `read_manifest`.
    """
    page = path / MANIFEST
    try:
        text = page.read_text(encoding="utf-8") if page.is_file() else ""
    except (OSError, UnicodeDecodeError) as error:
        text = str(error)  # is refused as no JSON
    text = next(filter(None, gather_texts(text, group)), "")
    try:
        manifest = Checkpoint.from_json(text, str(page))
    except ArtifactError as error:
        raise ArtifactError(f"{error}; {_advise(path)}") from None
    rows = [json.loads(row) for row in gather_texts(json.dumps(_find_file_problems(path, manifest)), group)]
    ranks_by_file = {name: [rank for rank, row in enumerate(rows) if name not in row] for name in manifest.files}
    for name, ranks in ranks_by_file.items():
        if not ranks:
            advice = broadcast_text(_advise(path), group)
            raise ArtifactError(f"the checkpoint {path} {rows[0][name]}; {advice}")
    return manifest, {name: ranks[0] for name, ranks in ranks_by_file.items()}


def ranks_that_see(folder: AnyPath, rank: int, group: dist.ProcessGroup | None) -> list[bool]:
    """Returns for each rank whether it sees rank 0's folder, which exists; every rank calls it.

    Raises:
        ArtifactError: the same on every rank: rank 0 cannot write into it, or it is a URL that a rank does not see.
    """
    mark, token, failure = folder / ".shared", uuid4().hex, ""
    if rank == 0:
        try:
            mark.write_text(token, encoding="utf-8")
        except OSError as error:
            failure = f"cannot write into the folder {folder}: {error}; choose another one"
    token, failure = json.loads(broadcast_text(json.dumps([token, failure]), group))
    if failure:
        raise ArtifactError(failure)
    seen, why = False, "another file is there"
    try:
        seen = mark.read_text(encoding="utf-8") == token
    except OSError as error:
        why = str(error)
    rows = gather_texts("" if seen else why, group)
    if rank == 0:
        mark.unlink(missing_ok=True)
    for other, problem in enumerate(rows):
        if problem and isinstance(folder, RemotePath):
            raise ArtifactError(
                f"rank {other} does not see what rank 0 has written into {folder} ({problem}); give a store that all "
                "machines reach, with the same credentials"
            )
    return [not problem for problem in rows]


def _read_manifest(path: AnyPath) -> Checkpoint:
    manifest = _load_manifest(path)
    for problem in _find_file_problems(path, manifest).values():
        raise ArtifactError(f"the checkpoint {path} {problem}")
    return manifest


def _load_manifest(path: AnyPath) -> Checkpoint:
    page = path / MANIFEST
    try:
        text = page.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ArtifactError(f"cannot read the Checkpoint in {page}: {error}") from None
    return Checkpoint.from_json(text, str(page))


def _find_file_problems(path: AnyPath, manifest: Checkpoint) -> dict[str, str]:
    """Returns what is wrong with files, by their names."""
    problems = {}
    for name, size in manifest.files.items():
        if (path / name).is_symlink():
            problems[name] = (
                f"is not read: its {name} is a link, which may lead to any file; put a copy of the file in its place"
            )
            continue
        try:
            size_here = (path / name).stat().st_size
        except OSError as error:
            problems[name] = f"is damaged: {error}"
            continue
        if size_here != size:
            problems[name] = f"is damaged: {name} has {size_here} bytes, and had {size} when it was saved"
    return problems


def check_names(path: AnyPath, manifest: Checkpoint, names: Iterable[str]) -> None:
    """Raises an `ArtifactError` if a tensor is not in the checkpoint."""
    for name in names:
        if name not in manifest.tensors:
            raise ArtifactError(f"the checkpoint {path} has no tensor {name!r}; it is of another model or optimizer")


def absent_files(path: AnyPath, manifest: Checkpoint) -> set[str]:
    """Returns the names of files that this machine has not, or not whole."""
    return set(_find_file_problems(path, manifest))


class Share(NamedTuple):
    """What is wanted of a piece.

    Attributes:
        number: of the piece of its tensor.
        box: in the tensor's indices.
    """

    name: str
    number: int
    box: Box

    def stored_in(self, manifest: Checkpoint) -> StoredPiece:
        return manifest.tensors[self.name].pieces[self.number]


def shares_of(manifest: Checkpoint, boxes: Mapping[str, Box]) -> list[Share]:
    """Returns what parts of tensors consist of.

    Args:
        boxes: the part of each tensor.
    """
    return [
        Share(name, number, common)
        for name, box in boxes.items()
        for number, piece in enumerate(manifest.tensors[name].pieces)
        if (common := box if box == piece.box else overlap(box, piece.box)) is not None
    ]


def empty_of(dtype: str, box: Box) -> torch.Tensor:
    """Returns a part of a tensor without its values. Raises an `ArtifactError` if torch has no such dtype."""
    kind = getattr(torch, dtype, None)
    if not isinstance(kind, torch.dtype):
        raise ArtifactError(f"a tensor of the checkpoint has the dtype {dtype}, which torch does not have")
    return torch.empty([len(side) for side in box], dtype=kind)


def assemble(
    manifest: Checkpoint, boxes: Mapping[str, Box], shares: Iterable[tuple[Share, torch.Tensor]]
) -> dict[str, torch.Tensor]:
    """Returns parts of tensors from their shares."""
    tensors: dict[str, torch.Tensor] = {}
    for (name, _, box), values in shares:
        if box == boxes[name]:
            tensors[name] = values
            continue
        if name not in tensors:
            tensors[name] = values.new_empty([len(side) for side in boxes[name]])
        tensors[name][_slice_within(box, boxes[name])] = values
    for name in boxes.keys() - tensors.keys():  # those without values
        tensors[name] = empty_of(manifest.tensors[name].dtype, boxes[name])
    return {name: tensors[name] for name in boxes}


def read_tensors(path: AnyPath, manifest: Checkpoint, names: Iterable[str]) -> dict[str, torch.Tensor]:
    """Reads whole tensors; raises an `ArtifactError` if it cannot, or one is damaged."""
    wanted_names = list(names)
    check_names(path, manifest, wanted_names)
    boxes = {name: tuple(map(range, manifest.tensors[name].shape)) for name in wanted_names}
    return assemble(manifest, boxes, read_shares(path, manifest, shares_of(manifest, boxes)))


def read_shares(path: AnyPath, manifest: Checkpoint, shares: Iterable[Share]) -> Iterator[tuple[Share, torch.Tensor]]:
    """Yields shares with their values, in the order of the files; reads no other pieces.

    Raises:
        ArtifactError: a file cannot be read, or a piece is damaged.
    """
    try:
        for run in _group_reads(shares, manifest):
            with (path / run.file).open("rb") as file:
                file.seek(run.begin)
                data = memoryview(file.read(run.end - run.begin))
            for share in run.shares:
                stored, piece = manifest.tensors[share.name], share.stored_in(manifest)
                begin = piece.offset - run.begin
                values = _read_piece(data[begin : begin + piece.length], share.name, stored, piece)
                yield share, values if share.box == piece.box else values[_slice_within(share.box, piece.box)].clone()
    except ArtifactError as error:
        raise ArtifactError(f"the checkpoint {path} is damaged: {error}; {_advise(path)}") from None
    except pickle.UnpicklingError as error:  # torch's advice would be to run what is in the file
        what = f"{type(error).__name__}: a tensor's bytes are not as torch writes them"
        raise ArtifactError(f"the checkpoint {path} cannot be read: {what}; {_advise(path)}") from None
    except Exception as error:
        raise ArtifactError(
            f"the checkpoint {path} cannot be read: {_summarise_error(error)}; {_advise(path)}"
        ) from None


def verify_checkpoint(path: AnyPath) -> Checkpoint:
    """Reads all of a checkpoint, tensor by tensor; raises an `ArtifactError` if it is damaged."""
    manifest = read_manifest(path)
    for name in manifest.tensors:
        read_tensors(path, manifest, [name])
    return manifest


def gather_parts(folders: Iterable[AnyPath], out: AnyPath) -> AnyPath:
    """Makes one checkpoint in the folder `out` from the parts that machines without a shared folder have kept.

    Args:
        folders: of checkpoints; the newest manifest in them counts.

    Raises:
        ArtifactError: no folder has a manifest, a file is missing or damaged, or `out` has this checkpoint.
    """
    places = list(folders)
    checkpoints = [path for path in map(newest_checkpoint, places) if path is not None]
    source = max(checkpoints, key=lambda path: path.name, default=None)
    if source is None:
        raise ArtifactError(
            f"none of {', '.join(map(str, places))} has a manifest ({MANIFEST}); add the folder of rank 0's machine"
        )
    manifest = _load_manifest(source)
    path = out / source.name
    if path.exists():
        raise ArtifactError(f"a checkpoint {path} exists already; gather into another folder")
    scratch = _name_scratch(path)
    _remove_tree(scratch)
    scratch.mkdir(parents=True)
    parts = [folder if folder.name == source.name else folder / source.name for folder in places]
    whole = {name: part / name for part in parts for name in set(manifest.files) - absent_files(part, manifest)}
    for name in manifest.files:
        if name not in whole:
            raise ArtifactError(f"none of {', '.join(map(str, parts))} has a whole {name}; give the folder that does")
        _copy(whole[name], scratch / name)
    _commit(scratch, path, manifest)
    return path


class _Read(NamedTuple):
    """Shares of pieces that lie together in a file, and are read at once."""

    file: str
    begin: int
    end: int
    shares: list[Share]


def _group_reads(shares: Iterable[Share], manifest: Checkpoint) -> list[_Read]:
    def lies(share: Share) -> tuple[str, int]:
        piece = share.stored_in(manifest)
        return piece.file, piece.offset

    runs: list[_Read] = []
    for share in sorted(shares, key=lies):
        file, offset = lies(share)
        end = offset + share.stored_in(manifest).length
        last = runs[-1] if runs else _Read("", 0, 0, [])
        if file == last.file and offset <= last.end and end - last.begin <= _READ_BYTES:
            last.shares.append(share)
            runs[-1] = last._replace(end=max(last.end, end))
        else:
            runs.append(_Read(file, offset, end, [share]))
    return runs


def _read_piece(data: memoryview, name: str, stored: Stored, piece: StoredPiece) -> torch.Tensor:
    what = repr(name) if len(stored.pieces) == 1 else f"{name!r}, in the piece from {piece.start},"
    tensor = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    if not isinstance(tensor, torch.Tensor):
        raise ArtifactError(f"{what} is no tensor")
    actual = (_name_dtype(tensor), tuple(tensor.shape))
    if actual != (stored.dtype, piece.shape):
        raise ArtifactError(f"{what} has dtype and shape {actual}, and had {(stored.dtype, piece.shape)}")
    if piece.crc32 is not None and _compute_crc32(tensor) != piece.crc32:
        raise ArtifactError(f"the values of {what} have another checksum than when they were saved")
    return tensor


def _slice_within(box: Box, within: Box) -> tuple[slice, ...]:
    return tuple(slice(a.start - b.start, a.stop - b.start) for a, b in zip(box, within, strict=True))


def _name_dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _compute_crc32(tensor: torch.Tensor) -> int:
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
        self._last: tuple[AnyPath, int] | None = None
        self._locks: dict[AnyPath, FolderLock | RemoteLock] = {}
        self._apart: dict[AnyPath, list[bool]] = {}

    def begin(
        self,
        folder: AnyPath,
        manifest: Checkpoint,
        tensors: Mapping[str, torch.Tensor],
        keep: int | None,
        places: Mapping[str, tuple[Box, Sequence[int]]] | None = None,
    ) -> AnyPath:
        """Starts to write a checkpoint; all ranks call it. Returns its future path.

        Args:
            manifest: only rank 0's is written.
            tensors: must not be modified until `finish`.
            keep: complete checkpoints to keep; None keeps all.
            places: for tensors that are parts: which part, and the shape of the whole.

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
            except (ArtifactError, OSError) as error:
                failure = str(error)
        failure = broadcast_text(failure, self._group)
        if failure:
            raise ArtifactError(failure)
        scratch = _name_scratch(path)
        what = f"saving the checkpoint of minibatch {manifest.minibatches}"
        if folder not in self._apart:
            self._apart[folder] = [not sees for sees in ranks_that_see(folder, self._rank, self._group)]
        self._last = (path, manifest.minibatches)
        apart, any_apart = self._apart[folder][self._rank], any(self._apart[folder])
        if apart:
            folder.mkdir(parents=True, exist_ok=True)
            with suppress(FileNotFoundError):
                _set_aside(path)  # of a save that rank 0 did not finish, or a course that was left
            _remove_leftovers(folder, but=scratch)  # another rank of this machine may have begun
        if any_apart:
            self._wait_until_written(what, "", [])  # nobody may rename before all have cleared

        def write() -> None:
            failure = ""
            written: list[Any] = []
            try:
                written = _write_tensors(scratch / f"__{self._rank}_0.distcp", tensors, places or {})
            except Exception as error:
                failure = _summarise_error(system_error(error))
            try:
                rows = self._wait_until_written(what, failure, written)
            except _SaveError:
                if apart or self._rank == 0:  # nobody writes any more, and space may be what is missing
                    with suppress(OSError):
                        _remove_tree(scratch)
                raise
            if apart:
                with suppress(FileNotFoundError):  # another rank of this machine has done it
                    _move(scratch, path)
                _prune(folder, keep and keep + 1, parts=True)  # the oldest counts until rank 0 is done
            if any_apart:
                self._wait_until_written(what, "", [])
            if self._rank == 0:
                self._locks[folder].check()
                _commit(scratch, path, replace(manifest, **_merge_rows(rows)))
                _prune(folder, keep)

        # A daemon, because nothing may wait for it if another rank dies during the save.
        self._thread = threading.Thread(target=self._run, args=(write, folder, what), daemon=True)
        self._thread.start()
        return path

    def _wait_until_written(self, what: str, failure: str, written: list[Any]) -> list[Any]:
        """Waits for all ranks; returns what each has written, or raises the `_SaveError` of the first that failed."""
        rows = [json.loads(text) for text in gather_texts(json.dumps([failure, written]), self._group)]
        for rank, (failed, _) in enumerate(rows):
            if failed:
                raise _SaveError(rank, failed)
        return [pieces for _, pieces in rows]

    def _prepare(self, folder: AnyPath, path: AnyPath) -> None:
        """Locks the folder for this run, and removes what a killed save has left."""
        if folder not in self._locks:
            self._locks[folder] = RemoteLock(folder) if isinstance(folder, RemotePath) else FolderLock(folder)
        self._locks[folder].check()
        last, number = self._last or (None, 0)
        if last is not None and last.resolve().parent == folder.resolve():
            # Resumed from an older one: a later resume must not take those of the course that was left.
            for other in complete_checkpoints(folder):
                if (minibatches_of(other.name) or 0) > number:
                    _set_aside(other)
        if (path / MANIFEST if isinstance(path, RemotePath) else path).exists():
            raise ArtifactError(
                f"a checkpoint {path} exists already; resume from it (--resume), or save into another folder"
            )
        _remove_leftovers(folder)

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

    def loaded(self, path: AnyPath, minibatches: int) -> None:
        self._last = (path, minibatches)

    def _run(self, write: Callable[[], None], folder: AnyPath, what: str) -> None:
        try:
            if self._device.type == "cuda":
                # In a new thread GPU 0 is current, and torch copies tensors to the CPU, and waits for that, on the
                # current GPU's stream.
                torch.cuda.set_device(self._device)
            write()
        except WorkerError as error:
            self._failure = error
        except Exception as error:
            failed = error if isinstance(error, _SaveError) else _SaveError(self._rank, _summarise_error(error))
            self._failure = WorkerError(failed.rank, what, failed.cause, _advise_after_failure(folder))


class _SaveError(Exception):
    """A rank could not write its part."""

    def __init__(self, rank: int, cause: str) -> None:
        super().__init__(cause)
        self.rank = rank
        self.cause = cause


def _advise_after_failure(folder: AnyPath) -> str:
    newest = None
    with suppress(OSError, ArtifactError):
        newest = newest_checkpoint(folder)
    left = (
        f"there is no earlier checkpoint in {folder}"
        if newest is None
        else f"earlier checkpoints are intact ({newest})"
    )
    return f"{left}; free disk space or choose another folder, and resume"


def _write_tensors(
    path: AnyPath, tensors: Mapping[str, torch.Tensor], places: Mapping[str, tuple[Box, Sequence[int]]]
) -> list[tuple[Any, ...]]:
    """Writes pieces one after the other, each by `torch.save`.

    Returns for each piece the tensor's name, dtype and shape, and the fields of `StoredPiece`.
    """
    path.parent.mkdir(exist_ok=True)
    rows = []
    with path.open("wb") as file:
        for name, tensor in tensors.items():
            part = tensor.detach().cpu()
            box, shape = places.get(name, (tuple(map(range, part.shape)), part.shape))
            for piece in _split_into_pieces(part.shape, part.itemsize) if part.numel() or 0 in shape else ():
                values = part[_slice_within(piece, tuple(map(range, part.shape)))]
                if values.untyped_storage().nbytes() != values.nbytes:
                    values = _copy_tensor(values)  # the storage is what is written
                start = [whole[side.start] if side else 0 for whole, side in zip(box, piece, strict=True)]
                offset = file.tell()
                torch.save(values, file)
                length = file.tell() - offset
                place = start, tuple(values.shape), path.name, offset, length, _compute_crc32(values)
                rows.append((name, _name_dtype(part), tuple(shape), *place))
        _flush(path, file)
    return rows


def _copy_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a copy on the CPU that no other threads make, because training needs them."""
    plain = tensor.resolve_conj().resolve_neg()
    kind = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}.get(plain.itemsize)
    if kind is None:
        return plain.clone()
    return torch.from_numpy(plain.view(kind).numpy().copy()).view(tensor.dtype)


def _split_into_pieces(shape: Sequence[int], itemsize: int) -> list[Box]:
    """Returns the pieces in which a tensor is written: cut in half in each dimension in turn, where it is large."""
    counts = [1] * len(shape)
    while prod(shape) * itemsize > _PIECE_BYTES * prod(counts) and 2 * prod(counts) <= _MOST_PIECES:
        long = [at for at, size in enumerate(shape) if size >= max(4, 2 * counts[at])]
        if not long:
            break
        counts[min(long, key=counts.__getitem__)] *= 2
    every = [box_of(shape, range(len(shape)), counts, at) for at in product(*map(range, counts))]
    return [box for box in every if all(box) or 0 in shape]


def _merge_rows(rows: Iterable[Iterable[Any]]) -> dict[str, Any]:
    """Returns the manifest's tensors and files, from what the ranks have written; of equal pieces the first counts."""
    kinds: dict[str, tuple[str, tuple[int, ...]]] = {}
    pieces: dict[str, dict[tuple[int, ...], StoredPiece]] = {}
    sizes: dict[str, int] = {}
    for name, dtype, shape, start, *place in (piece_row for row in rows for piece_row in row):
        kinds.setdefault(name, (dtype, tuple(shape)))
        piece = StoredPiece(tuple(start), tuple(place[0]), *place[1:])
        pieces.setdefault(name, {}).setdefault(piece.start, piece)
        sizes[piece.file] = piece.offset + piece.length
    named = {piece.file for of_tensor in pieces.values() for piece in of_tensor.values()}
    tensors = {name: Stored(*kinds[name], tuple(pieces[name].values())) for name in sorted(pieces)}
    return {"tensors": tensors, "files": {file: sizes[file] for file in sorted(named)}}


def _commit(scratch: AnyPath, path: AnyPath, manifest: Checkpoint) -> None:
    (scratch / ".metadata").write_bytes(pickle.dumps(_make_metadata(manifest)))
    page = scratch / MANIFEST
    with page.open("wb") as file:
        file.write(manifest.to_json().encode() + b"\n")
        _flush(page, file)
    _move(scratch, path)
    if isinstance(path, Path):
        _flush_folder(path.parent)


def _flush(path: AnyPath, file: Any) -> None:
    if isinstance(path, Path):
        file.flush()
        os.fsync(file.fileno())


def _flush_folder(folder: Path) -> None:
    with suppress(OSError):  # not every file system lets a folder be flushed
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _name_scratch(path: AnyPath) -> AnyPath:
    """Returns the folder in which a checkpoint is written, and from which it is removed."""
    return path.with_name(f".{path.name}") if isinstance(path, Path) else path


def _remove_leftovers(folder: AnyPath, but: AnyPath | None = None) -> None:
    """Removes what killed saves have left."""
    if isinstance(folder, Path):
        left: Iterable[AnyPath] = folder.glob(f".{_PREFIX}*")
    else:
        left = set(_list_checkpoints(folder, parts=True)) - set(_list_checkpoints(folder))
    for leftover in left:
        if leftover != but:
            _remove_tree(leftover)


def _remove_tree(path: AnyPath) -> None:
    if isinstance(path, Path):
        shutil.rmtree(path, ignore_errors=True)
    else:
        (path / MANIFEST).unlink(missing_ok=True)  # first: without it the rest is no checkpoint
        path.remove_folder()


def _move(source: AnyPath, target: AnyPath) -> None:
    """Gives a folder another name, at once on disk."""
    if source == target:
        return
    if isinstance(source, Path):
        source.rename(str(target))
        return
    for file in source.glob("*"):
        _copy(file, target / file.name)
    _remove_tree(source)


def _copy(source: AnyPath, target: AnyPath) -> None:
    with source.open("rb") as reader, target.open("wb") as taken:
        shutil.copyfileobj(reader, taken, _COPIED_BYTES)


def _set_aside(path: AnyPath) -> None:
    replaced = path.with_name(f"{path.name}.replaced")
    _remove_tree(replaced)
    _move(path, replaced)


def _prune(folder: AnyPath, keep: int | None, *, parts: bool = False) -> None:
    """Removes the oldest; with `parts` also folders without a manifest."""
    for old in _list_checkpoints(folder, parts=parts)[: -keep if keep else 0]:
        doomed = _name_scratch(old)
        _move(old, doomed)
        _remove_tree(doomed)


def _make_metadata(manifest: Checkpoint) -> Metadata:
    """Returns what torch's distributed checkpoint keeps about the same tensors."""
    tensors, places = {}, {}
    for name, stored in manifest.tensors.items():
        chunks = [ChunkStorageMetadata(torch.Size(piece.start), torch.Size(piece.shape)) for piece in stored.pieces]
        properties = TensorProperties(dtype=getattr(torch, stored.dtype))
        tensors[name] = TensorStorageMetadata(properties, torch.Size(stored.shape), chunks)
        for number, piece in enumerate(stored.pieces):
            index = MetadataIndex(name, torch.Size(piece.start), number)
            places[index] = _StorageInfo(piece.file, piece.offset, piece.length)
    return Metadata(
        dict(tensors),
        planner_data={name: (name,) for name in tensors},
        storage_data=places,
        storage_meta=StorageMeta(),
        version=CURRENT_DCP_VERSION,
    )


def _summarise_error(error: BaseException) -> str:
    text = (str(error).strip().splitlines() or [repr(error)])[0]
    return f"{type(error).__name__}: {text}"


def _advise(path: AnyPath) -> str:
    """Names the newest other checkpoint whose manifest is intact; one before this, if there is one."""
    others = [other for other in complete_checkpoints(path.parent) if other.name != path.name]
    for other in sorted(others, key=lambda other: (other.name < path.name, other.name), reverse=True):
        try:
            _read_manifest(other)
        except ArtifactError:
            continue
        return f"resume from {other} (--resume {other})"
    return "its folder has no other checkpoint: start again"
