"""Running sums whose differences are rounded once."""

from fractions import Fraction
from itertools import accumulate, combinations_with_replacement

import numpy as np
from hypothesis import given, strategies as st

from pipedream.planner.arrays import ExactSums


@given(st.lists(st.one_of(st.floats(1e-9, 10.0), st.floats(0.0, 1e12), st.just(5e-324)), min_size=1, max_size=8))
def test_differences_are_rounded_once(seconds: list[float]) -> None:
    """As fractions are, whether the sums fit two halves or not; for two places, and for all at once."""
    exact = [Fraction(0), *accumulate(map(Fraction, seconds))]
    scale = max(value.denominator for value in exact)
    sums = ExactSums(np.array([int(value * scale) for value in exact], dtype=object), scale)
    places = np.arange(len(exact))
    table = sums.between(places[:, None], places[None, :])
    for first, last in combinations_with_replacement(range(len(exact)), 2):
        assert table[first, last] == float(sums.between(first, last)) == float(exact[last] - exact[first])
