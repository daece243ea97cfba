"""Which of a graph's cuts are searched: all, or those of one order through the narrowest cuts if there are too many.

The downset D with A in D in B, for given downsets A and B, that the fewest bytes cross is a minimum cut of a flow
network (a closure problem: Picard 1976). If a layer is in D, so is everything that it reads (edges without limit), and
the bytes of its output are paid unless all its readers are in D (an edge to a node for the output, which has edges
without limit to the readers). Of several minimum cuts the smallest is taken, so the cuts for growing A and B grow too,
because the crossing bytes are submodular.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from pipedream.core.hardware.cluster import Cluster
from pipedream.core.model.profile import Profile
from pipedream.planner.cuts.downsets import Lattice, bit_indices, bool_rows

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
