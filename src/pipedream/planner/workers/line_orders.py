"""Orders of the workers of a mixed cluster along a pipeline, up to symmetry.

Components of the network stay together. Of orders that differ only by swapping like components, one is returned.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise, product
from math import factorial, prod

from pipedream.core.hardware.cluster import Cluster


@dataclass(frozen=True)
class LineOrders:
    """Some orders of a cluster's workers.

    Attributes:
        orders: the cluster's own comes first.
        kind: in words; '' if there is only one order.
    """

    orders: tuple[tuple[int, ...], ...]
    kind: str = ""

    @classmethod
    def of(cls, cluster: Cluster, most: int) -> LineOrders:
        """Returns all orders if there are at most `most`; else those that keep like parts adjacent; else only one."""
        root = _build_tree(cluster)
        count = root.count(apart=True)
        if count == 1:
            return cls((tuple(range(cluster.workers)),))
        if count <= most:
            return cls(tuple(root.orders(apart=True)), f"in any of {count} orders of those that differ")
        count = root.count(apart=False)
        plain = tuple(range(cluster.workers))
        if count < most:
            others = [order for order in root.orders(apart=False) if order != plain]
            return cls((plain, *others), f"in the cluster's order or any of {count} that keep like ones adjacent")
        return cls((plain,), "in the cluster's order only")


@dataclass(frozen=True)
class _Node:
    """A component, with its parts, or a worker. Components of equal likeness differ at most in their order."""

    likeness: int
    worker: int = 0
    parts: tuple[_Node, ...] = ()

    def count(self, *, apart: bool) -> int:
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
        """Its own first; with `apart`, also those that separate like parts."""
        if not self.parts:
            yield (self.worker,)
            return
        alike: dict[int, list[_Node]] = {}
        for part in self.parts:
            alike.setdefault(part.likeness, []).append(part)
        names = list(alike)
        if apart:
            original = tuple(names.index(part.likeness) for part in self.parts)
            rows = [original, *(row for row in _arrange([len(alike[name]) for name in names]) if row != original)]
        else:
            blocks = _arrange([1] * len(names))
            rows = [tuple(kind for kind in row for _ in alike[names[kind]]) for row in blocks]
        for row in rows:
            yield from self._expand(row, [alike[name] for name in names], apart)

    def _expand(self, row: tuple[int, ...], alike: list[list[_Node]], apart: bool) -> Iterator[tuple[int, ...]]:
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
        for numbers in product(*(range(len(orders[0])) for orders in lists.values())):
            chosen = dict(zip(lists, numbers, strict=True))
            taken = [0] * len(alike)
            order: list[int] = []
            for kind in row:
                order += lists[kind][taken[kind]][chosen[kind]]
                taken[kind] += 1
            yield tuple(order)


def _build_tree(cluster: Cluster) -> _Node:
    numbers: dict[tuple[object, ...], int] = {}  # a number for each likeness

    def number(likeness: tuple[object, ...]) -> int:
        return numbers.setdefault(likeness, len(numbers))

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


def _arrange(counts: list[int]) -> Iterator[tuple[int, ...]]:
    """Yields each arrangement of `counts[k]` items of each kind k, in lexicographic order."""
    if not any(counts):
        yield ()
        return
    for kind, count in enumerate(counts):
        if count:
            rest = [left - (other == kind) for other, left in enumerate(counts)]
            for row in _arrange(rest):
                yield (kind, *row)
