"""The narrowest cuts against all cuts."""

from __future__ import annotations

import random
from functools import reduce
from itertools import pairwise, product
from operator import and_, or_

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipedream.core.model.graph import Layer, LayerGraph
from pipedream.planner.cuts import Lattice, bit_indices, min_cut_downset, narrowest_cuts


@st.composite
def graphs(draw: st.DrawFn) -> LayerGraph:
    count = draw(st.integers(1, 7))
    pairs = [(i, j) for j in range(count) for i in range(j)]
    edges = draw(st.lists(st.sampled_from(pairs), max_size=12)) if pairs else []
    ties = draw(st.lists(st.lists(st.integers(0, count - 1), min_size=1, max_size=2, unique=True), max_size=1))
    layers = tuple(Layer(f"l{i}", "Layer") for i in range(count))
    return LayerGraph(layers, tuple(sorted(set(edges))), tuple(map(tuple, ties)))


@pytest.mark.parametrize("seed", range(10))
def test_none_between_is_crossed_by_fewer_bytes(seed: int) -> None:
    """Between all pairs of downsets of 100 graphs: the bytes are the fewest, and of equal cuts it is the smallest."""
    draw = random.Random(seed)
    several = 0
    for _ in range(10):
        count = draw.randint(3, 6)
        edges = {(a, b) for b in range(count) for a in range(b) if draw.random() < 0.4}
        ties = (tuple(draw.sample(range(count), 2)),) if draw.random() < 0.2 else ()
        graph = LayerGraph(tuple(Layer(f"l{i}", "Layer") for i in range(count)), tuple(sorted(edges)), ties)
        sizes = [draw.randint(0, 5) for _ in range(count)]
        lattice = Lattice.of(graph)
        downsets = lattice.downsets(1 << count) or []
        crossing = dict(zip(downsets, lattice.crossing_bytes(downsets, sizes).tolist(), strict=True))
        for low, high in product(downsets, downsets):
            if low & ~high:
                continue
            between = [downset for downset in downsets if not low & ~downset and not downset & ~high]
            narrowest = min_cut_downset(lattice, low, high, sizes)
            least = min(crossing[downset] for downset in between)
            assert crossing[narrowest] == least
            assert all(not narrowest & ~downset for downset in between if crossing[downset] == least)
            several += least > 0 and len({crossing[downset] for downset in between}) > 2
    assert several


@given(graphs(), st.data(), st.integers(1, 9))
def test_narrowest_cuts_are_nested(graph: LayerGraph, data: st.DataObject, count: int) -> None:
    layers = len(graph.layers)
    sizes = data.draw(st.lists(st.integers(0, 9), min_size=layers, max_size=layers))
    costs = data.draw(st.lists(st.integers(1, 9).map(float), min_size=layers, max_size=layers))
    lattice = Lattice.of(graph)
    downsets = lattice.downsets(1 << layers) or []
    cuts = narrowest_cuts(lattice, costs, sizes, count)
    assert set(cuts) <= set(downsets)
    assert all(not before & ~behind for before, behind in pairwise(cuts))
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
