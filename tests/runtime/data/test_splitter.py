"""Minibatches: counted and cut along their batch dimension."""

from collections import UserDict
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from built import Built
from hypothesis import given, strategies as st
from torch import nn
from torch.nn.utils.rnn import pack_sequence, unpack_sequence
from torch.utils.data import DataLoader
from training import SGD, plan_of

import pipedream as pd
from pipedream.runtime.comm.values import flatten, unflatten
from pipedream.runtime.data.reader import Minibatch
from pipedream.runtime.data.splitter import BatchDim, Splitter, count_samples, split_batch, split_minibatch


def begun(parts: int = 2, batch_dim: BatchDim = 0) -> Splitter:
    splitter = Splitter(batch_dim)
    splitter.begin(parts, 0)
    return splitter


def cut(splitter: Splitter, number: int, inputs: Any, targets: Any = ()) -> tuple[list[Any], list[Any]]:
    """Returns the parts of the inputs and the targets of a minibatch."""
    parts = splitter.split(number, Minibatch(number, 0, (inputs, targets), False))
    return tuple([unflatten(pair[i].structure, pair[i].tensors) for pair in parts] for i in (0, 1))


def split(inputs: Any, targets: Any, parts: int, batch_dim: BatchDim = 0) -> tuple[list[int], list[Any], list[Any]]:
    sizes, flat_inputs, flat_targets = split_minibatch(inputs, targets, parts, batch_dim)
    return sizes, [unflatten(*part) for part in flat_inputs], [unflatten(*part) for part in flat_targets]


@given(count=st.integers(1, 9), parts=st.integers(1, 6))
def test_microbatches_are_all_samples_in_order_larger_ones_first(count: int, parts: int) -> None:
    """Only tensors of the batch are split, and a batch keeps its type."""
    x = torch.arange(2.0 * count).reshape(count, 2)
    shared = {"c": torch.ones(()), "table": torch.ones(count + 2), "n": 3}
    pieces = split_batch(UserDict({"x": x, "y": [x[:, 0]], **shared}), count, parts)
    sizes = [len(piece["x"]) for piece in pieces]
    assert len(pieces) == parts
    assert sorted(sizes, reverse=True) == sizes
    assert max(sizes) - min(sizes) <= 1
    assert torch.equal(torch.cat([piece["x"] for piece in pieces]), x)
    for piece in pieces:
        assert type(piece) is UserDict
        assert torch.equal(piece["y"][0], piece["x"][:, 0])
        assert all(piece[name] is value for name, value in shared.items())


IDS, POSITIONS = torch.ones(4, 7), torch.ones(1, 7)


@pytest.mark.parametrize(
    ("batch", "batch_dim", "samples"),
    [
        # The first tensor with the dimension counts,
        ((torch.ones(3, 2), torch.ones(5)), 0, 3),
        ((torch.ones(()), torch.ones(5)), 0, 5),
        ((torch.ones(7), torch.ones(3, 2)), 1, 2),
        ((torch.ones(7), torch.ones(3, 2)), {0: None, 1: -1}, 2),
        (torch.ones(()), 0, 1),
        # of keyword arguments the most frequent size.
        ({"positions": POSITIONS, "ids": IDS, "mask": torch.ones(4, 7)}, 0, 4),
        ({"ids": IDS, "positions": POSITIONS}, 0, 4),
        (UserDict({"scale": torch.ones(()), "ids": IDS, "positions": POSITIONS}), 0, 4),
        ({"positions": POSITIONS, "ids": [IDS, torch.ones(4, 7)]}, {"ids": 0}, 4),
        ({"table": torch.ones(9), "ids": IDS}, {"table": None}, 4),
    ],
)
def test_samples_are_counted(batch: Any, batch_dim: BatchDim, samples: int) -> None:
    assert count_samples(batch, batch_dim) == samples
    with pytest.raises(pd.PipelineError, match="holds no tensor"):
        count_samples({"name": "text"})


