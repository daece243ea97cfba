"""Tensors in pieces: whatever ranks write parts, any part can be read, and little else is."""

import io
import json
import tempfile
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from hypothesis import given, settings, strategies as st

import pipedream as pd
from pipedream.core.box import Box, box_of
from pipedream.core.checkpoint import Checkpoint, ParameterGroup, SavedStage
from pipedream.services.checkpoint import folders, pieces, stores
from tests.services.checkpoint.saving import load, read, save, write

BYTES = 512
"""In place of the size of a piece in a real run."""


def cuts(dimensions: int) -> st.SearchStrategy[tuple[list[int | None], list[int]]]:
    """Draws placements, of which no two cut one dimension, and the sizes of a mesh."""
    pair = st.tuples(st.sampled_from([None, *range(dimensions)]), st.integers(1, 4))
    pairs = st.lists(pair, max_size=2, unique_by=lambda pair: object() if pair[0] is None else pair[0])
    return pairs.map(lambda pairs: ([at for at, _ in pairs], [size for _, size in pairs]))


def boxes(shape: tuple[int, ...], placements: list[int | None], sizes: list[int]) -> list[Box]:
    """Returns the different parts that a mesh makes of a tensor."""
    every = torch.cartesian_prod(*map(torch.arange, sizes)).reshape(-1, len(sizes)) if sizes else torch.empty(1, 0)
    return list(dict.fromkeys(box_of(shape, placements, sizes, [int(i) for i in row]) for row in every))


def written(folder: Path, tensors: dict[str, torch.Tensor], parts: dict[str, list[Box]]) -> Checkpoint:
    """Writes parts of tensors, the n-th part of each as rank n; returns the manifest."""
    rows = []
    for rank in range(max(map(len, parts.values()))):
        tensors_here = {name: tensors[name][_slices(of[rank])] for name, of in parts.items() if rank < len(of)}
        places = {name: (parts[name][rank], tensors[name].shape) for name in tensors_here}
        with (folder / f"__{rank}_0.distcp").open("wb") as file:
            rows.append(pieces.write_tensors(file, f"__{rank}_0.distcp", tensors_here, places))
    progress = {"seed": 0, "minibatches": 0, "epoch": 0, "epoch_batches": 0, "drains": (0,)}
    how = {"plan": pd.Plan.uniform(1, 1.0, 1.0, 0.0), "schedule": "pipedream", "microbatches": 1}
    return Checkpoint(stages=(SavedStage((ParameterGroup((), {}),)),), **progress, **how, **pieces.merge_rows(rows))


def _slices(box: Box) -> tuple[slice, ...]:
    return tuple(slice(side.start, side.stop) for side in box)


@settings(deadline=None)
@given(data=st.data())
def test_any_part_of_what_any_mesh_wrote_is_read(data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(0, 24), max_size=3)))
    tensor = torch.randn(shape)
    with tempfile.TemporaryDirectory() as scratch, pytest.MonkeyPatch.context() as patch:
        patch.setattr(pieces, "_PIECE_BYTES", BYTES)
        patch.setattr(pieces, "_READ_BYTES", data.draw(st.sampled_from([1, 5000, 1 << 26])))
        folder = Path(scratch)
        manifest = written(folder, {"model/a": tensor}, {"model/a": boxes(shape, *data.draw(cuts(len(shape))))})
        manifest = Checkpoint.from_json(manifest.to_json())
        for box in boxes(shape, *data.draw(cuts(len(shape)))):
            part_boxes = {"model/a": box}
            shares = pieces.read_shares(stores.open_store(folder), manifest, pieces.list_shares(manifest, part_boxes))
            part = pieces.assemble(manifest, part_boxes, shares)["model/a"]
            assert part.dtype == tensor.dtype
            assert torch.equal(part, tensor[_slices(box)])
        assert torch.equal(pieces.read_tensors(stores.open_store(folder), manifest, ["model/a"])["model/a"], tensor)


