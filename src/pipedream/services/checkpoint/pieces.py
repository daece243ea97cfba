"""Tensors of a checkpoint, written and read in pieces.

With pieces, a rank that shards a tensor differently reads little that it does not need. The manifest has a checksum of
each piece, of the values in memory, which covers the disk, the file format and the manifest's offsets. CRC-32 finds all
damage within 32 bits, and other damage with probability 1 - 2^-32; zlib's is the fastest hash of the standard library
(2 GiB/s, BLAKE2b 0.7). It does not protect against someone who changes both file and manifest.
"""

import io
import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import product
from math import prod
from typing import IO, Any, NamedTuple

import torch

from pipedream.core.box import Box, box_of, overlap, slice_of, slice_within
from pipedream.core.checkpoint import Checkpoint, Stored, StoredPiece
from pipedream.core.errors import ArtifactError
from pipedream.runtime.comm.values import compute_crc32
from pipedream.services.checkpoint.folders import (
    advise_other,
    check_names,
    read_manifest,
    summarise_error,
)
from pipedream.services.checkpoint.stores.store import CheckpointStore

_READ_BYTES = 64 << 20  # of several pieces at once, at most
_PIECE_BYTES = 1 << 20
_MAX_PIECES = 64  # of what one rank has of a tensor


class Share(NamedTuple):
    """The part of a piece that is read.

    Attributes:
        number: the piece's number in its tensor.
        box: in the tensor's indices.
    """

    name: str
    number: int
    box: Box

    def stored_in(self, manifest: Checkpoint) -> StoredPiece:
        return manifest.tensors[self.name].pieces[self.number]


def list_shares(manifest: Checkpoint, boxes: Mapping[str, Box]) -> list[Share]:
    """Returns the shares that make up parts of tensors; `boxes` has the part of each tensor."""
    return [
        Share(name, number, common)
        for name, box in boxes.items()
        for number, piece in enumerate(manifest.tensors[name].pieces)
        if (common := box if box == piece.box else overlap(box, piece.box)) is not None
    ]


def make_empty(dtype: str, box: Box) -> torch.Tensor:
    """Returns a part of a tensor without its values. Raises an `ArtifactError` if torch has no such dtype."""
    torch_dtype = getattr(torch, dtype, None)
    if not isinstance(torch_dtype, torch.dtype):
        raise ArtifactError(f"a tensor of the checkpoint has the dtype {dtype}, which torch does not have")
    return torch.empty([len(side) for side in box], dtype=torch_dtype)


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
        tensors[name][slice_within(box, boxes[name])] = values
    for name in boxes.keys() - tensors.keys():  # those without values
        tensors[name] = make_empty(manifest.tensors[name].dtype, boxes[name])
    return {name: tensors[name] for name in boxes}


def read_tensors(checkpoint: CheckpointStore, manifest: Checkpoint, names: Iterable[str]) -> dict[str, torch.Tensor]:
    """Reads whole tensors; raises an `ArtifactError` if it cannot, or one is damaged."""
    wanted_names = list(names)
    check_names(checkpoint, manifest, wanted_names)
    boxes = {name: tuple(map(range, manifest.tensors[name].shape)) for name in wanted_names}
    return assemble(manifest, boxes, read_shares(checkpoint, manifest, list_shares(manifest, boxes)))


def read_shares(
    checkpoint: CheckpointStore, manifest: Checkpoint, shares: Iterable[Share]
) -> Iterator[tuple[Share, torch.Tensor]]:
    """Yields shares with their values, in the order of the files; reads no other pieces.

    Raises:
        ArtifactError: a file cannot be read, or a piece is damaged.
    """
    try:
        for group in _group_reads(shares, manifest):
            with checkpoint.open(group.file) as file:
                file.seek(group.begin)
                data = memoryview(file.read(group.end - group.begin))
            for share in group.shares:
                stored, piece = manifest.tensors[share.name], share.stored_in(manifest)
                begin = piece.offset - group.begin
                values = _read_piece(data[begin : begin + piece.length], share.name, stored, piece)
                yield share, values if share.box == piece.box else values[slice_within(share.box, piece.box)].clone()
    except ArtifactError as error:
        raise ArtifactError(f"the checkpoint {checkpoint} is damaged: {error}; {advise_other(checkpoint)}") from None
    except pickle.UnpicklingError as error:  # torch's advice would be to run what is in the file
        what = f"{type(error).__name__}: a tensor's bytes are not as torch writes them"
        raise ArtifactError(f"the checkpoint {checkpoint} cannot be read: {what}; {advise_other(checkpoint)}") from None
    except Exception as error:
        raise ArtifactError(
            f"the checkpoint {checkpoint} cannot be read: {summarise_error(error)}; {advise_other(checkpoint)}"
        ) from None


def verify_checkpoint(checkpoint: CheckpointStore) -> Checkpoint:
    """Reads all of a checkpoint, tensor by tensor; raises an `ArtifactError` if it is damaged."""
    manifest = read_manifest(checkpoint)
    for name in manifest.tensors:
        read_tensors(checkpoint, manifest, [name])
    return manifest


class _Read(NamedTuple):
    """Shares whose pieces are adjacent in a file, and are read at once."""

    file: str
    begin: int
    end: int
    shares: list[Share]


