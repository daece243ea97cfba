"""Values that are sent: taken apart, reassembled, refused."""

from __future__ import annotations

import json
from collections import OrderedDict, UserDict, defaultdict, namedtuple
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from enum import Enum
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from torch.nn.utils.rnn import PackedSequence, pack_sequence

from pipedream.runtime.comm.values import flatten, map_tensors, tensors_in, to_device, unflatten


class Point(NamedTuple):
    x: Any
    y: Any


@dataclass
class Pair:
    first: Any
    second: Any = None
    total: int = field(init=False, default=0)


@dataclass(frozen=True, slots=True)
class Frozen:
    inner: Any


@dataclass
class Output(OrderedDict):
    """Like an output of Hugging Face: the fields that are not None are its items."""

    loss: Any = None
    logits: Any = None
    cache: Any = None

    def __post_init__(self) -> None:
        for name in ("loss", "logits", "cache"):
            if getattr(self, name) is not None:
                self[name] = getattr(self, name)


class Encoding(UserDict):
    """Like a batch of Hugging Face: a mapping with notes of its own."""

    def __init__(self, data: Any, notes: Any = None) -> None:
        super().__init__(data)
        self.notes = notes


class Letters(list):
    """A list of another class."""


class Mode(Enum):
    FAST = 1
    SLOW = "slow"


class Opaque:
    """Like a cache of keys and values."""


TENSORS = st.lists(st.integers(0, 3), max_size=3).map(lambda shape: torch.randn(shape))
PLAIN = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary(max_size=4)
OTHERS = st.sampled_from(
    [
        torch.Size([2, 3]), torch.bfloat16, torch.device("cpu"), torch.device("cuda", 1), slice(1, None, 2), 3 - 2j,
        range(1, 9, 2), ..., torch.contiguous_format, torch.strided, Mode.FAST, Mode.SLOW,
    ]
)  # fmt: skip
KEYS = st.recursive(
    st.text() | st.integers() | st.booleans() | st.none() | st.sampled_from(Mode),
    lambda inner: st.lists(inner, max_size=2).map(tuple),
    max_leaves=3,
)
VALUES = st.recursive(
    TENSORS | PLAIN | OTHERS,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.lists(inner, max_size=3).map(Letters)
        | st.dictionaries(KEYS, inner, max_size=3)
        | st.dictionaries(st.text(), inner, max_size=2).map(OrderedDict)
        | st.builds(Point, inner, inner)
        | st.builds(Pair, inner, inner)
        | st.builds(Frozen, inner)
        | st.builds(Output, inner, inner)
        | st.builds(Encoding, st.dictionaries(st.text(), inner, max_size=2), st.none() | st.text())
    ),
    max_leaves=8,
)


def same(a: Any, b: Any) -> bool:
    """Returns whether two values are equal, containers of the same type and tensors the same objects."""
    if isinstance(a, torch.Tensor):
        return a is b
    if type(a) is not type(b):
        return False
    if isinstance(a, (dict, UserDict)):
        equal = list(a) == list(b) and all(same(a[key], b[key]) for key in a)
        return equal and same(getattr(a, "__dict__", {}).get("notes"), getattr(b, "__dict__", {}).get("notes"))
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, (Pair, Frozen)):
        return all(same(getattr(a, part.name), getattr(b, part.name)) for part in fields(a))
    return bool(a == b)


@given(VALUES)
def test_a_value_is_put_together_as_it_was_and_a_copy_has_its_tensors_replaced(value: Any) -> None:
    assert same(unflatten(*flatten(value)), value)
    twice = map_tensors(value, lambda tensor: tensor + 1)
    assert flatten(twice)[0] == flatten(value)[0]
    assert all(map(torch.equal, tensors_in(twice), [tensor + 1 for tensor in tensors_in(value)]))


def test_a_tensor_that_is_there_twice_is_sent_once_and_each_reader_gets_containers_of_its_own() -> None:
    hidden, meta = torch.ones(2), torch.empty(2, device="meta")
    structure, tensors = flatten({"last": hidden, "all": (torch.zeros(1), hidden), "list": [1], "meta": meta})
    assert len(tensors) == 2
    first, second = unflatten(structure, tensors), unflatten(structure, tensors)
    assert first["last"] is first["all"][1]
    first["list"].append(2)
    assert second["list"] == [1]
    assert first["meta"] is not second["meta"]


def test_packed_sequences_and_results_of_torch_travel() -> None:
    packed = pack_sequence([torch.randn(length, 2) for length in (2, 4, 3)], enforce_sorted=False)
    structure, tensors = flatten(packed)
    received = unflatten(structure, tensors)
    assert type(received) is type(packed)
    assert all(map(torch.equal, received, packed))
    moved = unflatten(structure, [tensor.as_subclass(Logged) for tensor in tensors])
    assert (type(moved.data), type(moved.batch_sizes)) == (Logged, torch.Tensor), "its sizes are on the CPU"
    assert unflatten(structure, [tensor.to("meta") for tensor in tensors]).batch_sizes.is_meta, "a placeholder"
    # A call that returns its argument as it is is recorded with a note in the tensors' place.
    noted = tuple.__new__(PackedSequence, ("a", "b", None, None))
    assert same(to_device({"packed": noted}, torch.device("cpu"))["packed"], noted)
    largest = torch.max(torch.ones(2, 3), 0)
    assert type(unflatten(*flatten(largest))) is type(largest)


def test_numbers_of_numpy_and_mappings_of_any_kind_become_plain_ones() -> None:
    assert same(unflatten(*flatten(MappingProxyType({"a": np.float64(0.5), "b": np.int64(3)}))), {"a": 0.5, "b": 3})
    assert same(unflatten(*flatten(defaultdict(int, a=1))), defaultdict(int, a=1))


