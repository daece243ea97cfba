"""The cuts of a graph of layers, and which of them are searched."""

from pipedream.planner.cuts.cut_selection import searched_downsets
from pipedream.planner.cuts.downsets import Lattice, bit_indices, bool_rows

__all__ = [
    "Lattice",
    "bit_indices",
    "bool_rows",
    "searched_downsets",
]