def test_the_batch_dimension_is_chosen_for_all_or_by_name() -> None:
    sequence, lengths, labels = torch.arange(12).reshape(3, 4), torch.arange(4), torch.arange(4) + 10
    sizes, inputs, targets = split((sequence, lengths), labels, 2, batch_dim=1)
    assert sizes == [2, 2]
    assert listed(part[0] for part in inputs) == [[[0, 1], [4, 5], [8, 9]], [[2, 3], [6, 7], [10, 11]]]
    assert listed(part[1] for part in inputs) == [[0, 1], [2, 3]], "what has no such dimension has the first"
    assert listed(targets) == [[10, 11], [12, 13]]
    batch = {"sequence": sequence, "labels": labels, "bias": torch.ones(4)}
    sizes, inputs, _ = split(batch, None, 2, batch_dim={"sequence": 1, "bias": None})
    assert sizes == [2, 2]
    assert [list(part["sequence"].shape) for part in inputs] == [[3, 2]] * 2
    assert [part["labels"].tolist() for part in inputs] == [[10, 11], [12, 13]]
    assert all(part["bias"] is batch["bias"] for part in inputs)
    first, _ = split_batch({"x": sequence, "n": lengths, "c": torch.ones(3)}, 4, [1, 3], batch_dim=1)
    assert (first["x"].tolist(), first["n"].tolist(), len(first["c"])) == ([[0], [4], [8]], [0], 3)


def test_targets_that_hold_the_inputs_are_cut_like_them() -> None:
    square = torch.arange(16).reshape(4, 4)
    _, inputs, targets = split(square, (square, torch.arange(4)), 2, batch_dim={0: 1})
    for part, (same, labels) in zip(inputs, targets, strict=True):
        assert torch.equal(part, same)
        assert part.shape == (4, 2)
        assert len(labels) == 2


@given(lengths=st.lists(st.integers(1, 4), min_size=1, max_size=5), parts=st.integers(1, 4), ordered=st.booleans())
def test_packed_sequences_are_cut_by_samples(lengths: list[int], parts: int, ordered: bool) -> None:
    lengths = sorted(lengths, reverse=True) if ordered else lengths
    sequences = [torch.randn(length, 2) for length in lengths]
    packed = pack_sequence(sequences, enforce_sorted=ordered)
    assert count_samples((packed, torch.ones(9))) == len(lengths)
    unpacked: list[Any] = []
    for part, labels in split_batch((packed, torch.arange(len(lengths))), len(lengths), parts):
        part_sequences = unpack_sequence(part) if part is not None else []
        assert len(part_sequences) == len(labels)
        unpacked += part_sequences
    assert all(map(torch.equal, unpacked, sequences))
    assert len(unpacked) == len(sequences)


def test_parts_are_flattened_as_each_alone() -> None:
    x, mask, packed = torch.arange(10).reshape(5, 2), torch.ones(5, 2) > 0, pack_sequence([torch.ones(2)] * 5)
    for value in (
        x, (x, x[:, 0], x), {"x": x, "same": [x], "at": slice(torch.ones(5), None), "text": "a"}, UserDict({"x": x}),
        (x, torch.empty(5, device="meta")), {"packed": packed, "x": x}, [x, None, torch.ones(3)],
    ):  # fmt: skip
        for parts in (1, 2, 3):
            sizes, *flat = split_minibatch(value, (mask, value), parts)
            assert sum(sizes) == 5
            for flat_parts, whole in zip(flat, (value, (mask, value)), strict=True):
                alone = [flatten(part) for part in split_batch(whole, 5, parts)]
                assert [(structure, listed(tensors)) for structure, tensors in flat_parts] == [
                    (structure, listed(tensors)) for structure, tensors in alone
                ]
    assert split_minibatch(x, None, 2)[2] == [("null", ()), ("null", ())]


def listed(tensors: Any) -> list[Any]:
    return [tensor.tolist() for tensor in tensors]


def boxes(*counts: int) -> list[dict[str, Any]]:
    return [{"boxes": torch.full((n, 4), i), "at": torch.tensor(i), "name": str(i)} for i, n in enumerate(counts)]


def test_a_list_of_dicts_whose_length_is_not_the_batchs_is_shared() -> None:
    views = [{"x": torch.arange(4)}, {"x": torch.arange(4) + 4}, {"x": torch.ones(4)}]
    _, parts, _ = split({"ids": torch.arange(4), "views": views}, None, 2)
    assert [part["views"][1]["x"].tolist() for part in parts] == [[4, 5], [6, 7]]
    batch = {"ids": torch.arange(4), "table": boxes(1, 2, 3, 4)}
    assert [len(part["table"]) for part in split(batch, None, 2, {"table": None})[1]] == [4, 4]


@dataclass
class Note:
    name: str
    boxes: Any


