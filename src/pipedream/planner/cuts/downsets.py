"""The places to cut a graph: its downsets, the sets of layers that contain, with a layer, everything that it reads.

A plan is a chain of downsets from no layers to all (Tarnawski and others 2020 call them ideals). Each output that a
layer after the cut still reads crosses the cut once; one that is read two stages later crosses both boundaries.

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
from pipedream.planner.arrays import BoolArray, IntArray


@dataclass(frozen=True, eq=False)
class Lattice:
    """The downsets of a graph that do not separate layers that share a parameter.

    Attributes:
        groups: layers that stay in one stage: single layers, and tied layers with all between them.
    """

    graph: LayerGraph
    groups: tuple[int, ...]

    @classmethod
    def of(cls, graph: LayerGraph) -> Lattice:
        """The groups are in an order in which they can run."""
        count = len(graph.layers)
        if not graph.ties:
            return cls(graph, tuple(1 << i for i in range(count)))
        joined = list(graph.edges)
        for tied in graph.ties:
            joined += [(tied[i - 1], tied[i]) for i in range(len(tied))]  # a cycle, so that each reaches each
        reached = [0] * count
        changed = True
        while changed:
            changed = False
            for source, target in reversed(joined):
                reach = reached[source] | reached[target] | 1 << target
                changed |= reach != reached[source]
                reached[source] = reach
        groups = []
        for i in range(count):
            group = 1 << i | sum(1 << j for j in bit_indices(reached[i]) if reached[j] >> i & 1 and j != i)
            if not group & (1 << i) - 1:
                groups.append(group)
        owner = {i: g for g, group in enumerate(groups) for i in bit_indices(group)}
        edges = {(owner[a], owner[b]) for a, b in graph.edges if owner[a] != owner[b]}
        return cls(graph, tuple(groups[g] for g in in_order(len(groups), sorted(edges))))

    @property
    def everything(self) -> int:
        return (1 << len(self.graph.layers)) - 1

    @cached_property
    def reads(self) -> tuple[int, ...]:
        reads = [0] * len(self.groups)
        for source, target in self.graph.edges:
            reads[self.owner[target]] |= 1 << source
        return tuple(read & ~group for read, group in zip(reads, self.groups, strict=True))

    @cached_property
    def past(self) -> tuple[int, ...]:
        pasts: list[int] = []
        for read in self.reads:
            past = read
            for g in {self.owner[i] for i in bit_indices(read)}:
                past |= pasts[g] | self.groups[g]
            pasts.append(past)
        return tuple(pasts)

    @cached_property
    def consumers(self) -> tuple[int, ...]:
        consumers = [0] * len(self.graph.layers)
        for source, target in self.graph.edges:
            consumers[source] |= 1 << target
        return tuple(consumers)

    def downsets(self, most: int, free: Collection[int] = ()) -> list[int] | None:
        """Returns all downsets, smaller ones first, or None if there are more than `most`. Linear time for a chain.

        Args:
            free: groups that run as soon as they can.
        """
        passed: list[int] = []
        active = [0]
        done = 0
        for g, (group, read, meets) in enumerate(zip(self.groups, self.reads, self._meets, strict=True)):
            if g in free:
                active = [downset | group if downset & read == read else downset for downset in active]
            elif meets:
                passed += active
                active = [done | group]
            else:
                active += [downset | group for downset in active if downset & read == read]
            done |= group
            if len(passed) + len(active) > most:
                return None
        return sorted(passed + active, key=lambda downset: (downset.bit_count(), downset))

    @property
    def is_chain(self) -> bool:
        """There is only one order."""
        return all(self._meets)

    @cached_property
    def _meets(self) -> list[bool]:
        """For each group, whether it is before or after every other one."""
        around = zip(self.past, self.groups, self.future, strict=True)
        return [past | group | future == self.everything for past, group, future in around]

    @cached_property
    def future(self) -> tuple[int, ...]:
        futures = [0] * len(self.groups)
        for g in reversed(range(len(self.groups))):
            onward = futures[g] | self.groups[g]
            for before in {self.owner[i] for i in bit_indices(self.reads[g])}:
                futures[before] |= onward
        return tuple(futures)

    @cached_property
    def owner(self) -> dict[int, int]:
        return {i: g for g, group in enumerate(self.groups) for i in bit_indices(group)}

    def free(self, costs: Sequence[bool], output_bytes: Sequence[int]) -> set[int]:
        """Returns the groups that a plan may run as soon as possible without losing anything.

        They cost nothing, and send no more than what only they read, so a cut after them carries no more bytes than one
        before. (But what they keep for their backward may be in another stage, which matters for memory.)

        Args:
            costs: whether each layer takes time or holds parameters.
        """
        free_groups = set()
        for g, (group, read) in enumerate(zip(self.groups, self.reads, strict=True)):
            if any(costs[i] for i in bit_indices(group)):
                continue
            sent = sum(output_bytes[i] for i in bit_indices(group) if self.consumers[i] & ~group)
            if sent <= sum(output_bytes[i] for i in bit_indices(read) if not self.consumers[i] & ~group):
                free_groups.add(g)
        return free_groups

    def prefixes(self, key: Callable[[int], Any]) -> list[int]:
        """Returns the downsets of one order: of the groups that can run, the one with the smallest key is next."""
        owner = self.owner
        edges = {(owner[a], owner[b]) for a, b in self.graph.edges if owner[a] != owner[b]}
        order = in_order(len(self.groups), sorted(edges), key=key)
        return [0, *accumulate((self.groups[g] for g in order), lambda done, group: done | group)]

    def crossing_bytes(self, downsets: Sequence[int], output_bytes: Sequence[int]) -> IntArray:
        count = len(self.graph.layers)
        inside = bool_rows(downsets, count)
        read = bool_rows(self.consumers, count)
        is_needed = (~inside).astype(np.float32) @ read.T.astype(np.float32) > 0.5  # a layer outside reads it
        crossing: IntArray = np.matmul(inside & is_needed, np.array(output_bytes, dtype=np.int64))
        return crossing


def bit_indices(members: int) -> Iterator[int]:
    """Yields the members of a bit set, in increasing order."""
    while members:
        lowest = members & -members
        yield lowest.bit_length() - 1
        members ^= lowest


def bool_rows(sets: Iterable[int], width: int) -> BoolArray:
    """Returns bit sets of indices below `width` as rows of booleans."""
    size = (width + 7) // 8
    raw = np.frombuffer(b"".join(members.to_bytes(size, "little") for members in sets), dtype=np.uint8)
    return np.unpackbits(raw.reshape(-1, size), axis=1, count=width, bitorder="little").astype(bool)