def test_little_is_read_that_is_not_wanted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks of a mesh of four read a weight that one rank wrote, cut in either dimension."""
    monkeypatch.setattr(pieces, "_PIECE_BYTES", 1 << 14)
    tensor = torch.randn(256, 512)
    manifest = written(tmp_path, {"model/a": tensor}, {"model/a": [tuple(map(range, tensor.shape))]})
    monkeypatch.setattr(Path, "open", lambda path, mode: Counted(path, mode))
    for dimension in (0, 1):
        for box in boxes(tuple(tensor.shape), [dimension], [4]):
            Counted.sizes.clear()
            list(
                pieces.read_shares(
                    stores.open_store(tmp_path), manifest, pieces.list_shares(manifest, {"model/a": box})
                )
            )
            assert tensor.nbytes // 4 < sum(Counted.sizes) < 1.1 * tensor.nbytes / 4
            assert dimension or len(Counted.sizes) == 1, "rows lie together, and are read at once"


class Counted(io.FileIO):
    """A file whose reads are counted."""

    sizes: ClassVar[list[int]] = []

    def read(self, size: int | None = -1) -> bytes:
        data = super().read(size)
        self.sizes.append(len(data))
        return data


def test_a_damaged_piece_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pieces, "_PIECE_BYTES", BYTES)
    (checkpoint,) = save(tmp_path, epochs=1)
    manifest = folders.read_manifest(checkpoint)
    stored = manifest.tensors["model/0.weight"]
    assert len(stored.pieces) > 1
    piece = stored.pieces[-1]
    whole = pieces.read_tensors(checkpoint, manifest, ["model/0.weight"])["model/0.weight"]
    values, data = whole[_slices(piece.box)].contiguous().numpy().tobytes(), read(checkpoint, piece.file)
    at = data.index(values, piece.offset)
    write(checkpoint, piece.file, data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
    words = rf"'model/0.weight', in the piece from \({piece.start[0]}, .*, have another checksum"
    with pytest.raises(pd.PipelineError, match=words):
        load(tmp_path)
    with pytest.raises(pd.PipelineError, match="another checksum"):
        pieces.verify_checkpoint(checkpoint)
    # A rank that does not need this piece is not concerned.
    others = pieces.list_shares(manifest, {"model/0.weight": stored.pieces[0].box})
    assert len(list(pieces.read_shares(checkpoint, manifest, others))) == 1


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"pieces": []}, "a tensor has pieces"),
        ({"pieces": [[[0], [2], "a", 0, 9, 1]]}, "make up the tensor of 4 values, found 2"),
        ({"pieces": [[[0], [2], "a", 0, 9, 1], [[0], [2], "a", 0, 9, 1]]}, "with different starts"),
        ({"pieces": [[[0], [2], "a", 0, 9, 1], [[3], [2], "a", 0, 9, 1]]}, "lies within its tensor"),
        ({"pieces": [[[0], [2], "a", 0, 9, 1], [[2], [2], "../a", 0, 9, 1]]}, "a file name without folders"),
        ({"pieces": [[[0], [2], "a", 0, 9, 1], [[2, 0], [2, 1], "a", 0, 9, 1]]}, "has the dimensions of its tensor"),
        ({"pieces": [[[0], [2], "a", 0, 9, 1], [[2], [2], "a", -1, 9, 1]]}, "cannot be negative"),
        ({"pieces": [[[0], [4], "a", 0, 9, 1]], "file": "a"}, "unknown fields"),
        ({"file": "a", "offset": 0}, r"length'?\]? should be a whole number|\.length should be"),
    ],
)
def test_wrong_pieces_are_refused(wrong: dict[str, Any], words: str, tmp_path: Path) -> None:
    document = json.loads(written(tmp_path, {"model/a": torch.ones(4)}, {"model/a": [(range(4),)]}).to_json())
    document["tensors"]["model/a"] = {"dtype": "float32", "shape": [4], **wrong}
    del document["crc32"]
    with pytest.raises(pd.PipelineError, match=words):
        Checkpoint.from_json(json.dumps(document))