LISTS: dict[str, Callable[[int], Any]] = {
    "texts": lambda i: "ab"[i % 2] * i,
    "maybe": lambda i: None if i % 3 else i,
    "dicts": lambda i: {"a": i},
    "dataclasses": lambda i: Note(str(i), [i]),
    "scalars": lambda i: torch.tensor(float(i)),
    "ragged tensors": lambda i: Note(str(i), torch.full((i + 2, 4), i)),
    "tensors": lambda i: torch.full((5,), i),
}


@pytest.mark.parametrize("kind", LISTS)
def test_a_list_with_an_item_for_each_sample_is_split(kind: str) -> None:
    items = [LISTS[kind](i) for i in range(6)]
    x = torch.arange(12).reshape(6, 2)
    for batch, take in (
        ((x, tuple(items)), lambda part: list(part[1])),
        ((x, {"inner": items, "text": "abcdef"}), lambda part: part[1]["inner"]),
        ((x, Note("abcdef", items)), lambda part: part[1].boxes),
        ((x, [["c", "d"], items]), lambda part: part[1][1]),
    ):
        for _, parts, others in (split(batch, (items,), 2), split((x,), batch, 2)):
            for some in (parts, others):
                if len(some[0]) == 2:
                    assert str(take(some[0]) + take(some[1])) == str(items)
                    assert len(take(some[0])) == 3


def test_which_lists_are_split_is_decided_once() -> None:
    """Three names of classes are shared, also in a minibatch of three samples."""
    splitter = begun()
    for number, count in enumerate((8, 3, 5)):
        batch = {"x": torch.ones(count, 2), "names": ["a", "b", "c"], "texts": list(map(str, range(count)))}
        batch["words"] = [torch.ones(n % 2 + 2) for n in range(count)]
        inputs, targets = cut(splitter, number, batch, [batch["texts"], ["b", "c", "d"]])
        assert [part["names"] for part in inputs] == [["a", "b", "c"]] * 2
        assert sum(len(part["words"]) for part in inputs) == count
        assert [part[1] for part in targets] == [["b", "c", "d"]] * 2
        for texts in ([part["texts"] for part in inputs], [part[0] for part in targets]):
            assert texts[0] + texts[1] == batch["texts"]


@pytest.mark.parametrize(
    ("first", "later", "reason"),
    [
        (8, 5, "'notes' has 5 items for 8 samples, and had an item for each sample before"),
        (5, 8, "'notes' has 8 items for 8 samples, and had 5 items before"),
        (5, 7, ""),
    ],
)
def test_a_list_that_changes_its_meaning_is_refused(first: int, later: int, reason: str) -> None:
    for parts, batch_dim in ((2, 0), (2, {"notes": None}), (2, {"notes": 0}), (1, 0)):
        splitter, is_refused = begun(parts, batch_dim), reason and parts == 2 and not batch_dim
        for number, count in enumerate((first, later)):
            batch = {"x": torch.ones(8, 2), "notes": ["a"] * count}
            with pytest.raises(pd.PipelineError, match=reason) if number and is_refused else nullcontext():
                notes = [len(part["notes"]) for part in cut(splitter, number, batch)[0]]
                is_split = parts == 2 and count == 8 and batch_dim != {"notes": None}
                assert notes == ([4, 4] if is_split else [count] * parts)


def test_lists_of_tensors_of_all_samples_are_not_split() -> None:
    x, state = torch.arange(2), torch.ones(3, 2, 4)
    batch = {"x": x, "maps": [x, x + 2], "pair": [x, "mean"], "states": ((x, state), (x, state))}
    _, parts, _ = split(batch, None, 2, dict.fromkeys(("maps", "pair", "states"), 0))
    assert [part["maps"][1].tolist() for part in parts] == [[2], [3]]
    assert [part["pair"][1] for part in parts] == ["mean"] * 2
    assert [len(part["states"]) for part in parts] == [2, 2]
    _, parts, _ = split((state, [state, state + 1]), None, 2, batch_dim=1)
    assert [part[1][1].shape for part in parts] == [(3, 1, 4)] * 2


def images(count: int, channels: int = 3) -> list[torch.Tensor]:
    return [torch.full((channels, 4 + i, 5), i) for i in range(count)]


SHOWN: list[tuple[Any, Any, int]] = [
    (images(4), torch.arange(4), 4),
    (images(4), boxes(2, 2, 2, 2), 4),
    ((images(4), torch.arange(4)), None, 4),
    ({"pixels": images(4), "ids": torch.ones(4, 7)}, None, 4),
    ([torch.ones(n, 2) for n in (5, 3, 7)], torch.arange(3), 3),
    ([torch.ones(3, 2)] * 4, (boxes(1, 1, 1, 1), "text"), 4),
    ({"labels": boxes(4, 4, 4, 4), "pixels": images(4)}, None, 4),
]


