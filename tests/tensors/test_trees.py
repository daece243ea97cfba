"""Mappings and dataclasses are inner nodes of a tree, as lists are."""

import re
from collections import OrderedDict, UserDict
from dataclasses import dataclass
from typing import Any

from hypothesis import given, strategies as st

from pipedream.tensors.trees import tree_leaves, tree_map


@dataclass(frozen=True)
class Two:
    a: Any
    b: Any


def nest(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    mappings = st.builds(
        lambda kind, a, b: kind(a=a, b=b), st.sampled_from([dict, UserDict, OrderedDict, Two]), inner, inner
    )
    return st.lists(inner, min_size=1) | mappings


@given(st.recursive(st.integers(), nest))
def test_a_copy_has_changed_leaves_in_the_same_containers(value: Any) -> None:
    text = repr(value)
    leaves = [*map(int, re.findall(r"-?\d+", text))]
    assert tree_leaves(value) == leaves
    assert repr(tree_map(lambda leaf: leaf + 1, value)) == re.sub(r"-?\d+", lambda n: str(int(n[0]) + 1), text)
    assert repr(value) == text
