"""The folders of checkpoints: their names, their manifests, and how they are created and removed atomically.

A rank that does not see rank 0's folder has one of the same name on its machine, without a manifest, and renames it
before rank 0 does. On resuming, a rank gets what its machine lacks from a rank that has it.

An object store (`remote`) has no rename: files are written in their final place and the manifest last; it is removed
first. A folder without a manifest is left over from a killed save, and the next save removes it.

The manifest is JSON, and tensors are read with ``weights_only``, so a checkpoint cannot run code. ``.metadata``, for
torch's own tools, is a pickle and is never read here.
"""

import os
import pickle
import re
import shutil
import warnings
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch
import torch.distributed as dist

from pipedream.core.checkpoint import Checkpoint
from pipedream.core.errors import ArtifactError
from pipedream.runtime.checkpoint.object_store import AnyPath, RemotePath, any_path
from pipedream.runtime.comm.process_group import broadcast_text, gather_json, gather_texts

MANIFEST = "checkpoint.json"
"""Name of the file that describes a checkpoint; a folder without it is not a checkpoint."""

_PREFIX = "minibatch-"
_CHUNK_BYTES = 16 << 20  # at once


def name_folder(minibatches: int) -> str:
    """Returns the name of a checkpoint's folder, e.g. 'minibatch-00000091' after 91 minibatches."""
    return f"{_PREFIX}{minibatches:08d}"


def parse_minibatches(name: str) -> int | None:
    """Returns the number in the name of a checkpoint's folder."""
    match = re.fullmatch(rf"{_PREFIX}(\d+)", name)
    return int(match[1]) if match else None


def list_checkpoints(folder: AnyPath, *, parts: bool = False) -> list[AnyPath]:
    """Returns a folder's complete checkpoints, the oldest first; with `parts` also those without a manifest."""
    minibatches = {
        path: number
        for path in folder.glob(f"{_PREFIX}*")
        if (number := parse_minibatches(path.name)) is not None and (parts or (path / MANIFEST).is_file())
    }
    return sorted(minibatches, key=minibatches.__getitem__)


def find_newest_checkpoint(folder: str | os.PathLike[str] | RemotePath) -> AnyPath | None:
    """Returns a folder's newest complete checkpoint, or the folder if it is one itself, or None."""
    path = any_path(folder)
    if (path / MANIFEST).is_file():
        return path
    return next(reversed(list_checkpoints(path)), None)


def find_newest_of_all(newest_here: AnyPath | None, group: dist.ProcessGroup | None) -> AnyPath | None:
    """Returns the newest checkpoint found by any rank; every rank calls it.

    Without a shared folder, only the machine that ran rank 0 during the save has the manifest.
    """
    number = -1 if newest_here is None else (parse_minibatches(newest_here.resolve().name) or 0)
    newest, path = max(gather_json([number, str(newest_here)], group), key=lambda row: int(row[0]))
    return any_path(path) if newest >= 0 else None


def warn_of_unfinished(path: AnyPath, requested: AnyPath, rank: int) -> None:
    """Warns at rank 0 if a folder's newest checkpoint was passed over because it has no manifest."""
    if rank or path.resolve() == requested.resolve():
        return
    number = parse_minibatches(path.name) or 0
    for other in list_checkpoints(path.parent, parts=True):
        if (parse_minibatches(other.name) or 0) > number:
            warnings.warn(
                f"{other.name} is newer than {path}, but has no {MANIFEST} (a save that was not finished, or the file "
                f"was lost); {path.name} is taken",
                stacklevel=4,
            )


def read_manifest(path: AnyPath) -> Checkpoint:
    """Reads a manifest; raises an `ArtifactError` if it or a file is missing or damaged."""
    try:
        return _read_manifest(path)
    except ArtifactError as error:
        raise ArtifactError(f"{error}; {advise_other(path)}") from None