def _group_reads(shares: Iterable[Share], manifest: Checkpoint) -> list[_Read]:
    def locate(share: Share) -> tuple[str, int]:
        piece = share.stored_in(manifest)
        return piece.file, piece.offset

    reads: list[_Read] = []
    for share in sorted(shares, key=locate):
        file, offset = locate(share)
        end = offset + share.stored_in(manifest).length
        last = reads[-1] if reads else _Read("", 0, 0, [])
        if file == last.file and offset <= last.end and end - last.begin <= _READ_BYTES:
            last.shares.append(share)
            reads[-1] = last._replace(end=max(last.end, end))
        else:
            reads.append(_Read(file, offset, end, [share]))
    return reads


def _read_piece(data: memoryview, name: str, stored: Stored, piece: StoredPiece) -> torch.Tensor:
    description = repr(name) if len(stored.pieces) == 1 else f"{name!r}, in the piece from {piece.start},"
    tensor = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    if not isinstance(tensor, torch.Tensor):
        raise ArtifactError(f"{description} is no tensor")
    actual = (_name_dtype(tensor), tuple(tensor.shape))
    if actual != (stored.dtype, piece.shape):
        raise ArtifactError(f"{description} has dtype and shape {actual}, and had {(stored.dtype, piece.shape)}")
    if compute_crc32(tensor) != piece.crc32:
        raise ArtifactError(f"the values of {description} have another checksum than when they were saved")
    return tensor


def _name_dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def copy_for_writing(tensors: Mapping[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], Callable[[], None] | None]:
    """Returns copies on the CPU, and a function that waits until they are complete, or None.

    A GPU copies into pinned memory before it runs later work, so the host need not wait, and copies take no GPU memory.
    The pinned memory is reused for the next copies.
    """
    copies = {name: _copy_to_pinned(tensor) if tensor.is_cuda else tensor.clone() for name, tensor in tensors.items()}
    if not any(tensor.is_cuda for tensor in tensors.values()):
        return copies, None
    copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
    copied.record()
    return copies, copied.synchronize


def _copy_to_pinned(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(tensor, device="cpu", pin_memory=True).copy_(tensor.detach(), non_blocking=True)


def write_tensors(
    file: IO[bytes],
    file_name: str,
    tensors: Mapping[str, torch.Tensor],
    slices: Mapping[str, tuple[Box, Sequence[int]]],
) -> list[tuple[Any, ...]]:
    """Writes pieces one after the other, each by `torch.save`.

    Returns for each piece the tensor's name, dtype and shape, and the fields of `StoredPiece`.
    """
    rows = []
    for name, tensor in tensors.items():
        part = tensor.detach().cpu()
        box, shape = slices.get(name, (tuple(map(range, part.shape)), part.shape))
        for piece in _split_into_pieces(part.shape, part.itemsize) if part.numel() or 0 in shape else ():
            values = part[slice_of(piece)]
            if values.untyped_storage().nbytes() != values.nbytes:
                values = _copy_tensor(values)  # the storage is what is written
            start = [outer[side.start] if side else 0 for outer, side in zip(box, piece, strict=True)]
            offset = file.tell()
            torch.save(values, file)
            length = file.tell() - offset
            fields = start, tuple(values.shape), file_name, offset, length, compute_crc32(values)
            rows.append((name, _name_dtype(part), tuple(shape), *fields))
    return rows


def _copy_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a copy on the CPU, made by this thread alone, to leave torch's other threads to training."""
    plain = tensor.resolve_conj().resolve_neg()
    integer_dtype = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}.get(plain.itemsize)
    if integer_dtype is None:
        return plain.clone()
    return torch.from_numpy(plain.view(integer_dtype).numpy().copy()).view(tensor.dtype)


def _split_into_pieces(shape: Sequence[int], itemsize: int) -> list[Box]:
    """Returns the pieces of a tensor, halved in one dimension after the other while pieces are large."""
    counts = [1] * len(shape)
    while prod(shape) * itemsize > _PIECE_BYTES * prod(counts) and 2 * prod(counts) <= _MAX_PIECES:
        divisible = [dim for dim, size in enumerate(shape) if size >= max(4, 2 * counts[dim])]
        if not divisible:
            break
        counts[min(divisible, key=counts.__getitem__)] *= 2
    boxes = [box_of(shape, range(len(shape)), counts, index) for index in product(*map(range, counts))]
    return [box for box in boxes if all(box) or 0 in shape]


def merge_rows(rows: Iterable[Iterable[Any]]) -> dict[str, Any]:
    """Returns the manifest's tensors and files, from the ranks' rows; of equal pieces the first counts."""
    kinds: dict[str, tuple[str, tuple[int, ...]]] = {}
    pieces: dict[str, dict[tuple[int, ...], StoredPiece]] = {}
    sizes: dict[str, int] = {}
    for name, dtype, shape, start, *rest in (piece_row for row in rows for piece_row in row):
        kinds.setdefault(name, (dtype, tuple(shape)))
        piece = StoredPiece(tuple(start), tuple(rest[0]), *rest[1:])
        pieces.setdefault(name, {}).setdefault(piece.start, piece)
        sizes[piece.file] = piece.offset + piece.length
    files = {piece.file for of_tensor in pieces.values() for piece in of_tensor.values()}
    tensors = {name: Stored(*kinds[name], tuple(pieces[name].values())) for name in sorted(pieces)}
    return {"tensors": tensors, "files": {file: sizes[file] for file in sorted(files)}}