@pytest.mark.parametrize("case", range(len(SHOWN)))
def test_other_sizes_show_that_a_list_of_tensors_has_one_for_each_sample(case: int) -> None:
    inputs, targets, count = SHOWN[case]
    sizes, parts, target_parts = split(inputs, targets, 2)
    assert sum(sizes) == count_samples((inputs, targets)) == count

    def find_list(value: Any) -> list[torch.Tensor]:
        return value["pixels"] if isinstance(value, dict) else value[0] if isinstance(value, tuple) else value

    assert str([item for part in parts for item in find_list(part)]) == str([*find_list(inputs)])
    if isinstance(targets, (list, tuple)) and len(targets) == count:
        assert [len(part) for part in target_parts] == sizes


def test_other_sizes_show_that_a_list_of_tensors_holds_all_samples() -> None:
    features = [torch.ones(8, 3), torch.ones(8, 5)]
    for targets in (torch.arange(8), (features, torch.arange(8)), [features, torch.arange(8)]):
        sizes, parts, _ = split(features, targets, 2)
        assert (sizes, [len(part) for part in parts]) == ([4, 4], [2, 2])
    x, y = torch.ones(2, 3), torch.arange(2)
    assert [len(part) for part in split(x, [x, y], 2)[2]] == [2, 2], "the whole batch, as a DataLoader gives it"


UNCLEAR: list[tuple[Any, Any, str | int]] = [
    (images(4), None, 0),
    (images(4), [[1], [2], [3, 4], [5]], 0),
    (images(4), [torch.ones(n, 4) for n in (1, 2, 3, 3)], 0),
    (images(4), tuple([{"at": torch.ones(())}] * n for n in (1, 3, 1, 2)), 0),
    (images(3), torch.arange(3), 0),
    ({"pixels": images(4), "mean": torch.ones(3), "ids": torch.ones(4, 7)}, None, "pixels"),
    (torch.ones(4, 2), [torch.ones(4, 4)] * 4, 0),
]


@pytest.mark.parametrize("case", range(len(UNCLEAR)))
def test_a_list_of_tensors_of_unclear_meaning_is_asked_for_by_name(case: int) -> None:
    inputs, targets, name = UNCLEAR[case]
    with pytest.raises(pd.PipelineError, match=rf"give batch_dim={{{name!r}: 'items'}} if it has"):
        split(inputs, targets, 2)
    sizes, parts, target_parts = split(inputs, targets, 2, {name: "items"})
    assert len(sizes) == 2
    pixels = [part["pixels"] if isinstance(part, dict) else part for part in parts]
    assert list(map(len, pixels)) == sizes
    if isinstance(targets, list):
        assert list(map(len, target_parts)) == sizes
    if name == 0 and isinstance(inputs, list) and not isinstance(targets, tuple):
        assert all(len(part) == len(inputs) for part in split(inputs, None, 2, {0: 0})[1])


def test_a_list_that_is_said_to_have_an_item_for_each_sample_does() -> None:
    batch = {"a": images(4), "b": ["text"] * 3}
    with pytest.raises(pd.PipelineError, match=r"'b' has 3 items for 4 samples, but is said to have one for each"):
        split(batch, None, 2, {"a": "items", "b": "items"})
    _, parts, _ = split(batch, None, 2, {"a": "items", "b": None})
    assert [len(part["b"]) for part in parts] == [3, 3]
    read = Built(lambda self, x: self.a(torch.stack([image.float().mean((1, 2)) for image in x])), a=nn.Linear(3, 2))
    assert pd.profile(read, images(4), batch_dim={0: "items"}, warmup=0, runs=1).batch == 4


@pytest.mark.filterwarnings("ignore::UserWarning")  # prototypes of torch
@pytest.mark.parametrize("kind", ["sparse_coo", "sparse_csr", "strided", "jagged"])
def test_sparse_and_nested_tensors_are_not_split(kind: str) -> None:
    x = torch.eye(4)
    if kind in ("strided", "jagged"):
        special = torch.nested.nested_tensor([torch.ones(n, 2) for n in range(1, 5)], layout=getattr(torch, kind))
    else:
        special = x.to_sparse(layout=getattr(torch, kind))
    for role, pair in (("inputs", ((x, special), ())), ("targets", ((x,), (x, special)))):
        splitter = begun(1)
        cut(splitter, 0, *pair)
        splitter.begin(2, 0)
        with pytest.raises(pd.PipelineError, match=rf"tensor 1 of the {role} is sparse or nested, and cannot be split"):
            cut(splitter, 0, *pair)
    assert len(cut(begun(2, {"adjacency": None}), 0, {"x": x, "adjacency": x.to_sparse()})[0]) == 2
    with pytest.raises(pd.PipelineError, match=r"cannot be an input; give it dense: x\.to_dense"):
        pd.profile(torch.nn.Linear(4, 4), {"input": special})


