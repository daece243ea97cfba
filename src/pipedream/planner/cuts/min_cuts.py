"""Waists of a graph: the cuts that the fewest bytes cross, one for each share of the compute before them.

A downset D with A in D in B for given downsets A and B, across which the fewest bytes go, is a minimum cut of a flow
network (a closure problem: Picard 1976): if a layer is in D, so is all that it reads (edges without limit), and the
bytes of its output are paid unless all its readers are in D (an edge to a node of the output, which has edges without
limit to the readers). Of minimum cuts the smallest is taken; those of rising A and B then rise too, because bytes
that cross are submodular.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from pipedream.planner.cuts.downsets import Lattice, bits, rows

__all__ = ["least_crossing", "waists"]


def waists(lattice: Lattice, costs_s: Sequence[float], output_bytes: Sequence[int], count: int) -> list[int]:
    """Returns downsets, each within the next: the narrowest ones of `count` shares of the compute.

    Args:
        lattice: of the graph.
        costs_s: seconds of each layer.
        output_bytes: of each layer.
        count: of shares; where no downset may end within one, it has none.
    """
    layers = len(lattice.graph.layers)
    own = rows(lattice.groups, layers) @ costs_s
    before = rows(lattice.past, layers) @ costs_s + own
    behind = rows(lattice.future, layers) @ costs_s + own
    total = float(sum(own))
    found = []
    for share in range(count):
        # A group whose absence, with all behind it, leaves too little is in; one that needs too much before it is out.
        inside = total - behind < total * share / count * (1 - 1e-12)
        outside = before > total * (share + 1) / count * (1 + 1e-12)
        if not (inside & outside).any():
            low = sum(group for group, is_in in zip(lattice.groups, inside, strict=True) if is_in)
            high = sum(group for group, is_out in zip(lattice.groups, outside, strict=True) if not is_out)
            found.append(least_crossing(lattice, low, high, output_bytes))
    return sorted(set(found), key=int.bit_count)


def least_crossing(lattice: Lattice, low: int, high: int, output_bytes: Sequence[int]) -> int:
    """Returns the smallest of the downsets between two others that the fewest bytes cross."""
    source, sink = -1, -2
    room: dict[int, dict[int, int]] = {source: {}, sink: {}}
    no_limit = sum(output_bytes) + 1

    def node(group: int) -> int:
        held = lattice.groups[group]
        return source if held & low else group if held & high else sink

    def join(a: int, b: int, limit: int) -> None:
        if a != b and a != sink and b != source:
            room.setdefault(a, {})
            room.setdefault(b, {}).setdefault(a, 0)
            room[a][b] = room[a].get(b, 0) + limit

    owner = lattice.owner
    outputs = len(lattice.groups)  # nodes of outputs are numbered behind those of groups
    for g, read in enumerate(lattice.reads):
        for i in bits(read & high & ~low):
            join(node(g), owner[i], no_limit)
    for i in bits(high):
        readers = lattice.consumers[i]
        if readers & ~low:
            join(node(owner[i]), outputs + i, output_bytes[i])
            for reader in {node(owner[j]) for j in bits(readers)}:
                join(outputs + i, reader, no_limit)
    while (reached := _augment(room, source, sink)) is None:
        pass
    return low | sum(lattice.groups[g] for g in reached if 0 <= g < outputs)


def _augment(room: dict[int, dict[int, int]], source: int, sink: int) -> set[int] | None:
    """Sends what a shortest path has room for (Edmonds and Karp 1972); where there is none, returns what is reached."""
    came = {source: source}
    waiting = deque([source])
    while waiting and sink not in came:
        here = waiting.popleft()
        for there, left in room[here].items():
            if left and there not in came:
                came[there] = here
                waiting.append(there)
    if sink not in came:
        return set(came)
    path = [sink]
    while path[-1] != source:
        path.append(came[path[-1]])
    steps = list(zip(path[1:], path[:-1], strict=True))
    most = min(room[a][b] for a, b in steps)
    for a, b in steps:
        room[a][b] -= most
        room[b][a] += most
    return None
