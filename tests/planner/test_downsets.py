"""The downsets of random graphs against all subsets of their layers."""

from __future__ import annotations

from itertools import pairwise, product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipedream.core.model.graph import Layer, LayerGraph
from pipedream.planner.cuts import Lattice, bit_indices


@st.composite
def graphs(draw: st.DrawFn) -> LayerGraph:
    count = draw(st.integers(1, 7))
    pairs = [(i, j) for j in range(count) for i in range(j)]
    edges = draw(st.lists(st.sampled_from(pairs), max_size=9)) if pairs else []
    ties = draw(st.lists(st.lists(st.integers(0, count - 1), min_size=1, max_size=3, unique=True), max_size=2))
    layers = tuple(Layer(f"l{i}", "Layer") for i in range(count))
    return LayerGraph(layers, tuple(sorted(set(edges))), tuple(map(tuple, ties)))


def every_downset(graph: LayerGraph) -> set[int]:
    """All subsets, tried by definition."""
    downsets = set()
    for row in product([False, True], repeat=len(graph.layers)):
        runs = all(row[a] or not row[b] for a, b in graph.edges)
        if runs and all(len({row[i] for i in group}) == 1 for group in graph.ties):
            downsets.add(sum(1 << i for i, inside in enumerate(row) if inside))
    return downsets


@given(graphs())
def test_downsets_are_all_that_there_are(graph: LayerGraph) -> None:
    lattice = Lattice.of(graph)
    expected = every_downset(graph)
    downsets = lattice.downsets(len(expected))
    assert downsets is not None
    assert len(downsets) == len(expected)
    assert set(downsets) == expected
    assert [downset.bit_count() for downset in downsets] == sorted(downset.bit_count() for downset in downsets)
    assert lattice.downsets(len(expected) - 1) is None
    assert lattice.is_chain == (len(expected) == len(lattice.groups) + 1)


@given(graphs(), st.data())
def test_what_crosses_counts_once(graph: LayerGraph, data: st.DataObject) -> None:
    sizes = data.draw(st.lists(st.integers(0, 10**15), min_size=len(graph.layers), max_size=len(graph.layers)))
    downsets = sorted(every_downset(graph))
    expected = [
        sum(
            size
            for i, size in enumerate(sizes)
            if any(a == i and downset >> a & 1 > downset >> b & 1 for a, b in graph.edges)
        )
        for downset in downsets
    ]
    assert Lattice.of(graph).crossing_bytes(downsets, sizes).tolist() == expected


@given(graphs(), st.integers(0, 5))
def test_prefixes_are_one_order(graph: LayerGraph, seed: int) -> None:
    lattice = Lattice.of(graph)
    prefixes = lattice.prefixes(lambda g: g * seed % 7)
    assert set(prefixes) <= every_downset(graph)
    assert (prefixes[0], prefixes[-1]) == (0, lattice.everything)
    steps = [behind & ~before for before, behind in pairwise(prefixes)]
    assert sorted(steps) == sorted(lattice.groups)


@given(graphs(), st.data())
def test_free_layers_run_as_soon_as_they_can(graph: LayerGraph, data: st.DataObject) -> None:
    """Each downset has one of those that are left which costs the same, sends no more, and keeps chains chains."""
    count = len(graph.layers)
    sizes = data.draw(st.lists(st.integers(0, 3), min_size=count, max_size=count))
    costs = data.draw(st.lists(st.booleans(), min_size=count, max_size=count))
    lattice = Lattice.of(graph)
    free = lattice.free(costs, sizes)
    assert not any(costs[i] for g in free for i in bit_indices(lattice.groups[g]))
    everything = sorted(every_downset(graph))
    left = lattice.downsets(len(everything), free)
    assert left is not None
    sends = dict(zip(everything, lattice.crossing_bytes(everything, sizes).tolist(), strict=True))
    nearest = {downset: min((n for n in left if not downset & ~n), key=int.bit_count) for downset in everything}
    for downset, instead in nearest.items():
        assert [i for i in bit_indices(instead & ~downset) if costs[i]] == []
        assert sends[instead] <= sends[downset]
        assert all(not instead & ~nearest[more] for more in everything if not downset & ~more)


@pytest.mark.parametrize("count", [1, 2, 2000])
def test_chains_are_quick(count: int) -> None:
    graph = LayerGraph.chain(tuple(Layer(f"l{i}", "Layer") for i in range(count)))
    assert Lattice.of(graph).downsets(count + 1) == [(1 << i) - 1 for i in range(count + 1)]
