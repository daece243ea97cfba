"""Orders of unlike workers along a pipeline, up to symmetry.

The workers of a component of the network stay side by side; what changes is the order of the components within theirs,
at every level. Components that are alike (the same workers in the same order inside) may be exchanged without a
difference, so only one of each such class of orders is told.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise, product
from math import factorial, prod
from typing import Any

from pipedream.core.hardware.cluster import Cluster

__all__ = ["Orders"]


@dataclass(frozen=True)
class Orders:
    """Some orders of a cluster's workers.

    Attributes:
        orders: the cluster's own comes first.
        kind: which they are, in words; '' where there is but one, up to symmetry.
    """

    orders: tuple[tuple[int, ...], ...]
    kind: str = ""

    @classmethod
    def of(cls, cluster: Cluster, most: int) -> Orders:
        """Returns all orders if they are at most so many; else those with like ones side by side; else one."""
        root = _tree(cluster)
        count = root.count(apart=True)
        if count == 1:
            return cls((tuple(range(cluster.workers)),))
        if count <= most:
            return cls(tuple(root.orders(apart=True)), f"in any of {count} orders of the unlike")
        count = root.count(apart=False)
        own = tuple(range(cluster.workers))
        if count < most:
            others = [order for order in root.orders(apart=False) if order != own]
            return cls((own, *others), f"in the cluster's order or any of {count} with like ones side by side")
        return cls((own,), "in the cluster's order alone")


@dataclass(frozen=True)
class _Node:
    """A component: what it is like whatever the order inside, and its parts, or its one worker."""

    likeness: int
    worker: int = 0
    parts: tuple[_Node, ...] = ()

    def count(self, *, apart: bool) -> int:
        """Returns the number of `orders`."""
        if not self.parts:
            return 1
        alike = Counter(part.likeness for part in self.parts)
        inside = {part.likeness: part.count(apart=apart) for part in self.parts}
        if apart:
            ways: int = factorial(len(self.parts)) // prod(factorial(many) for many in alike.values())
            for likeness, many in alike.items():
                ways *= inside[likeness] ** many
            return ways
        return factorial(len(alike)) * prod(inside.values())

    def orders(self, *, apart: bool) -> Iterator[tuple[int, ...]]:
        """Yields the orders of its workers, its own first; like parts may stand apart, or only side by side."""
        if not self.parts:
            yield (self.worker,)
            return
        alike: dict[int, list[_Node]] = {}
        for part in self.parts:
            alike.setdefault(part.likeness, []).append(part)
        names = list(alike)
        if apart:
            own = tuple(names.index(part.likeness) for part in self.parts)
            rows = [own, *(row for row in _arranged([len(alike[name]) for name in names]) if row != own)]
        else:
            blocks = _arranged([1] * len(names))
            rows = [tuple(kind for kind in row for _ in alike[names[kind]]) for row in blocks]
        for row in rows:
            yield from self._inside(row, [alike[name] for name in names], apart)

    def _inside(self, row: tuple[int, ...], alike: list[list[_Node]], apart: bool) -> Iterator[tuple[int, ...]]:
        taken = [0] * len(alike)
        parts = []
        for kind in row:
            parts.append(alike[kind][taken[kind]])
            taken[kind] += 1
        if apart:
            for choice in product(*(list(part.orders(apart=True)) for part in parts)):
                yield tuple(worker for inside in choice for worker in inside)
            return
        lists = {kind: [list(part.orders(apart=False)) for part in alike[kind]] for kind in set(row)}
        for numbers in product(*(range(len(found[0])) for found in lists.values())):
            chosen = dict(zip(lists, numbers, strict=True))
            taken = [0] * len(alike)
            order: list[int] = []
            for kind in row:
                order += lists[kind][taken[kind]][chosen[kind]]
                taken[kind] += 1
            yield tuple(order)


def _tree(cluster: Cluster) -> _Node:
    known: dict[Any, int] = {}  # a number for each likeness

    def number(likeness: Any) -> int:
        return known.setdefault(likeness, len(known))

    alike = zip(cluster.speeds, cluster.memories, strict=True)
    nodes = [_Node(number(likeness), worker) for worker, likeness in enumerate(alike)]
    below = cluster.starts(0)
    for ends in [*(cluster.starts(level) for level in range(1, len(cluster.levels))), (0, cluster.workers)]:
        places = {start: place for place, start in enumerate(below)}
        grouped = []
        for first, last in pairwise(ends):
            parts = tuple(nodes[places[first] : places[last]])
            grouped.append(_Node(number((len(ends), *sorted(part.likeness for part in parts))), parts=parts))
        nodes, below = grouped, ends
    return nodes[0]


def _arranged(counts: list[int]) -> Iterator[tuple[int, ...]]:
    """Yields each arrangement of so many of each kind, in lexicographic order."""
    if not any(counts):
        yield ()
        return
    for kind, count in enumerate(counts):
        if count:
            rest = [left - (other == kind) for other, left in enumerate(counts)]
            for row in _arranged(rest):
                yield (kind, *row)
