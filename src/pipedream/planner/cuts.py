"""The places to cut a graph, and which of them are searched.

They are its downsets, the sets of layers that contain, with a layer, everything that it reads.

A plan is a chain of downsets from no layers to all (Tarnawski and others 2020 call them ideals). Each output that a
layer after the cut still reads crosses the cut once; one that is read two stages later crosses both boundaries.

Sets are the bits of an int: bit i for layer i of the graph's order.

If there are too many downsets, those of one order through the narrowest cuts are searched. The downset D with A in D in
B, for given downsets A and B, that the fewest bytes cross is a minimum cut of a flow network (a closure problem: Picard
1976). If a layer is in D, so is everything that it reads (edges without limit), and the bytes of its output are paid
unless all its readers are in D (an edge to a node for the output, which has edges without limit to the readers). Of
several minimum cuts the smallest is taken, so the cuts for growing A and B grow too, because the crossing bytes are
submodular.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any

import numpy as np

from pipedream.core.hardware.cluster import Cluster
from pipedream.core.model.graph import LayerGraph
from pipedream.core.model.graph_txt import in_order
from pipedream.core.model.profile import Profile
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


MOST_DOWNSETS = 1500
"""If a graph has more downsets than this, only some are searched (`heuristic_downsets`)."""

_SHARES = 64


def searched_downsets(lattice: Lattice, profile: Profile, cluster: Cluster) -> tuple[list[int], bool]:
    """Returns the downsets to search, and whether they are complete: no plan on any others is faster.

    Unless a graph is a chain, free layers (`Lattice.free`) run as soon as they can. If memory is limited, it matters
    what they keep, so all downsets are searched unless there are too many.
    """
    if lattice.is_chain:
        return lattice.downsets(len(lattice.groups) + 1) or [], True
    if cluster.is_limited and (downsets := lattice.downsets(MOST_DOWNSETS)) is not None:
        return downsets, True
    loss_at = len(profile.layers) - 1 if profile.loss_s else -1
    costs = [bool(layer.forward_s + layer.backward_s + layer.parameter_bytes) for layer in profile.layers]
    costs[loss_at] |= loss_at >= 0
    for layer in {layer for tied in profile.tied for layer in tied.layers}:
        costs[layer] = True
    downsets = lattice.downsets(MOST_DOWNSETS, lattice.free(costs, [layer.output_bytes for layer in profile.layers]))
    if downsets is not None:
        return downsets, not cluster.is_limited
    return heuristic_downsets(lattice, profile), False


def heuristic_downsets(lattice: Lattice, profile: Profile) -> list[int]:
    """Returns the downsets of one good order.

    Between the narrowest cuts, the layer with the least compute on the longest path to it comes first.
    """
    costs_s = [layer.forward_s + layer.backward_s for layer in profile.layers]
    cuts = narrowest_cuts(lattice, costs_s, [layer.output_bytes for layer in profile.layers], _SHARES)
    before = [0.0] * len(profile.layers)
    for source, target in sorted(profile.graph.edges):
        before[target] = max(before[target], before[source] + costs_s[source])
    names = [layer.name for layer in profile.graph.layers]

    def key(g: int) -> tuple[int, float, str]:
        first = next(bit_indices(lattice.groups[g]))
        return sum(not cut >> first & 1 for cut in cuts), before[first], names[first]

    return lattice.prefixes(key)


def narrowest_cuts(lattice: Lattice, costs_s: Sequence[float], output_bytes: Sequence[int], count: int) -> list[int]:
    """Returns, each contained in the next, the narrowest downsets for each of `count` shares of the compute."""
    layers = len(lattice.graph.layers)
    group_s = bool_rows(lattice.groups, layers) @ costs_s
    before = bool_rows(lattice.past, layers) @ costs_s + group_s
    after = bool_rows(lattice.future, layers) @ costs_s + group_s
    total = float(sum(group_s))
    downsets = []
    for share in range(count):
        # A group is in if leaving it and its future out would leave too little; it is out if its past needs too much.
        inside = total - after < total * share / count * (1 - 1e-12)
        outside = before > total * (share + 1) / count * (1 + 1e-12)
        if not (inside & outside).any():
            low = sum(group for group, is_in in zip(lattice.groups, inside, strict=True) if is_in)
            high = sum(group for group, is_out in zip(lattice.groups, outside, strict=True) if not is_out)
            downsets.append(min_cut_downset(lattice, low, high, output_bytes))
    return sorted(set(downsets), key=int.bit_count)


def min_cut_downset(lattice: Lattice, low: int, high: int, output_bytes: Sequence[int]) -> int:
    """Returns, of the downsets between `low` and `high` that the fewest bytes cross, the smallest."""
    source, sink = -1, -2
    capacity: dict[int, dict[int, int]] = {source: {}, sink: {}}
    no_limit = sum(output_bytes) + 1

    def node(group: int) -> int:
        members = lattice.groups[group]
        return source if members & low else group if members & high else sink

    def join(a: int, b: int, limit: int) -> None:
        if a != b and a != sink and b != source:
            capacity.setdefault(a, {})
            capacity.setdefault(b, {}).setdefault(a, 0)
            capacity[a][b] = capacity[a].get(b, 0) + limit

    owner = lattice.owner
    outputs = len(lattice.groups)  # numbered after the nodes of groups
    for g, read in enumerate(lattice.reads):
        for i in bit_indices(read & high & ~low):
            join(node(g), owner[i], no_limit)
    for i in bit_indices(high):
        readers = lattice.consumers[i]
        if readers & ~low:
            join(node(owner[i]), outputs + i, output_bytes[i])
            for reader in {node(owner[j]) for j in bit_indices(readers)}:
                join(outputs + i, reader, no_limit)
    while (reached := _augment(capacity, source, sink)) is None:
        pass
    return low | sum(lattice.groups[g] for g in reached if 0 <= g < outputs)


def _augment(capacity: dict[int, dict[int, int]], source: int, sink: int) -> set[int] | None:
    """Augments the flow along a shortest path (Edmonds and Karp 1972); if there is none, the reachable nodes."""
    came_from = {source: source}
    waiting = deque([source])
    while waiting and sink not in came_from:
        here = waiting.popleft()
        for there, left in capacity[here].items():
            if left and there not in came_from:
                came_from[there] = here
                waiting.append(there)
    if sink not in came_from:
        return set(came_from)
    path = [sink]
    while path[-1] != source:
        path.append(came_from[path[-1]])
    steps = list(zip(path[1:], path[:-1], strict=True))
    most = min(capacity[a][b] for a, b in steps)
    for a, b in steps:
        capacity[a][b] -= most
        capacity[b][a] += most
    return None
