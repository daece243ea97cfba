"""The places to cut a graph, and which of them are searched.

They are its downsets: the sets of layers that contain, with each layer, everything that it reads (Tarnawski and others
2020 call them ideals). A plan is a chain of downsets from no layers to all. Each output that a layer after the cut
still reads crosses the cut once; one that is read two stages later crosses both boundaries.

Sets are the bits of an int: bit i for layer i of the graph's order.

If there are too many downsets, those of one order through the narrowest cuts are searched. For given downsets A and B,
the downset D with A in D in B that the fewest bytes cross is a minimum cut of a flow network (a closure problem: Picard
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
from pipedream.core.model.graph import LayerGraph, in_order
from pipedream.core.model.profile import Profile
from pipedream.planner.arrays import BoolArray, IntArray


@dataclass(frozen=True, eq=False)
class Lattice:
    """The downsets of a graph that do not separate layers that share a parameter.

    Attributes:
        groups: sets of layers that stay in one stage: single layers, and tied layers with all between them.
    """

    graph: LayerGraph
    groups: tuple[int, ...]

    @classmethod
    def of(cls, graph: LayerGraph) -> Lattice:
        """Returns the lattice with its groups in an order in which they can run."""
        count = len(graph.layers)
        if not graph.ties:
            return cls(graph, tuple(1 << i for i in range(count)))
        tied_edges = list(graph.edges)
        for tied in graph.ties:
            tied_edges += [(tied[i - 1], tied[i]) for i in range(len(tied))]  # a cycle: each reaches each
        reachable = [0] * count
        changed = True
        while changed:
            changed = False
            for source, target in reversed(tied_edges):
                targets = reachable[source] | reachable[target] | 1 << target
                changed |= targets != reachable[source]
                reachable[source] = targets
        groups = []
        for i in range(count):
            group = 1 << i | sum(1 << j for j in bit_indices(reachable[i]) if reachable[j] >> i & 1 and j != i)
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
        """The layers outside of each group that it reads."""
        reads = [0] * len(self.groups)
        for source, target in self.graph.edges:
            reads[self.owner[target]] |= 1 << source
        return tuple(read & ~group for read, group in zip(reads, self.groups, strict=True))

    @cached_property
    def past(self) -> tuple[int, ...]:
        """The layers that run before each group."""
        pasts: list[int] = []
        for read in self.reads:
            past = read
            for g in {self.owner[i] for i in bit_indices(read)}:
                past |= pasts[g] | self.groups[g]
            pasts.append(past)
        return tuple(pasts)

    @cached_property
    def consumers(self) -> tuple[int, ...]:
        """The layers that read each layer."""
        consumers = [0] * len(self.graph.layers)
        for source, target in self.graph.edges:
            consumers[source] |= 1 << target
        return tuple(consumers)

    def downsets(self, max_count: int, free: Collection[int] = ()) -> list[int] | None:
        """Returns all downsets, smaller ones first, or None if there are more than `max_count`. Linear for a chain.

        Args:
            free: the groups that run as soon as they can.
        """
        passed: list[int] = []
        active = [0]
        done = 0
        rows = zip(self.groups, self.reads, self._is_comparable, strict=True)
        for g, (group, read, is_comparable) in enumerate(rows):
            if g in free:
                active = [downset | group if downset & read == read else downset for downset in active]
            elif is_comparable:
                passed += active
                active = [done | group]
            else:
                active += [downset | group for downset in active if downset & read == read]
            done |= group
            if len(passed) + len(active) > max_count:
                return None
        return sorted(passed + active, key=lambda downset: (downset.bit_count(), downset))

    @property
    def is_chain(self) -> bool:
        """Whether the groups can run in only one order."""
        return all(self._is_comparable)

    @cached_property
    def _is_comparable(self) -> list[bool]:
        """Whether each group is before or after every other one."""
        rows = zip(self.past, self.groups, self.future, strict=True)
        return [past | group | future == self.everything for past, group, future in rows]

    @cached_property
    def future(self) -> tuple[int, ...]:
        """The layers that run after each group."""
        futures = [0] * len(self.groups)
        for g in reversed(range(len(self.groups))):
            onward = futures[g] | self.groups[g]
            for before in {self.owner[i] for i in bit_indices(self.reads[g])}:
                futures[before] |= onward
        return tuple(futures)

    @cached_property
    def owner(self) -> dict[int, int]:
        """The group of each layer."""
        return {i: g for g, group in enumerate(self.groups) for i in bit_indices(group)}

    def free(self, costs: Sequence[bool], output_bytes: Sequence[int]) -> set[int]:
        """Returns the groups that a plan may run as soon as possible without losing time.

        They cost nothing, and send no more bytes than they alone read, so a cut after them carries no more than one
        before them. What they keep for their backward may be in another stage then, which matters for memory.

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
        """Returns the bytes that cross the cut after each downset."""
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


MAX_DOWNSETS = 1500
"""If a graph has more downsets than this, only some are searched (`heuristic_downsets`)."""

