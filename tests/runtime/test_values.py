"""Values that are sent: taken apart, reassembled, split."""

from __future__ import annotations

from collections import namedtuple
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pipedream.core.errors import WorkerError
from pipedream.runtime.comm.values import count_samples, flatten, split_batch, unflatten

TENSORS = st.lists(st.integers(0, 3), max_size=3).map(lambda shape: torch.randn(shape))
PLAIN = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
VALUES = st.recursive(
    TENSORS | PLAIN,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text(), inner, max_size=3)
    ),
    max_leaves=8,
)


def same(a: Any, b: Any) -> bool:
    """Tells whether two values are equal, containers of the same type and tensors the same objects."""
    if isinstance(a, torch.Tensor):
        return a is b
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


@given(VALUES)
def test_a_value_is_put_together_as_it_was(value: Any) -> None:
    assert same(unflatten(*flatten(value)), value)


def test_what_cannot_travel_is_refused() -> None:
    point = namedtuple("point", "x y")
    for value, words in [
        (point(1, 2), "named tuple"),
        ({1: torch.ones(1)}, "strings as keys"),
        ([object()], "a object cannot be sent"),
    ]:
        with pytest.raises(TypeError, match=words):
            flatten(value)


@given(count=st.integers(1, 9), parts=st.integers(1, 6))
def test_microbatches_are_all_samples_in_order_larger_ones_first(count: int, parts: int) -> None:
    x, constant = torch.arange(2.0 * count).reshape(count, 2), torch.ones(())
    pieces = split_batch({"x": x, "y": [x[:, 0]], "c": constant, "n": 3}, count, parts)
    sizes = [len(piece["x"]) for piece in pieces]
    assert len(pieces) == parts
    assert sorted(sizes, reverse=True) == sizes
    assert max(sizes) - min(sizes) <= 1
    assert torch.equal(torch.cat([piece["x"] for piece in pieces]), x)
    for piece in pieces:
        assert torch.equal(piece["y"][0], piece["x"][:, 0])
        assert piece["c"] is constant
        assert piece["n"] == 3


def test_the_samples_of_a_batch_are_counted_on_its_first_tensor() -> None:
    assert count_samples((torch.ones(3, 2), torch.ones(5))) == 3
    assert count_samples(torch.ones(())) == 1
    with pytest.raises(WorkerError, match="holds no tensor"):
        count_samples({"name": "text"})


def test_only_tensors_of_the_batch_are_split() -> None:
    samples, table = torch.arange(4), torch.arange(6)
    first, second = split_batch({"x": samples, "table": table}, 4, 2)
    assert [part["x"].tolist() for part in (first, second)] == [[0, 1], [2, 3]]
    assert same(first["table"], table)
    assert same(second["table"], table)
