"""Weights by shape, as a profile says them: what a rule for matrices does to a model follows from it."""

from collections.abc import Iterable
from typing import NamedTuple


class Matrices(NamedTuple):
    """Weights of one shape, as matrices of their first dimension and all others.

    Attributes:
        size_bytes: the sum over all.
    """

    rows: int
    columns: int
    tensors: int
    size_bytes: int


def join_matrices(matrices: Iterable[Matrices]) -> tuple[Matrices, ...]:
    """Returns the same weights, each shape once."""
    joined: dict[tuple[int, int], Matrices] = {}
    for rows, columns, tensors, size_bytes in matrices:
        _, _, other_tensors, other_bytes = joined.get((rows, columns), Matrices(rows, columns, 0, 0))
        joined[rows, columns] = Matrices(rows, columns, other_tensors + tensors, other_bytes + size_bytes)
    return tuple(joined.values())
