"""What a rank of a mesh takes, with its collectives over the links of a cluster.

Plans and simulations know a mesh only by the profile of one of its ranks.
"""

from collections.abc import Iterable
from dataclasses import replace
from math import prod

from pipedream.core.errors import PlanError
from pipedream.core.hardware.cluster import Cluster
from pipedream.core.model.collective import Collective
from pipedream.core.model.profile import LayerProfile, Profile
from pipedream.core.plan.cost import SumLink
from pipedream.core.plan.ranks import Mesh


def profile_of_rank(profile: Profile, mesh: Mesh, cluster: Cluster, reach: tuple[int, ...] | None = None) -> Profile:
    """Returns the profile of one rank of a mesh, with its collectives.

    Args:
        cluster: its workers are ranks.
        reach: `reach_of` the worker; by default that of the first ranks.

    Raises:
        PlanError: the profile does not know the mesh.
    """
    rank_profile = next((rank for rank in profile.ranks if Mesh(rank.mesh) == mesh), None)
    if rank_profile is None:
        meshes = ", ".join(rank.mesh for rank in profile.ranks) or "none"
        raise PlanError(
            f"a plan with the mesh {mesh} was asked for, but the profile has no measurement of one of its ranks "
            f"(meshes that it has: {meshes}); profile with meshes=({mesh.text!r},) and the layout, or --mesh {mesh}"
        )
    levels = reach_of(mesh, cluster) if reach is None else reach
    level = dict(zip(mesh.dimensions, levels, strict=True))

    def sum_seconds(rows: Iterable[Collective], *, fixed: bool = False) -> float:
        """Returns the seconds of collectives; `fixed`: only those that a smaller microbatch does not save."""
        total_s = 0.0
        for row in rows:
            size_bytes = row.size_bytes if row.of_weights or not fixed else 0
            over = row.over.split("+")
            ranks = prod(mesh.dimensions[dimension] for dimension in over)
            link = SumLink.across(cluster, max(map(level.__getitem__, over)))
            total_s += float(link.collective_s(row.kind, row.count, size_bytes, ranks))
        return total_s

    def with_collectives(
        layer: LayerProfile, forward: tuple[Collective, ...], backward: tuple[Collective, ...]
    ) -> LayerProfile:
        return replace(
            layer,
            forward_s=layer.forward_s + sum_seconds(forward),
            backward_s=layer.backward_s + sum_seconds(backward),
            forward_fixed_s=layer.forward_fixed_s + sum_seconds(forward, fixed=True),
            backward_fixed_s=layer.backward_fixed_s + sum_seconds(backward, fixed=True),
        )

    rank = profile.of_rank(rank_profile)
    layers = tuple(map(with_collectives, rank_profile.layers, rank_profile.forward, rank_profile.backward))
    return replace(rank, layers=layers, update_s=rank.update_s + sum_seconds(rank_profile.update))


def reach_of(mesh: Mesh, cluster: Cluster, first: int = 0) -> tuple[int, ...]:
    """Returns, for each dimension of a mesh, the outermost level that its collectives cross.

    Args:
        cluster: its workers are ranks.
        first: the mesh's first rank.
    """
    sizes = list(mesh.dimensions.values())
    reaches = []
    for i, size in enumerate(sizes):
        step = prod(sizes[i + 1 :])
        last = min(first + (size - 1) * step, cluster.workers - 1)
        reaches.append(cluster.reach(*range(first, last + 1, step)))
    return tuple(reaches)
