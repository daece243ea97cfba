"""Chunks of weights, of which the largest values are sent: how many they are, and the bytes of their code.

A weight's values are taken row by row, in chunks of 4,096 whose last one may be shorter. Of each chunk are sent two
scales in float32 and, for each value that is kept, an index of 12 bits and 2 bits that say which number arrives.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from math import ceil

CHUNK = 4096
SCALES = 2
INDEX_BITS, VALUE_BITS = 12, 2
_SCALE_BYTES = 4
_BYTES_OF_FOUR = 4 * (INDEX_BITS + VALUE_BITS) // 8


@dataclass(frozen=True)
class Chunks:
    """Chunks of one size.

    Attributes:
        begin: of the first one, in its weight.
        kept: values that are sent of each.
    """

    begin: int
    count: int
    size: int
    kept: int


def divide(values: int, share: float) -> list[Chunks]:
    """Returns the chunks of a weight: full ones, and what remains. At least one value of each is kept."""
    full, rest = divmod(values, CHUNK)
    rows = [Chunks(0, full, CHUNK, ceil(share * CHUNK)), Chunks(full * CHUNK, 1, rest, ceil(share * rest))]
    return [row for row in rows if row.count and row.size]


def count_bytes(chunks: Iterable[Chunks]) -> int:
    """Returns the bytes of a code; the kept values come in fours, of 7 bytes."""
    rows = list(chunks)
    scales, kept = sum(row.count for row in rows), sum(row.count * row.kept for row in rows)
    return _SCALE_BYTES * SCALES * scales + _BYTES_OF_FOUR * -(-kept // 4)
