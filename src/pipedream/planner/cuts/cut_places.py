"""Which of a graph's cuts are searched."""

from __future__ import annotations

from pipedream.core.hardware.cluster import Cluster
from pipedream.core.model.profile import Profile
from pipedream.planner.cuts.downsets import Lattice, bits
from pipedream.planner.cuts.min_cuts import waists

__all__ = ["MOST_PLACES", "candidates", "places"]

MOST_PLACES = 1500
"""Of a graph with more downsets than this some are chosen (`candidates`)."""

_WAISTS = 64


def places(lattice: Lattice, profile: Profile, cluster: Cluster) -> tuple[list[int], bool]:
    """Returns the downsets to search, and whether no plan on any others is faster.

    A chain, and whatever has only the downsets of one order, is searched at all of them. Elsewhere layers that are
    free (`Lattice.free`) are run as soon as they can be; where memory is limited, what they keep may matter, and all
    downsets are searched unless they are too many.
    """
    if lattice.is_chain:
        return lattice.downsets(len(lattice.groups) + 1) or [], True
    if cluster.is_limited and (found := lattice.downsets(MOST_PLACES)) is not None:
        return found, True
    loss_at = len(profile.layers) - 1 if profile.loss_s else -1
    costs = [bool(layer.forward_s + layer.backward_s + layer.parameter_bytes) for layer in profile.layers]
    costs[loss_at] |= loss_at >= 0
    found = lattice.downsets(MOST_PLACES, lattice.free(costs, [layer.output_bytes for layer in profile.layers]))
    if found is not None:
        return found, not cluster.is_limited
    return candidates(lattice, profile), False


def candidates(lattice: Lattice, profile: Profile) -> list[int]:
    """Returns good downsets of a graph that has too many: those of one order, through its waists (`waists`).

    Between two of them branches run side by side: of the layers that can run the one comes first that the least
    compute must come before, on the longest way to it.
    """
    costs_s = [layer.forward_s + layer.backward_s for layer in profile.layers]
    narrow = waists(lattice, costs_s, [layer.output_bytes for layer in profile.layers], _WAISTS)
    before = [0.0] * len(profile.layers)
    for source, target in sorted(profile.graph.edges):
        before[target] = max(before[target], before[source] + costs_s[source])
    names = [layer.name for layer in profile.graph.layers]

    def key(g: int) -> tuple[int, float, str]:
        first = next(bits(lattice.groups[g]))
        return sum(not waist >> first & 1 for waist in narrow), before[first], names[first]

    return lattice.prefixes(key)
