"""The downsets of random graphs against all subsets of their layers, and the narrowest cuts against all cuts."""

from functools import reduce
from itertools import pairwise, product
from operator import and_, or_

import pytest
from hypothesis import given, settings, strategies as st

import pipedream as pd
from pipedream.planner.cuts import Lattice, bit_indices, min_cut_downset, narrowest_cuts
from tests.planner.planned import every_downset


@st.composite
def graphs(draw: st.DrawFn) -> pd.LayerGraph:
    count = draw(st.integers(1, 7))
    pairs = [(i, j) for j in range(count) for i in range(j)]
    edges = draw(st.lists(st.sampled_from(pairs), max_size=12)) if pairs else []
    ties = draw(st.lists(st.lists(st.integers(0, count - 1), min_size=1, max_size=3, unique=True), max_size=2))
    layers = tuple(pd.Layer(f"l{i}", "Layer") for i in range(count))
    return pd.LayerGraph(layers, tuple(sorted(set(edges))), tuple(map(tuple, ties)))


@given(graphs(), st.integers(0, 5))
def test_prefixes_are_one_order(graph: pd.LayerGraph, seed: int) -> None:
    lattice = Lattice.of(graph)
    prefixes = lattice.prefixes(lambda g: g * seed % 7)
    assert set(prefixes) <= {sum(1 << i for i, inside in enumerate(row) if inside) for row in every_downset(graph)}
    assert (prefixes[0], prefixes[-1]) == (0, lattice.everything)
    assert sorted(after & ~before for before, after in pairwise(prefixes)) == sorted(lattice.groups)


@pytest.mark.parametrize("count", [1, 2, 2000])
def test_chains_are_quick(count: int) -> None:
    graph = pd.LayerGraph.chain(tuple(pd.Layer(f"l{i}", "Layer") for i in range(count)))
    assert Lattice.of(graph).downsets(count + 1) == [(1 << i) - 1 for i in range(count + 1)]


@settings(max_examples=100)
@given(graphs(), st.data())
def test_none_between_is_crossed_by_fewer_bytes(graph: pd.LayerGraph, data: st.DataObject) -> None:
    """Between all pairs of downsets: the bytes are the fewest, and of equal cuts it is the smallest."""
    layers = len(graph.layers)
    sizes = data.draw(st.lists(st.integers(0, 5), min_size=layers, max_size=layers))
    lattice = Lattice.of(graph)
    downsets = lattice.downsets(1 << layers) or []
    crossing = dict(zip(downsets, lattice.crossing_bytes(downsets, sizes).tolist(), strict=True))
    for low, high in product(downsets, downsets):
        if low & ~high:
            continue
        between = [downset for downset in downsets if not low & ~downset and not downset & ~high]
        narrowest = min_cut_downset(lattice, low, high, sizes)
        least = min(crossing[downset] for downset in between)
        assert crossing[narrowest] == least
        assert all(not narrowest & ~downset for downset in between if crossing[downset] == least)


@given(graphs(), st.data(), st.integers(1, 9))
def test_narrowest_cuts_are_nested(graph: pd.LayerGraph, data: st.DataObject, count: int) -> None:
    layers = len(graph.layers)
    sizes = data.draw(st.lists(st.integers(0, 9), min_size=layers, max_size=layers))
    costs = data.draw(st.lists(st.integers(1, 9).map(float), min_size=layers, max_size=layers))
    lattice = Lattice.of(graph)
    downsets = lattice.downsets(1 << layers) or []
    cuts = narrowest_cuts(lattice, costs, sizes, count)
    assert set(cuts) <= set(downsets)
    assert all(not earlier & ~later for earlier, later in pairwise(cuts))
    if count == 1:
        assert cuts == [0]  # nothing crosses before the first layer
    done = {downset: sum(costs[i] for i in bit_indices(downset)) / sum(costs) * count for downset in downsets}
    expected = set()
    for share in range(count):
        low = reduce(and_, (downset for downset in downsets if done[downset] >= share - 1e-9))
        high = reduce(or_, (downset for downset in downsets if done[downset] <= share + 1 + 1e-9))
        if not low & ~high:
            expected.add(min_cut_downset(lattice, low, high, sizes))
    assert set(cuts) == expected