def read_shared_manifest(path: AnyPath, group: dist.ProcessGroup | None) -> tuple[Checkpoint, dict[str, int]]:
    """Reads a manifest that some ranks see, whose files may be on different machines; every rank calls it.

    Returns the manifest, and for each file the first rank that has all of it.

    Raises:
        ArtifactError: the same on every rank: see `read_manifest`.
    """
    manifest_file = path / MANIFEST
    try:
        text = manifest_file.read_text(encoding="utf-8") if manifest_file.is_file() else ""
    except (OSError, UnicodeDecodeError) as error:
        text = str(error)  # not JSON, so it is refused below
    text = next(filter(None, gather_texts(text, group)), "")
    try:
        manifest = Checkpoint.from_json(text, str(manifest_file))
    except ArtifactError as error:
        raise ArtifactError(f"{error}; {advise_other(path)}") from None
    rows = gather_json(find_file_problems(path, manifest), group)
    ranks_by_file = {name: [rank for rank, row in enumerate(rows) if name not in row] for name in manifest.files}
    for name, ranks in ranks_by_file.items():
        if not ranks:
            advice = broadcast_text(advise_other(path), group)
            raise ArtifactError(f"the checkpoint {path} {rows[0][name]}; {advice}")
    return manifest, {name: ranks[0] for name, ranks in ranks_by_file.items()}


def find_ranks_that_see(folder: AnyPath, rank: int, group: dist.ProcessGroup | None) -> list[bool]:
    """Returns for each rank whether it sees the existing folder of rank 0; every rank calls it.

    Raises:
        ArtifactError: the same on every rank: rank 0 cannot write into it, or it is a URL that a rank does not see.
    """
    marker, token, failure = folder / ".shared", uuid4().hex, ""
    if rank == 0:
        try:
            marker.write_text(token, encoding="utf-8")
        except OSError as error:
            failure = f"cannot write into the folder {folder}: {error}; choose another one"
    token, failure = gather_json([token, failure], group)[0]
    if failure:
        raise ArtifactError(failure)
    is_seen, error_text = False, "another file is there"
    try:
        is_seen = marker.read_text(encoding="utf-8") == token
    except OSError as error:
        error_text = str(error)
    problems = gather_texts("" if is_seen else error_text, group)
    if rank == 0:
        marker.unlink(missing_ok=True)
    for other, problem in enumerate(problems):
        if problem and isinstance(folder, RemotePath):
            raise ArtifactError(
                f"rank {other} does not see what rank 0 has written into {folder} ({problem}); give a store that all "
                "machines reach, with the same credentials"
            )
    return [not problem for problem in problems]


def _read_manifest(path: AnyPath) -> Checkpoint:
    manifest = _load_manifest(path)
    for problem in find_file_problems(path, manifest).values():
        raise ArtifactError(f"the checkpoint {path} {problem}")
    return manifest


def _load_manifest(path: AnyPath) -> Checkpoint:
    manifest_file = path / MANIFEST
    try:
        text = manifest_file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ArtifactError(f"cannot read the Checkpoint in {manifest_file}: {error}") from None
    return Checkpoint.from_json(text, str(manifest_file))


def find_file_problems(path: AnyPath, manifest: Checkpoint) -> dict[str, str]:
    """Returns name -> what is wrong, for files that are missing or incomplete on this machine."""
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


def gather_parts(folders: Iterable[AnyPath], out: AnyPath) -> AnyPath:
    """Makes one checkpoint in the folder `out` from the parts on machines without a shared folder.

    Args:
        folders: folders with checkpoints; the newest manifest in them counts.

    Raises:
        ArtifactError: no folder has a manifest, a file is missing or damaged, or `out` has this checkpoint.
    """
    part_folders = list(folders)
    checkpoints = [path for path in map(find_newest_checkpoint, part_folders) if path is not None]
    source = max(checkpoints, key=lambda path: path.name, default=None)
    if source is None:
        raise ArtifactError(
            f"none of {', '.join(map(str, part_folders))} has a manifest ({MANIFEST}); add the folder of rank 0's "
            "machine"
        )
    manifest = _load_manifest(source)
    path = out / source.name
    if path.exists():
        raise ArtifactError(f"a checkpoint {path} exists already; gather into another folder")
    scratch = name_scratch(path)
    remove_tree(scratch)
    scratch.mkdir(parents=True)
    parts = [folder if folder.name == source.name else folder / source.name for folder in part_folders]
    complete_files = {
        name: part / name
        for part in parts
        for name in manifest.files.keys() - find_file_problems(part, manifest).keys()
    }
    for name in manifest.files:
        if name not in complete_files:
            raise ArtifactError(f"none of {', '.join(map(str, parts))} has a whole {name}; give the folder that does")
        _copy_file(complete_files[name], scratch / name)
    commit(scratch, path, manifest)
    return path


