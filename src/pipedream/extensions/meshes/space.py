"""The search space of stages with meshes: what layers cost as a stage on replicas of a mesh of ranks.

A stage may have a single rank, or one of the meshes, with its rules, whose rank the profile knows (`Profile.ranks`):
plans and simulations know a mesh only by the profile of one of its ranks. Workers take consecutive ranks. A worker lies
within one machine (or other group of a cluster) or fills several.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from itertools import accumulate
from math import prod
from typing import NamedTuple, Self

import numpy as np

from pipedream.core.errors import PlanError
from pipedream.core.hardware.cluster import Cluster
from pipedream.core.model.profile import Collective, LayerProfile, Profile
from pipedream.core.plan.cost import EXCHANGE, Numbers, Site, SumLink
from pipedream.core.plan.plan import Plan
from pipedream.core.plan.ranks import Mesh
from pipedream.extensions.meshes.layout import boundary_bytes
from pipedream.extensions.meshes.workers import may_be_worker, of_workers
from pipedream.planner.arrays import IntArray, Tables
from pipedream.planner.tables.search_space import SearchSpace


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
            total_s += float(_collective_s(link, row.kind, row.count, size_bytes, ranks))
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


def _collective_s(link: SumLink, kind: str, count: int, size_bytes: int, ranks: int) -> Numbers:
    """Returns the seconds of several collectives (`core.model.profile.Collective`).

    An all-gather, a reduce-scatter or an all-to-all takes (n - 1) (l + b / (n B)): n - 1 steps with a part each. An
    exchange, whose bytes all go to other ranks, takes (n - 1) l + b / B.
    """
    if kind == EXCHANGE:
        return count * (ranks - 1) * link.latency_s + size_bytes / link.bytes_per_s
    if kind == "all-reduce":
        return count * link.all_reduce_s(size_bytes / max(count, 1), ranks)
    return (ranks - 1) * (count * link.latency_s + size_bytes / (ranks * link.bytes_per_s))


def reach_of(mesh: Mesh, cluster: Cluster, first: int = 0) -> tuple[int, ...]:
    """Returns, for each dimension of a mesh from a `first` rank on, the outermost level that its collectives cross."""
    sizes = list(mesh.dimensions.values())
    reaches = []
    for i, size in enumerate(sizes):
        step = prod(sizes[i + 1 :])
        last = min(first + (size - 1) * step, cluster.workers - 1)
        reaches.append(cluster.reach(*range(first, last + 1, step)))
    return tuple(reaches)


class StageChoice(NamedTuple):
    """The layers between two places, on `replicas` workers of one mesh."""

    first: int
    last: int
    replicas: int
    mesh: Mesh
    recompute: bool = False

    @property
    def ranks(self) -> int:
        return self.replicas * self.mesh.size


class MeshSite(NamedTuple):
    """A site of a stage.

    Attributes:
        site: its workers.
        reach: reach of the collectives inside of them (`reach_of`).
        number: the same for all sites that differ at most in memory.
    """

    site: Site
    reach: tuple[int, ...]
    number: int


@dataclass(frozen=True, eq=False)
class MeshSpace(SearchSpace):
    """The space of a single rank on a cluster of ranks, with the spaces of one rank of each mesh.

    Attributes:
        meshes: the meshes that a stage may have.
    """

    meshes: tuple[Mesh, ...] = (Mesh(),)

    @classmethod
    def over(cls, space: SearchSpace, meshes: Sequence[Mesh]) -> Self:
        base = {column.name: getattr(space, column.name) for column in fields(SearchSpace) if column.init}
        return cls(**base, meshes=tuple(meshes))

    def of_rank(self, mesh: Mesh, reach: tuple[int, ...] | None = None) -> SearchSpace:
        """Returns the space of one rank of a mesh.

        Args:
            reach: reach of its collectives; by default that of the first ranks.
        """
        if not mesh.dimensions:
            return self
        reach = reach_of(mesh, self.cluster) if reach is None else reach
        if (mesh, reach) not in self._spaces:
            self._spaces[mesh, reach] = SearchSpace.of(
                profile_of_rank(self.profile, mesh, self.cluster, reach),
                self.cluster,
                choices=self.choices,
                update_delay=self.update_delay,
                microbatches=self.microbatches,
                occupancy=self.occupancy,
                downsets=self.downsets,
            )
        return self._spaces[mesh, reach]

    @property
    def _spaces(self) -> dict[tuple[Mesh, tuple[int, ...]], SearchSpace]:
        return self.shared_tables.setdefault("spaces", Tables())

    def boundary(self, sender: Mesh, receiver: Mesh) -> IntArray:
        """Returns the `boundary_bytes` of a cut at each place."""
        sent, received = (self.of_rank(mesh).crossing for mesh in (sender, receiver))
        if sender == receiver:
            return sent
        crossing: IntArray = np.asarray(boundary_bytes(sender.size, sent, receiver.size, received)).astype(np.int64)
        return crossing

    def site_at(self, first: int, replicas: int, mesh: Mesh) -> MeshSite | None:
        """Returns the site of a stage that begins at a rank (`PlanCosts.sites`); None if no worker may be there."""
        key = (0 if self.cluster.is_flat else first), replicas, mesh
        if key not in self._sites:
            self._sites[key] = self._find_site(first, replicas, mesh)
        return self._sites[key]

    @cached_property
    def _sites(self) -> dict[tuple[int, int, Mesh], MeshSite | None]:
        return self.shared_tables.setdefault(f"sites, with {self.cluster.memories}", Tables())

    def _find_site(self, first: int, replicas: int, mesh: Mesh) -> MeshSite | None:
        cluster, end = self.cluster, first + replicas * mesh.size
        if cluster.is_flat:
            wide_cluster = replace(cluster, levels=(replace(cluster.levels[0], width=replicas + 2),))
            site = Site.of(wide_cluster, range(1, replicas + 1), 0, replicas + 1, self.terms)
            return self._number_site(site, (0,) * len(mesh.dimensions))
        starts = range(first, end, mesh.size)
        if not all(may_be_worker(cluster, start, start + mesh.size) for start in starts):
            return None
        before, after = first - 1 if first else None, end if end < cluster.workers else None
        reaches = [reach_of(mesh, cluster, start) for start in starts]
        site = Site.of(cluster, starts, before, after, self.terms)
        return self._number_site(site, tuple(map(max, zip(*reaches, strict=True))))

    def _number_site(self, site: Site, reach: tuple[int, ...]) -> MeshSite:
        number = self._numbers.setdefault((replace(site, memory_bytes=None), reach), len(self._numbers))
        return MeshSite(site, reach, number)

    @property
    def _numbers(self) -> dict[tuple[Site, tuple[int, ...]], int]:
        return self.shared_tables.setdefault("numbers", Tables())

    def plan_of(self, choices: Sequence[StageChoice], note: str = "") -> Plan:
        """Returns the plan of these stages on the last ranks, at the paper's depth and without its peak memory."""
        counts, meshes = tuple(choice.replicas for choice in choices), [choice.mesh for choice in choices]
        idle_ranks = self.cluster.workers - sum(choice.ranks for choice in choices)
        sizes = [mesh.size for mesh, count in zip(meshes, counts, strict=True) for _ in range(count)]
        plan = self.build_plan(tuple(choice.last for choice in choices[:-1]), counts, note)
        spaces, stages = self._select_spaces(counts, meshes), []
        for s, (choice, space, delay) in enumerate(zip(choices, spaces, plan.update_delay, strict=True)):
            stage = space.stage(choice.first, choice.last, choice.replicas, choice.recompute, delay)
            next_mesh = meshes[s + 1] if s + 1 < len(meshes) else choice.mesh
            sent = int(self.boundary(choice.mesh, next_mesh)[choice.last])
            stages.append(replace(stage, mesh=choice.mesh.text, output_bytes=sent))
        cluster = of_workers(self.cluster, [*[1] * idle_ranks, *sizes])
        order = () if self.cluster.is_flat or not idle_ranks else tuple(range(idle_ranks, idle_ranks + len(sizes)))
        return replace(plan, stages=tuple(stages), cluster=cluster, worker_order=order, tied_weights=())

    def choices_of(self, plan: Plan) -> tuple[StageChoice, ...]:
        """Returns the choices from which `plan_of` builds this plan."""
        rows = zip(self.ends(plan), plan.stages, plan.meshes, strict=True)
        return tuple(StageChoice(*ends, stage.replicas, mesh, stage.recompute) for ends, stage, mesh in rows)

    def of_stages(self, plan: Plan) -> Sequence[SearchSpace]:
        return self._select_spaces(plan.replicas, plan.meshes)

    def _select_spaces(self, counts: Sequence[int], meshes: Sequence[Mesh]) -> list[SearchSpace]:
        ranks = [count * mesh.size for count, mesh in zip(counts, meshes, strict=True)]
        starts = accumulate(ranks, initial=self.cluster.workers - sum(ranks))
        spaces = []
        for first, count, mesh in zip(starts, counts, meshes, strict=False):
            mesh_site = self.site_at(first, count, mesh)
            spaces.append(self.of_rank(mesh, None if mesh_site is None else mesh_site.reach))
        return spaces
