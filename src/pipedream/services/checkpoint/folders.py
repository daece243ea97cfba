"""The checkpoints in a store: their manifests, and which one is the newest. Each is a store of files itself.

A rank that does not see rank 0's folder has a checkpoint of the same name on its machine, without a manifest, and
commits it before rank 0 does. On resuming, a rank gets what its machine lacks from a rank that has it.

The manifest is JSON, and tensors are read with ``weights_only``, so a checkpoint cannot run code. ``.metadata``, for
torch's own tools, is a pickle and is never read here.
"""

import pickle
import shutil
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from uuid import uuid4

import torch
import torch.distributed as dist

from pipedream.core.checkpoint import Checkpoint
from pipedream.core.errors import ArtifactError
from pipedream.runtime.comm.process_group import broadcast_text, gather_json, gather_texts
from pipedream.services.checkpoint.stores import Folder, open_store
from pipedream.services.checkpoint.stores.store import COPY_BYTES, MANIFEST, CheckpointStore


def list_checkpoints(folder: Folder, *, parts: bool = False) -> list[CheckpointStore]:
    """Returns a store's complete checkpoints, the oldest first; with `parts` also those without a manifest."""
    store = open_store(folder)
    checkpoints = map(store.within, store.names())
    return [checkpoint for checkpoint in checkpoints if parts or checkpoint.has_file(MANIFEST)]


def find_newest_checkpoint(folder: Folder) -> CheckpointStore | None:
    """Returns a store's newest complete checkpoint, or the folder if it is one itself, or None."""
    store = open_store(folder)
    if store.has_file(MANIFEST):
        return store
    return next(reversed(list_checkpoints(store)), None)


def find_newest_of_all(newest_here: CheckpointStore | None, group: dist.ProcessGroup | None) -> CheckpointStore | None:
    """Returns the newest checkpoint found by any rank; every rank calls it.

    Without a shared folder, only the machine that ran rank 0 during the save has the manifest.
    """
    number = -1 if newest_here is None else newest_here.minibatches
    newest, address = max(gather_json([number, str(newest_here)], group), key=lambda row: int(row[0]))
    return open_store(address) if newest >= 0 else None


def warn_of_unfinished(checkpoint: CheckpointStore, requested: CheckpointStore, rank: int) -> None:
    """Warns at rank 0 if a store's newest checkpoint was passed over because it has no manifest."""
    if rank or checkpoint == requested:
        return
    for other in list_checkpoints(checkpoint.above(), parts=True):
        if other.minibatches > checkpoint.minibatches:
            warnings.warn(
                f"{other.name} is newer than {checkpoint}, but has no {MANIFEST} (a save that was not finished, or the "
                f"file was lost); {checkpoint.name} is taken",
                stacklevel=4,
            )


def read_manifest(checkpoint: CheckpointStore) -> Checkpoint:
    """Reads a manifest; raises an `ArtifactError` if it or a file is missing or damaged."""
    return read_shared_manifest(checkpoint, None)[0]


def read_shared_manifest(
    checkpoint: CheckpointStore, group: dist.ProcessGroup | None
) -> tuple[Checkpoint, dict[str, int]]:
    """Reads a manifest that some ranks see, whose files may be on different machines; every rank calls it.

    Returns the manifest, and for each file the first rank that has all of it.

    Raises:
        ArtifactError: the same on every rank: see `read_manifest`.
    """
    try:
        return _read_and_check(checkpoint, group)
    except ArtifactError as error:
        raise ArtifactError(f"{error}; {broadcast_text(advise_other(checkpoint), group)}") from None


def _read_and_check(checkpoint: CheckpointStore, group: dist.ProcessGroup | None) -> tuple[Checkpoint, dict[str, int]]:
    manifest = _load_manifest(checkpoint, group)
    rows = gather_json(find_file_problems(checkpoint, manifest), group)
    ranks_by_file = {name: [rank for rank, row in enumerate(rows) if name not in row] for name in manifest.files}
    for name, ranks in ranks_by_file.items():
        if not ranks:
            raise ArtifactError(f"the checkpoint {checkpoint} {rows[0][name]}")
    return manifest, {name: ranks[0] for name, ranks in ranks_by_file.items()}


def _load_manifest(checkpoint: CheckpointStore, group: dist.ProcessGroup | None = None) -> Checkpoint:
    """Reads the manifest of the first rank that sees it."""
    manifest_file, text, failure = checkpoint.locate(MANIFEST), "", ""
    try:
        text = checkpoint.read_text(MANIFEST)
    except (OSError, UnicodeDecodeError) as error:
        failure = str(error)
    rows = gather_json([text, failure], group)
    text = next((text for text, _ in rows if text), "")
    if not text and rows[0][1]:
        raise ArtifactError(f"cannot read the Checkpoint in {manifest_file}: {rows[0][1]}")
    return Checkpoint.from_json(text, str(manifest_file))


@contextmanager
def failing_together(group: dist.ProcessGroup | None, *kinds: type[Exception]) -> Iterator[None]:
    """Context of what may fail at some ranks: then every rank raises the first failure, as an `ArtifactError`."""
    failure = ""
    try:
        yield
    except kinds as error:
        failure = str(error)
    if failures := [text for text in gather_texts(failure, group) if text]:
        raise ArtifactError(failures[0])


