"""Bucket elimination: the least sum of tables, in two orders."""

from itertools import product
from math import prod

import numpy as np
import pytest
from hypothesis import given, strategies as st

import pipedream as pd
from pipedream.extensions.meshes.layouts.search import minimise

NAMES = ("a", "b", "c", "d", "e")


@st.composite
def sums(draw: st.DrawFn) -> tuple[list[minimise.Table], dict[minimise.Variable, int]]:
    """Some small tables of a few variables."""
    sizes: dict[minimise.Variable, int] = {name: draw(st.integers(1, 3)) for name in NAMES}
    tables = []
    for _ in range(draw(st.integers(0, 7))):
        scope = tuple(draw(st.lists(st.sampled_from(NAMES), min_size=1, max_size=3, unique=True)))
        shape = [sizes[variable] for variable in scope]
        costs = draw(st.lists(st.integers(0, 9), min_size=prod(shape), max_size=prod(shape)))
        tables.append(minimise.Table(scope, np.reshape(np.array(costs, dtype=float), shape)))
    return tables, sizes


@given(sums(), st.booleans())
def test_the_least_and_its_choices_are_those_of_exhaustive_search(
    drawn: tuple[list[minimise.Table], dict[minimise.Variable, int]], by_fill: bool
) -> None:
    tables, sizes = drawn
    order, cells = minimise.find_elimination_order([table.variables for table in tables], sizes, by_fill=by_fill)
    assert sorted(order, key=str) == sorted(NAMES)
    elimination = minimise.Elimination(tables, sizes, order)
    assert cells == max(table.costs.size for _, table in elimination._buckets)
    totals = {}
    for values in product(*(range(sizes[name]) for name in NAMES)):
        chosen = dict(zip(NAMES, values, strict=True))
        totals[values] = sum(float(table.costs[tuple(chosen[name] for name in table.variables)]) for table in tables)
    assert elimination.least == min(totals.values())
    best = [values for values, total in totals.items() if total == elimination.least]
    for most in (1, 4, 1000):
        choices = [tuple(choice[name] for name in NAMES) for choice in elimination.choices(most)]
        assert set(choices) <= set(best)
        assert len(set(choices)) == len(choices) <= most
        assert len(best) > most or sorted(choices) == best


def test_of_many_ties_some_are_drawn_from_all_over() -> None:
    choices = list(minimise.Elimination([], dict.fromkeys(NAMES, 4), NAMES).choices(32))
    assert len(choices) > 16
    assert all({choice[name] for choice in choices} == {0, 1, 2, 3} for name in NAMES)


def test_fewest_new_pairs_first_makes_smaller_tables() -> None:
    sizes: dict[minimise.Variable, int] = {"a": 3, "b": 3, "c": 10, "d": 3, "e": 3, "f": 10, "g": 10}
    pairs = ("ab", "ac", "ad", "bf", "bg", "ce", "cg", "de", "dg", "ef", "fg")
    cells = [minimise.find_elimination_order(pairs, sizes, by_fill=by_fill)[1] for by_fill in (False, True)]
    assert cells == [9000, 900]


def test_a_table_that_no_machine_holds_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(minimise, "_MAX_CELLS", 8)
    sizes: dict[minimise.Variable, int] = dict.fromkeys(NAMES[:3], 3)
    with pytest.raises(pd.PipelineError, match=r"3 tensors and .* a table of 9 entries, more than 8; take the method"):
        minimise.Elimination([minimise.Table(("a", "b"), np.zeros((3, 3)))], sizes, NAMES[:3])
