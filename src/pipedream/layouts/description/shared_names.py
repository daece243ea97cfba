"""Gives dimensions that operators connect one name in all lines, where each line has index names of its own."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from pipedream.layouts.description.operator import Operator
from pipedream.layouts.description.text import rename_indices

_Place = tuple[str | int, str | int]
"""A tensor and a dimension, or the number of an operator and an index."""


def share_names(
    tensors: Mapping[str, tuple[int, ...]], groups: Sequence[Sequence[str]], operators: Sequence[Operator]
) -> str:
    """Returns the operators' text with shared names of indices.

    An index and the dimensions that it runs over have one name, unless an operator would then have two indices, or a
    tensor two dimensions, of this name; lines are connected in their order. Names are those of a tensor and a
    dimension, such as `w_0`.

    Args:
        groups: tensors that share a layout; their dimensions have the same names.
    """
    first = {tensor: group[0] for group in groups for tensor in group}
    classes = _Connected()
    for number, operator in enumerate(operators):
        for access in operator.accesses:
            for at, (index, size) in enumerate(zip(access.indices, tensors[access.tensor], strict=True)):
                if (name := operator.outermost(index, size)) is not None:
                    classes.join((first[access.tensor], at), (number, name))
    names: dict[_Place, str] = {}  # of each class
    for tensor in tensors:
        for at in range(len(tensors[tensor])):
            names.setdefault(classes.find((first[tensor], at)), f"{tensor}_{at}")
    taken = set(names.values())
    lines = []
    for number, operator in enumerate(operators):
        shared = {}
        for letter in operator.sizes:
            place = classes.find((number, letter))
            if place not in names:  # it runs over no whole dimension
                name = f"{operator.result}_{letter}"
                while name in taken:
                    name += "_"
                taken.add(name)
                names[place] = name
            shared[letter] = names[place]
        lines.append(rename_indices(operator.line, shared))
    return "\n".join(lines)


class _Connected:
    """Classes of places, each with at most one place of an operator or tensor."""

    def __init__(self) -> None:
        self._of: dict[_Place, _Place] = {}
        self._places: dict[_Place, list[_Place]] = {}
        self._owners: dict[_Place, set[str | int]] = defaultdict(set)

    def find(self, place: _Place) -> _Place:
        """Returns the place that stands for its class."""
        if place not in self._of:
            self._of[place], self._places[place], self._owners[place] = place, [place], {place[0]}
        return self._of[place]

    def join(self, place: _Place, other: _Place) -> None:
        """Makes one class of two, unless it would have two places of an operator or tensor."""
        kept, moved = sorted((self.find(place), self.find(other)), key=lambda place: -len(self._places[place]))
        if kept == moved or self._owners[kept] & self._owners[moved]:
            return
        self._owners[kept] |= self._owners.pop(moved)
        self._of |= dict.fromkeys(self._places[moved], kept)
        self._places[kept] += self._places.pop(moved)