def find_ranks_that_see(store: CheckpointStore, rank: int, group: dist.ProcessGroup | None) -> list[bool]:
    """Returns for each rank whether it sees the existing folder of rank 0; every rank calls it.

    Raises:
        ArtifactError: the same on every rank: rank 0 cannot write into it, a rank does not see a store that is not on
            disk, or has another folder, as with a time in its name.
    """
    marker, token, failure = ".shared", uuid4().hex, ""
    if rank == 0:
        try:
            with store.create(marker) as file:
                file.write(token.encode())
        except OSError as error:
            failure = f"cannot write into the folder {store}: {error}; choose another one"
    token, failure = gather_json([token, failure], group)[0]
    if failure:
        raise ArtifactError(failure)
    is_seen, error_text = False, "another file is there"
    try:
        is_seen = store.read_text(marker) == token
    except OSError as error:
        error_text = str(error)
    problems, addresses = gather_texts("" if is_seen else error_text, group), gather_texts(str(store), group)
    if rank == 0:
        with suppress(FileNotFoundError):
            store.delete(marker)
    for other, problem in enumerate(problems):
        if problem and not store.on_disk:
            raise ArtifactError(
                f"rank {other} does not see what rank 0 has written into {store} ({problem}); give a store that all "
                "machines reach, with the same credentials"
            )
        if problem and addresses[other] != addresses[0]:
            raise ArtifactError(
                f"rank 0 was given the folder {addresses[0]}, but rank {other} {addresses[other]}; give every rank the "
                "same one"
            )
    return [not problem for problem in problems]


def find_file_problems(checkpoint: CheckpointStore, manifest: Checkpoint) -> dict[str, str]:
    """Returns name -> what is wrong, for files that are missing or incomplete on this machine."""
    problems = {}
    for name, size in manifest.files.items():
        if checkpoint.is_link(name):
            problems[name] = (
                f"is not read: its {name} is a link, which may lead to any file; put a copy of the file in its place"
            )
            continue
        try:
            size_here = checkpoint.read_size(name)
        except OSError as error:
            problems[name] = f"is damaged: {error}"
            continue
        if size_here != size:
            problems[name] = f"is damaged: {name} has {size_here} bytes, and had {size} when it was saved"
    return problems


def check_names(checkpoint: CheckpointStore, manifest: Checkpoint, names: Iterable[str]) -> None:
    """Raises an `ArtifactError` if a tensor is not in the checkpoint."""
    for name in names:
        if name not in manifest.tensors:
            raise ArtifactError(
                f"the checkpoint {checkpoint} has no tensor {name!r}; it is of another model or optimizer"
            )


def gather_parts(folders: Iterable[Folder], out: Folder) -> CheckpointStore:
    """Makes one checkpoint in the store `out` from the parts on machines without a shared folder.

    Args:
        folders: stores with checkpoints; the newest manifest in them counts.

    Raises:
        ArtifactError: none has a manifest, a file is missing or damaged, or `out` has this checkpoint.
    """
    stores = list(map(open_store, folders))
    checkpoints = [checkpoint for checkpoint in map(find_newest_checkpoint, stores) if checkpoint is not None]
    source = max(checkpoints, key=lambda checkpoint: checkpoint.name, default=None)
    if source is None:
        raise ArtifactError(
            f"none of {', '.join(map(str, stores))} has a manifest ({MANIFEST}); add the folder of rank 0's machine"
        )
    manifest = _load_manifest(source)
    out_store = open_store(out)
    gathered = out_store.within(source.name)
    if out_store.exists(source.name):
        raise ArtifactError(f"a checkpoint {gathered} exists already; gather into another folder")
    out_store.make_folder()
    out_store.abandon(source.name)
    parts = [store if store.name == source.name else store.within(source.name) for store in stores]
    complete = {name: part for part in parts for name in manifest.files.keys() - find_file_problems(part, manifest)}
    for name in manifest.files:
        if name not in complete:
            raise ArtifactError(f"none of {', '.join(map(str, parts))} has a whole {name}; give the folder that does")
        with complete[name].open(name) as reader, out_store.write(source.name, name) as writer:
            shutil.copyfileobj(reader, writer, COPY_BYTES)
    commit(out_store, source.name, manifest)
    return gathered


def commit(store: CheckpointStore, name: str, manifest: Checkpoint) -> None:
    """Adds metadata and manifest to a checkpoint's written files, and makes it visible."""
    with store.write(name, ".metadata") as file:
        file.write(pickle.dumps(_make_metadata(manifest)))
    with store.write(name, MANIFEST) as file:
        file.write(manifest.to_json().encode() + b"\n")
    store.commit(name)


def remove_leftovers(store: CheckpointStore, except_for: str = "") -> None:
    """Removes what killed saves have left, except for a checkpoint that another rank may have begun."""
    for name in store.list_leftovers():
        if name != except_for:
            store.abandon(name)


def prune(store: CheckpointStore, keep: int | None, *, parts: bool = False) -> None:
    """Removes the oldest checkpoints; with `parts` also those without a manifest."""
    for checkpoint in list_checkpoints(store, parts=parts)[: -keep if keep else 0]:
        store.remove(checkpoint.name)


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


def advise_other(checkpoint: CheckpointStore) -> str:
    """Suggests the newest other checkpoint with an intact manifest, preferably an older one."""
    others = [other for other in list_checkpoints(checkpoint.above()) if other.name != checkpoint.name]
    for other in sorted(others, key=lambda other: (other.name < checkpoint.name, other.name), reverse=True):
        try:
            _read_and_check(other, None)
        except ArtifactError:
            continue
        return f"resume from {other} (--resume {other})"
    return "its folder has no other checkpoint: start again"
