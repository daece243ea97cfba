"""Seconds and bytes of each stage of a pipeline with meshes: arrays [from, to] for `mesh_program`."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, NamedTuple

import numpy as np

from pipedream.core.plan.memory import StageSizes
from pipedream.planner.arrays import BoolArray, FloatArray, IntArray
from pipedream.planner.dynamic_program.recurrence import least_need, limit_costs
from pipedream.planner.tables.mesh_space import MeshSite, MeshSpace
from pipedream.planner.tables.search_space import SearchSpace

MESH_PROGRAMS = ("below", "exact", "above")

_CACHE_BYTES = 2**29  # of costs that are kept for further states


class MeshState(NamedTuple):
    """A stage: its ranks with all later ones, its workers with all later ones (0 if not counted), its mesh's index."""

    ranks: int
    workers: int
    mesh: int


@dataclass(frozen=True, eq=False)
class MeshCosts:
    """The stages that plans of a space may have, and their costs.

    Attributes:
        how: one of `MESH_PROGRAMS`.
        counts: the replicas of each stage; None: any.
        all_ranks: no rank is idle.
        allow_single_stage: a single stage is a plan too.
        every_cut: each of the space's places is a cut.
        cycle: all replica counts divide it; 0: any.
    """

    space: MeshSpace
    how: str = "exact"
    counts: tuple[int, ...] | None = None
    all_ranks: bool = False
    allow_single_stage: bool = True
    recompute: str = "never"
    every_cut: bool = False
    cycle: int = 0
    _needs: dict[tuple[int, int, int, bool, bool], IntArray] = field(default_factory=dict, init=False)

    @property
    def _total(self) -> int:
        return self.space.cluster.workers

    @cached_property
    def _places(self) -> IntArray:
        return np.array(self.space.positions)

    @cached_property
    def _counts_workers(self) -> bool:
        return self.counts is not None or (self.how == "exact" and self.space.cluster.is_limited)

    @cached_property
    def _allowed(self) -> BoolArray:
        order = self.space.precedes.copy()
        order[0, -1] &= self.allow_single_stage
        if self.every_cut:
            order &= np.eye(len(order), k=1, dtype=bool)
        return order

    def _share_cache(self, name: str) -> dict[Any, Any]:
        """Returns a table that programs with the same places and stages share, whatever the memory."""
        key = name, self.how, self.allow_single_stage, self.every_cut, self.space.positions, self.space.meshes
        return self.space.kept.setdefault(str(key), {})

    def _compute_seconds(
        self, state: MeshState, replicas: int, lies: MeshSite, before: int | None, after: int | None
    ) -> FloatArray:
        """Seconds; infinite where a stage is not allowed, or does not fit."""
        cost = partial(self._compute_cost, state.mesh, lies, before=before, after=after)
        need = partial(self._compute_need, state, replicas, lies)
        return limit_costs(self.recompute, lies.site.memory_bytes, cost, need)

    def _compute_least_need(
        self, state: MeshState, replicas: int, lies: MeshSite, before: int | None, after: int | None
    ) -> FloatArray:
        need = least_need(self.recompute, partial(self._compute_need, state, replicas, lies))
        return np.where(self._allowed, need, np.inf)

    def _compute_cost(
        self, mesh: int, lies: MeshSite, recompute: bool, before: int | None = None, after: int | None = None
    ) -> FloatArray:
        """Seconds, whatever the memory."""
        key = mesh, lies.number, recompute, before, after
        if key in self._costs:
            return self._costs[key]
        space, first, last = self._select_ends(mesh, lies.reach)
        forward, backward = self._compute_passes(space, mesh, lies.reach)
        received, sent = self._compute_crossing(mesh, before, after)
        edges = np.where(first == 0, 0, received[:, None]), np.where(last == last[0, -1], 0, sent[None, :])
        delay = self.space.update_delay if lies.site.replicas > 1 else 0
        update = np.array(np.broadcast_to(space.update_s(first, last, delay, edges), forward.shape), dtype=float)
        if delay:  # a single stage never has one
            update[0, -1] = space.update_s(0, int(last[0, -1]), 0, (0, 0))
        weights = np.asarray(space.trained_bytes(first, last))
        backward = backward + forward if recompute else backward
        costs = np.where(self._allowed, lies.site.period_s(forward, backward, update, weights, *edges), np.inf)
        if len(self._costs) * costs.nbytes < _CACHE_BYTES:
            self._costs[key] = costs
        return costs

    @cached_property
    def _costs(self) -> dict[tuple[int, int, bool, int | None, int | None], FloatArray]:
        return self._share_cache("costs")

    def _select_ends(self, mesh: int, reach: tuple[int, ...]) -> tuple[SearchSpace, IntArray, IntArray]:
        return self.space.of_rank(self.space.meshes[mesh], reach), self._places[:, None], self._places[None, :]

    def _compute_passes(self, space: SearchSpace, mesh: int, reach: tuple[int, ...]) -> tuple[FloatArray, FloatArray]:
        if (mesh, reach) not in self._all_passes:
            forward, backward = space.passes_s(self._places[:, None], self._places[None, :])
            self._all_passes[mesh, reach] = np.asarray(forward, dtype=float), np.asarray(backward, dtype=float)
        return self._all_passes[mesh, reach]

    @cached_property
    def _all_passes(self) -> dict[tuple[int, tuple[int, ...]], tuple[FloatArray, FloatArray]]:
        return self._share_cache("all_passes")

    def _compute_crossing(self, mesh: int, before: int | None, after: int | None) -> tuple[IntArray, IntArray]:
        """Bytes at each place, to a stage that begins there and from one that ends there."""
        if (mesh, before, after) not in self._all_bytes:
            every, stage_mesh = self.space.meshes, self.space.meshes[mesh]
            unknown = every if self.how == "above" else (stage_mesh,)
            senders = unknown if before is None else (every[before],)
            receivers = unknown if after is None else (every[after],)
            received = np.maximum.reduce([self.space.boundary(sender, stage_mesh) for sender in senders])[self._places]
            sent = np.maximum.reduce([self.space.boundary(stage_mesh, receiver) for receiver in receivers])[
                self._places
            ]
            self._all_bytes[mesh, before, after] = received, sent
        return self._all_bytes[mesh, before, after]

    @cached_property
    def _all_bytes(self) -> dict[tuple[int, int | None, int | None], tuple[IntArray, IntArray]]:
        return self._share_cache("all_bytes")

    def _estimate_in_flight(self, state: MeshState, replicas: int) -> int:
        """Returns a stage's microbatches in flight; if later workers are not counted, the fewest or most possible."""
        workers = state.workers
        if not self._counts_workers:
            left = state.ranks - replicas * self.space.meshes[state.mesh].size
            sizes = [mesh.size for mesh in self.space.meshes]
            workers = replicas + (left // min(sizes) if self.how == "above" else -(-left // max(sizes)))
        return (workers - 1) // replicas + 1

    def _compute_need(self, state: MeshState, replicas: int, lies: MeshSite, recompute: bool) -> IntArray:
        in_flight = self._estimate_in_flight(state, replicas)
        share = -(-self.space.microbatches // replicas)
        key = state.mesh, in_flight, share, replicas > 1, recompute
        if key not in self._needs:
            self._needs[key] = self._compute_need_in_flight(state.mesh, lies, in_flight, replicas, recompute)
        return self._needs[key]

    def _compute_need_in_flight(
        self, mesh: int, lies: MeshSite, in_flight: int, replicas: int, recompute: bool
    ) -> IntArray:
        key = mesh, in_flight, -(-self.space.microbatches // replicas), replicas > 1, recompute
        least = self._least_needs.get(key)
        if least is None:
            space, first, last = self._select_ends(mesh, lies.reach)
            delay = self.space.update_delay if replicas > 1 else 0
            if mesh not in self._sizes:
                self._sizes[mesh] = space.sizes(first, last)
            sizes = self._sizes[mesh]
            least = np.array(space.need_bytes(first, last, in_flight, delay, recompute, replicas, sizes=sizes))
            least[0, -1] = space.need_bytes(0, int(self._places[-1]), in_flight, 0, recompute, replicas)
            if len(self._least_needs) * least.nbytes < _CACHE_BYTES:
                self._least_needs[key] = least
        need: IntArray = least + self.space.spare_bytes
        need[0, -1] = least[0, -1]
        return need

    @cached_property
    def _least_needs(self) -> dict[tuple[int, int, int, bool, bool], IntArray]:
        """Without the bytes that are kept free."""
        return self._share_cache("least needs")

    @cached_property
    def _sizes(self) -> dict[int, StageSizes]:
        return self._share_cache("sizes")
