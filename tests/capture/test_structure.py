"""Containers of tensors and numbers are walked through, changed and read at a path."""

from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, strategies as st
from torch import nn

from pipedream.capture.structure import find_leaf, map_leaves, walk


class Pair(NamedTuple):
    first: Any
    second: Any


@dataclass
class Output:
    loss: Any
    logits: Any = None


class Opaque:
    """An object that is not looked into."""


LEAF = st.one_of(
    st.integers(),
    st.none(),
    st.booleans(),
    st.text("ab/", max_size=3),
    st.just(torch.Size([2, 3])),
    st.builds(torch.zeros, st.integers(0, 3)),
    st.builds(Opaque),
)
NAMES = st.text("abc_", min_size=1, max_size=3)


def containers(parts: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    several = st.lists(parts, max_size=3)
    return st.one_of(
        several,
        several.map(tuple),
        st.dictionaries(NAMES, parts, max_size=3),
        st.dictionaries(st.integers(0, 5), parts, max_size=3),
        st.builds(Pair, parts, parts),
        st.builds(Output, parts, parts),
    )


VALUE = st.recursive(LEAF, containers, max_leaves=12)


@given(VALUE)
def test_each_leaf_is_at_its_path_and_is_changed_or_kept_in_their_order(value: Any) -> None:
    leaves = list(walk(value))
    assert len({path for path, _ in leaves}) == len(leaves)
    assert all(find_leaf(value, path) is leaf for path, leaf in leaves)
    called: list[tuple[str, Any]] = []

    def number(path: str, leaf: Any) -> int:
        called.append((path, leaf))
        return len(called)

    numbered = map_leaves(number, value)
    assert [(path, id(leaf)) for path, leaf in called] == [(path, id(leaf)) for path, leaf in leaves]
    assert [leaf for _, leaf in walk(numbered)] == list(range(1, len(leaves) + 1))
    kept = map_leaves(lambda _, leaf: leaf, value)
    assert [id(leaf) for _, leaf in walk(kept)] == [id(leaf) for _, leaf in leaves]
    assert repr(kept) == repr(value), "other containers"


@pytest.mark.parametrize(
    ("value", "path"),
    [([1], "1"), ((1,), "a"), ({"a": 1}, "b"), ({0: 1}, "1"), (Output(1), "hidden"), (1, "0"), ([{}], "0/a/b")],
)
def test_a_path_that_is_not_there_gives_none(value: Any, path: str) -> None:
    assert find_leaf(value, path) is None


def test_of_other_mappings_a_dict_is_made() -> None:
    assert map_leaves(lambda path, leaf: path, MappingProxyType({"a": [1]})) == {"a": ["a/0"]}


def test_a_packed_sequence_keeps_its_numbers_and_its_type() -> None:
    packed = nn.utils.rnn.pack_sequence([torch.ones(3, 2), torch.ones(1, 2)])
    assert [path for path, _ in walk(packed)] == ["0", "1", "2", "3"]
    doubled = map_leaves(lambda path, leaf: leaf * 2 if path == "0" else leaf, packed)
    assert type(doubled) is type(packed)
    assert torch.equal(doubled.data, packed.data * 2)
    assert doubled.batch_sizes is packed.batch_sizes
