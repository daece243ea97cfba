"""Where a graph may be cut: the sets of layers that hold, with a layer, all that it reads from (downsets).

A stage is the difference of two downsets, a plan a chain of them from nothing to all layers (Tarnawski and others 2020
call them ideals). Across a cut goes each output that a layer behind it still reads, once, however many read it; one
that is read two stages on is relayed, so it crosses both boundaries. An output that nobody reads stays where it is.

Sets are the bits of an int: bit i for layer i of the graph's order.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any

import numpy as np

from pipedream.core.model.graph import LayerGraph
from pipedream.core.model.graph_txt import in_order

__all__ = ["Lattice", "bits", "rows"]


@dataclass(frozen=True, eq=False)
class Lattice:
    """The downsets of a graph that part no layers that share a parameter.

    Attributes:
        graph: as given.
        groups: the layers that stay in one stage, as sets: one layer each, but for ties, with what lies between them.
    """

    graph: LayerGraph
    groups: tuple[int, ...]

    @classmethod
    def of(cls, graph: LayerGraph) -> Lattice:
        """Returns the lattice of a graph, its groups in an order in which they can run."""
        count = len(graph.layers)
        if not graph.ties:
            return cls(graph, tuple(1 << i for i in range(count)))
        joined = list(graph.edges)
        for tied in graph.ties:
            joined += [(tied[i - 1], tied[i]) for i in range(len(tied))]  # around: each is reached from each
        behind = [0] * count
        changed = True
        while changed:
            changed = False
            for source, target in reversed(joined):
                found = behind[source] | behind[target] | 1 << target
                changed |= found != behind[source]
                behind[source] = found
        groups = []
        for i in range(count):
            group = 1 << i | sum(1 << j for j in bits(behind[i]) if behind[j] >> i & 1 and j != i)
            if not group & (1 << i) - 1:
                groups.append(group)
        owner = {i: g for g, group in enumerate(groups) for i in bits(group)}
        edges = {(owner[a], owner[b]) for a, b in graph.edges if owner[a] != owner[b]}
        return cls(graph, tuple(groups[g] for g in in_order(len(groups), sorted(edges))))

    @property
    def everything(self) -> int:
        """All layers."""
        return (1 << len(self.graph.layers)) - 1

    @cached_property
    def reads(self) -> tuple[int, ...]:
        """The layers outside of each group that it reads from."""
        found = [0] * len(self.groups)
        for source, target in self.graph.edges:
            found[self.owner[target]] |= 1 << source
        return tuple(read & ~group for read, group in zip(found, self.groups, strict=True))

    @cached_property
    def past(self) -> tuple[int, ...]:
        """The layers that must have run before each group."""
        found: list[int] = []
        for read in self.reads:
            past = read
            for g in {self.owner[i] for i in bits(read)}:
                past |= found[g] | self.groups[g]
            found.append(past)
        return tuple(found)

    @cached_property
    def consumers(self) -> tuple[int, ...]:
        """The layers that read each layer's output."""
        found = [0] * len(self.graph.layers)
        for source, target in self.graph.edges:
            found[source] |= 1 << target
        return tuple(found)

    def downsets(self, most: int, free: Collection[int] = ()) -> list[int] | None:
        """Returns all downsets, smaller ones first, or None where there are more than `most`.

        Each group in turn is added to each downset of those before it that holds what it reads. Where a group is
        before or behind every other one, only the downset of all before it can go on: so chains take linear time.

        Args:
            most: to find.
            free: groups that are in each downset that holds what they read.
        """
        passed: list[int] = []
        active = [0]
        done = 0
        for g, (group, read, meets) in enumerate(zip(self.groups, self.reads, self._meets, strict=True)):
            if g in free:
                active = [found | group if found & read == read else found for found in active]
            elif meets:
                passed += active
                active = [done | group]
            else:
                active += [found | group for found in active if found & read == read]
            done |= group
            if len(passed) + len(active) > most:
                return None
        return sorted(passed + active, key=lambda found: (found.bit_count(), found))

    @property
    def is_chain(self) -> bool:
        """Whether its downsets are those of one order: each group is before or behind every other one."""
        return all(self._meets)

    @cached_property
    def _meets(self) -> list[bool]:
        """Whether a group is before or behind every other one."""
        around = zip(self.past, self.groups, self.future, strict=True)
        return [past | group | future == self.everything for past, group, future in around]

    @cached_property
    def future(self) -> tuple[int, ...]:
        """The layers that run only after each group."""
        found = [0] * len(self.groups)
        for g in reversed(range(len(self.groups))):
            whole = found[g] | self.groups[g]
            for before in {self.owner[i] for i in bits(self.reads[g])}:
                found[before] |= whole
        return tuple(found)

    @cached_property
    def owner(self) -> dict[int, int]:
        """The group of each layer."""
        return {i: g for g, group in enumerate(self.groups) for i in bits(group)}

    def free(self, costs: Sequence[bool], output_bytes: Sequence[int]) -> set[int]:
        """Returns the groups that a plan may run as soon as it can, and lose nothing.

        They cost nothing, and send no more than what they alone read: a cut behind them carries no more bytes than
        one before them, whatever else it parts. As each keeps the chain of cuts a chain, the best plan among those
        that run them so has the period, the bytes over boundaries and the stages of the best plan of all. (Only what
        they keep for their backward, memory that is, may be in another stage.)

        Args:
            costs: of each layer, whether it takes time or holds parameters.
            output_bytes: of each layer.
        """
        found = set()
        for g, (group, read) in enumerate(zip(self.groups, self.reads, strict=True)):
            if any(costs[i] for i in bits(group)):
                continue
            sent = sum(output_bytes[i] for i in bits(group) if self.consumers[i] & ~group)
            if sent <= sum(output_bytes[i] for i in bits(read) if not self.consumers[i] & ~group):
                found.add(g)
        return found

    def prefixes(self, key: Callable[[int], Any]) -> list[int]:
        """Returns the downsets of an order in which the groups can run: of those that can, the smallest key first."""
        owner = self.owner
        edges = {(owner[a], owner[b]) for a, b in self.graph.edges if owner[a] != owner[b]}
        order = in_order(len(self.groups), sorted(edges), key=key)
        return [0, *accumulate((self.groups[g] for g in order), lambda done, group: done | group)]

    def crossing_bytes(self, downsets: Sequence[int], output_bytes: Sequence[int]) -> Any:
        """Returns the bytes that cross each of these cuts, given those of each layer's output."""
        count = len(self.graph.layers)
        inside = rows(downsets, count)
        read = rows(self.consumers, count)
        waits = (~inside).astype(np.float32) @ read.T.astype(np.float32) > 0.5  # is read by a layer outside
        return (inside & waits) @ np.array(output_bytes, dtype=np.int64)


def bits(held: int) -> Iterator[int]:
    """Yields the members of a set, rising."""
    while held:
        lowest = held & -held
        yield lowest.bit_length() - 1
        held ^= lowest


def rows(sets: Iterable[int], width: int) -> Any:
    """Returns sets of indices below `width` as rows of booleans."""
    size = (width + 7) // 8
    raw = np.frombuffer(b"".join(held.to_bytes(size, "little") for held in sets), dtype=np.uint8)
    return np.unpackbits(raw.reshape(-1, size), axis=1, count=width, bitorder="little").astype(bool)