_SHARES = 64  # of the compute; the narrowest cut of each is kept


def searched_downsets(lattice: Lattice, profile: Profile, cluster: Cluster) -> tuple[list[int], bool]:
    """Returns the downsets to search, and whether they are complete: no plan on any others is faster.

    Unless a graph is a chain, free layers (`Lattice.free`) run as soon as they can. If memory is limited, what they
    keep matters, so all downsets are searched unless there are too many.
    """
    if lattice.is_chain:
        return lattice.downsets(len(lattice.groups) + 1) or [], True
    if cluster.is_limited and (downsets := lattice.downsets(MAX_DOWNSETS)) is not None:
        return downsets, True
    loss_at = len(profile.layers) - 1 if profile.loss_s else -1
    costs = [bool(layer.forward_s + layer.backward_s + layer.parameter_bytes) for layer in profile.layers]
    costs[loss_at] |= loss_at >= 0
    for layer in {layer for tied in profile.tied for layer in tied.layers}:
        costs[layer] = True
    downsets = lattice.downsets(MAX_DOWNSETS, lattice.free(costs, [layer.output_bytes for layer in profile.layers]))
    if downsets is not None:
        return downsets, not cluster.is_limited
    return heuristic_downsets(lattice, profile), False


def heuristic_downsets(lattice: Lattice, profile: Profile) -> list[int]:
    """Returns the downsets of one good order.

    Between the narrowest cuts, the layer with the least compute on the longest path to it comes first.
    """
    costs_s = [layer.forward_s + layer.backward_s for layer in profile.layers]
    cuts = narrowest_cuts(lattice, costs_s, [layer.output_bytes for layer in profile.layers], _SHARES)
    longest_path_s = [0.0] * len(profile.layers)
    for source, target in sorted(profile.graph.edges):
        longest_path_s[target] = max(longest_path_s[target], longest_path_s[source] + costs_s[source])
    names = [layer.name for layer in profile.graph.layers]

    def rank(g: int) -> tuple[int, float, str]:
        first = next(bit_indices(lattice.groups[g]))
        return sum(not cut >> first & 1 for cut in cuts), longest_path_s[first], names[first]

    return lattice.prefixes(rank)


def narrowest_cuts(lattice: Lattice, costs_s: Sequence[float], output_bytes: Sequence[int], count: int) -> list[int]:
    """Returns, each contained in the next, the narrowest downsets for each of `count` shares of the compute."""
    layers = len(lattice.graph.layers)
    group_s = bool_rows(lattice.groups, layers) @ costs_s
    before_s = bool_rows(lattice.past, layers) @ costs_s + group_s
    after_s = bool_rows(lattice.future, layers) @ costs_s + group_s
    total_s = float(sum(group_s))
    downsets = []
    for share in range(count):
        # A group is inside if all but it and its future is too little; it is outside if it and its past are too much.
        inside = total_s - after_s < total_s * share / count * (1 - 1e-12)
        outside = before_s > total_s * (share + 1) / count * (1 + 1e-12)
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

    def find_node(group: int) -> int:
        members = lattice.groups[group]
        return source if members & low else group if members & high else sink

    def connect(a: int, b: int, limit: int) -> None:
        if a != b and a != sink and b != source:
            capacity.setdefault(a, {})
            capacity.setdefault(b, {}).setdefault(a, 0)
            capacity[a][b] = capacity[a].get(b, 0) + limit

    owner = lattice.owner
    outputs = len(lattice.groups)  # numbered after the nodes of groups
    for g, read in enumerate(lattice.reads):
        for i in bit_indices(read & high & ~low):
            connect(find_node(g), owner[i], no_limit)
    for i in bit_indices(high):
        readers = lattice.consumers[i]
        if readers & ~low:
            connect(find_node(owner[i]), outputs + i, output_bytes[i])
            for reader in {find_node(owner[j]) for j in bit_indices(readers)}:
                connect(outputs + i, reader, no_limit)
    while (reachable := _augment(capacity, source, sink)) is None:
        pass
    return low | sum(lattice.groups[g] for g in reachable if 0 <= g < outputs)


def _augment(capacity: dict[int, dict[int, int]], source: int, sink: int) -> set[int] | None:
    """Augments the flow along a shortest path (Edmonds and Karp 1972). Returns the reachable nodes if there is none."""
    parents = {source: source}
    waiting = deque([source])
    while waiting and sink not in parents:
        node = waiting.popleft()
        for neighbour, spare in capacity[node].items():
            if spare and neighbour not in parents:
                parents[neighbour] = node
                waiting.append(neighbour)
    if sink not in parents:
        return set(parents)
    path = [sink]
    while path[-1] != source:
        path.append(parents[path[-1]])
    steps = list(zip(path[1:], path[:-1], strict=True))
    flow = min(capacity[a][b] for a, b in steps)
    for a, b in steps:
        capacity[a][b] -= flow
        capacity[b][a] += flow
    return None