SHARED = {"x": torch.ones(8, 6), "context": torch.ones(5, 5)}


@pytest.mark.parametrize(
    ("later", "batch_dim", "reason"),
    [
        ({"context": torch.ones(8, 5)}, {}, r"'context' of the inputs, of shape \(8, 5\) for 8 samples, has the nu"),
        ({"x": torch.ones(8, 6, requires_grad=True) * 2}, {}, "the tensor 'x' of the inputs is part of an autograd g"),
        ({"x": torch.ones(4, 6), "context": torch.ones(4, 5)}, {}, "has the number of samples"),
        ({"x": torch.ones(7, 6)}, {}, ""),
        *(({"context": torch.ones(size, 5)}, {"context": None}, "") for size in (8, 4)),
    ],
)
def test_whether_a_tensor_is_split_is_decided_once(later: dict[str, Any], batch_dim: Any, reason: str) -> None:
    splitter, batch = begun(2, {"y": 1} | batch_dim), SHARED | later
    cut(splitter, 0, SHARED, SHARED["x"])
    with pytest.raises(pd.PipelineError, match=reason) if reason else nullcontext():
        parts, _ = cut(splitter, 1, batch, batch["x"].detach())
        assert [part["context"] is batch["context"] for part in parts] == [True, True]


# -- the last minibatch ------------------------------------------------------------------------------------------------
# It may leave one sample to a microbatch, over which a model cannot normalise.


SIZE = 8
BEFORE = r"comparison of the first minibatch.*a microbatch has one sample.*drop_last=True.*fewer microbatches"
LATE = r"stage 1.*a microbatch has one sample.*drop_last=True.*fewer microbatches"


def model_of(*layers: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), *layers, nn.Linear(6, 3))


def batches(last: int) -> list[Any]:
    return [(torch.randn(size, 4), torch.randint(0, 3, (size,))) for size in (SIZE, SIZE, last)]


MODELS = {
    "batch norm": lambda: model_of(nn.BatchNorm1d(6)),
    "group norm": lambda: model_of(nn.GroupNorm(6, 6)),
    "frozen": lambda: model_of(nn.BatchNorm1d(6).eval()),
    "layer norm": lambda: model_of(nn.LayerNorm(6)),
    "several values": lambda: model_of(nn.Unflatten(1, (2, 3)), nn.BatchNorm1d(2), nn.Flatten()),
}


def data_loader(last: int, **options: Any) -> DataLoader[Any]:
    return DataLoader([sample for batch in batches(last) for sample in zip(*batch, strict=True)], SIZE, **options)


@pytest.mark.parametrize(
    ("name", "loader", "parts", "reason", "trained"),
    [
        ("batch norm", data_loader(5), 4, BEFORE, 0),
        ("group norm", data_loader(5, shuffle=True), 4, BEFORE, 0),
        ("batch norm", iter(batches(5)), 4, LATE, 2),
        ("batch norm", data_loader(SIZE), SIZE, BEFORE, 0),
        ("batch norm", data_loader(5, drop_last=True), 4, "", 2),
        ("batch norm", data_loader(SIZE), 4, "", 3),
        ("batch norm", data_loader(5), 2, "", 3),
        *((name, data_loader(5), 4, "", 3) for name in ("frozen", "layer norm", "several values")),
    ],
)
def test_one_sample_is_refused_before_the_epoch(name: str, loader: Any, parts: int, reason: str, trained: int) -> None:
    model, done = MODELS[name](), list[pd.Done]()
    options = {"schedule": "gpipe", "microbatches": parts, "loss": F.cross_entropy, "optimizer": SGD}
    with (
        pytest.raises(pd.PipelineError, match="(?s)" + reason) if reason else nullcontext(),
        pd.Pipeline(model, plan_of(model, torch.randn(SIZE, 4), (1,)), **options) as pipeline,
    ):
        done.extend(pipeline.train(loader))
    assert len(done) == trained