def test_a_tensor_on_meta_travels_as_its_description() -> None:
    plain = torch.empty(2, 3, dtype=torch.int32, device="meta")
    turned = torch.empty(4, 2, 3, device="meta", requires_grad=True).permute(2, 0, 1)
    spread = torch.empty(3, 1, device="meta").expand(3, 5)
    shared = torch.ones(1)
    structure, tensors = flatten([plain, turned, shared, spread])
    assert tensors == (shared,)
    for received, sent in zip(unflatten(structure, tensors), [plain, turned, shared, spread], strict=True):
        assert (received.device, received.dtype) == (sent.device, sent.dtype)
        assert (received.shape, received.stride()) == (sent.shape, sent.stride())
        assert received.requires_grad == sent.requires_grad
    assert flatten(plain)[1] == ()
    assert unflatten(*flatten(plain)).shape == plain.shape
    assert [tensor.is_meta for tensor in to_device([plain, shared], torch.device("cpu"))] == [True, False]


class Logged(torch.Tensor):
    """Logs what would happen to it on a GPU, and stays where it is."""

    log: ClassVar[list[str]] = []

    def pin_memory(self, device: Any = None) -> Logged:
        self.log.append("pin")
        return self

    def to(self, *args: Any, **kwargs: Any) -> Logged:
        self.log.append(f"copy to {args[0]}, non_blocking={kwargs['non_blocking']}")
        return self

    def record_stream(self, stream: Any) -> None:
        self.log.append(f"used on {stream}")

    def cpu(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return self.as_subclass(torch.Tensor)


class Stream(str):
    """The name of a stream, which logs what it waits for."""

    def wait_stream(self, other: str) -> None:
        Logged.log.append(f"{self} waits for {other}")


def test_a_copy_to_a_gpu_is_pinned_and_made_beside_the_computation(monkeypatch: pytest.MonkeyPatch) -> None:
    def logged(value: Any, device: torch.device) -> tuple[Any, list[str]]:
        Logged.log.clear()
        return to_device(value, device), list(Logged.log)

    @contextmanager
    def entered(stream: str) -> Iterator[None]:
        Logged.log.append(f"on {stream}")
        yield
        Logged.log.append(f"off {stream}")

    monkeypatch.setattr("pipedream.runtime.comm.values._make_copy_stream", lambda device: Stream("copies"))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream("compute"))
    monkeypatch.setattr(torch.cuda, "stream", entered)
    copy = [
        "on copies", "pin", "copy to cuda:0, non_blocking=True", "off copies", "compute waits for copies",
        "used on compute",
    ]  # fmt: skip
    cpu, gpu, x = torch.device("cpu"), torch.device("cuda", 0), torch.ones(2).as_subclass(Logged)
    value = {"x": x, "n": 3, "meta": torch.empty(1, device="meta")}
    assert same(logged(value, gpu), (value, copy))
    packed = pack_sequence([torch.ones(2), torch.ones(1)])
    moved, log = logged((x, type(packed)(packed.data.as_subclass(Logged), packed.batch_sizes)), gpu)
    assert log == copy * 2, "the sizes of a packed sequence stay on the CPU"
    assert moved[1].batch_sizes is packed.batch_sizes
    assert type(moved[1]) is type(packed)
    assert same(logged(x, cpu), (x, []))
    of_graph = torch.ones(2, requires_grad=True).as_subclass(Logged)
    assert logged(of_graph, gpu)[1] == ["copy to cuda:0, non_blocking=True"]


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ([object()], r"value\[0\] is a object, which cannot be sent"),
        ({"a": Pair(1, [Opaque()])}, r"value\['a'\]\.second\[0\] is a Opaque"),
        (Output(cache=Opaque()), r"value\.cache is a Opaque"),
        (Point(1, {Opaque}), r"value\.y is a set"),
        ({frozenset(): 1}, r"value: a key is a frozenset.* as keys"),
    ],
)
def test_what_cannot_travel_is_refused_with_its_place(value: Any, words: str) -> None:
    with pytest.raises(TypeError, match=words):
        flatten(value)


def test_objects_that_cannot_travel_become_none_where_asked() -> None:
    received = unflatten(*flatten(Output(logits=torch.ones(2), cache=Opaque()), opaque_as_none=True))
    assert list(received) == ["logits"]
    assert received.cache is None
    assert unflatten(*flatten([Opaque(), 1], opaque_as_none=True)) == [None, 1]
    notes = unflatten(*flatten(Encoding({"a": 1}, notes=[Opaque()])))
    assert (notes.data, notes.notes) == ({"a": 1}, None)


def test_classes_that_functions_have_made_are_told_apart() -> None:
    first, second = (namedtuple("made", names) for names in ("x y", "y x"))
    for kind in (first, second, first):
        assert type(unflatten(*flatten(kind(1, 2)))) is kind


@pytest.mark.parametrize(
    ("node", "words"),
    [
        (["c", "subprocess:Popen", None, []], "is not a container"),
        (["c", "os:system", None, []], "does not find"),
        (["c", "no_such_module:Thing", None, []], "does not find"),
        (["c", "torch.nn:Linear", None, []], "is not a container"),
        (["e", "subprocess:Popen", "run"], "is not a container"),
        (["torch", "load"], "neither a dtype"),
    ],
)
def test_a_message_makes_nothing_but_containers(node: Any, words: str) -> None:
    with pytest.raises(TypeError, match=words):
        unflatten(json.dumps(node), ())