def commit(scratch: AnyPath, path: AnyPath, manifest: Checkpoint) -> None:
    """Adds manifest and metadata to a written folder, and gives it its name."""
    (scratch / ".metadata").write_bytes(pickle.dumps(_make_metadata(manifest)))
    manifest_file = scratch / MANIFEST
    with manifest_file.open("wb") as file:
        file.write(manifest.to_json().encode() + b"\n")
        flush(manifest_file, file)
    move(scratch, path)
    if isinstance(path, Path):
        _flush_folder(path.parent)


def flush(path: AnyPath, file: Any) -> None:
    """Waits until a file is on disk; in an object store it is safe once closed."""
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


def name_scratch(path: AnyPath) -> AnyPath:
    """Returns the folder in which a checkpoint is written, and which it is renamed to before it is removed."""
    return path.with_name(f".{path.name}") if isinstance(path, Path) else path


def remove_leftovers(folder: AnyPath, except_for: AnyPath | None = None) -> None:
    """Removes what killed saves have left."""
    if isinstance(folder, Path):
        leftovers: Iterable[AnyPath] = folder.glob(f".{_PREFIX}*")
    else:
        leftovers = set(list_checkpoints(folder, parts=True)) - set(list_checkpoints(folder))
    for leftover in leftovers:
        if leftover != except_for:
            remove_tree(leftover)


def remove_tree(path: AnyPath) -> None:
    """Removes a folder; in an object store, its manifest first."""
    if isinstance(path, Path):
        shutil.rmtree(path, ignore_errors=True)
    else:
        (path / MANIFEST).unlink(missing_ok=True)  # first: without it the rest is no checkpoint
        path.remove_folder()


def move(source: AnyPath, target: AnyPath) -> None:
    """Renames a folder; on disk this is atomic."""
    if source == target:
        return
    if isinstance(source, Path):
        source.rename(str(target))
        return
    for file in source.glob("*"):
        _copy_file(file, target / file.name)
    remove_tree(source)


def _copy_file(source: AnyPath, target: AnyPath) -> None:
    with source.open("rb") as reader, target.open("wb") as writer:
        shutil.copyfileobj(reader, writer, _CHUNK_BYTES)


def set_aside(path: AnyPath) -> None:
    """Renames a checkpoint so that it is not resumed from."""
    replaced = path.with_name(f"{path.name}.replaced")
    remove_tree(replaced)
    move(path, replaced)


def prune(folder: AnyPath, keep: int | None, *, parts: bool = False) -> None:
    """Removes the oldest checkpoints; with `parts` also folders without a manifest."""
    for old in list_checkpoints(folder, parts=parts)[: -keep if keep else 0]:
        scratch = name_scratch(old)
        move(old, scratch)
        remove_tree(scratch)


def _make_metadata(manifest: Checkpoint) -> object:
    """Returns the metadata of torch's distributed checkpoint for the same tensors."""
    # Imported here: it takes a tenth of a second, which only rank 0 spends, and imports the elastic agent.
    from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION, _StorageInfo
    from torch.distributed.checkpoint.metadata import (
        ChunkStorageMetadata,
        Metadata,
        MetadataIndex,
        StorageMeta,
        TensorProperties,
        TensorStorageMetadata,
    )

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


def summarise_error(error: BaseException) -> str:
    """Returns an error in one line."""
    text = (str(error).strip().splitlines() or [repr(error)])[0]
    return f"{type(error).__name__}: {text}"


def advise_other(path: AnyPath) -> str:
    """Suggests the newest other checkpoint with an intact manifest, preferably one before `path`."""
    others = [other for other in list_checkpoints(path.parent) if other.name != path.name]
    for other in sorted(others, key=lambda other: (other.name < path.name, other.name), reverse=True):
        try:
            _read_manifest(other)
        except ArtifactError:
            continue
        return f"resume from {other} (--resume {other})"
    return "its folder has no other checkpoint: start again"
