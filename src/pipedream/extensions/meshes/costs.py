"""Seconds and bytes of each stage of a pipeline with meshes: arrays [from, to] for `program`."""

from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, NamedTuple

import numpy as np

from pipedream.extensions.meshes.space import MeshSite, MeshSpace
from pipedream.planner.arrays import BoolArray, FloatArray, IntArray, Tables
from pipedream.planner.dynamic_program.recurrence import least_need, limit_costs, spread
from pipedream.planner.tables.search_space import add_spare_bytes

MESH_PROGRAMS = ("below", "exact", "above")


class MeshState(NamedTuple):
    """A stage: its ranks and workers with all later ones, and its mesh's index; 0 where they do not matter."""

    ranks: int
    workers: int
    mesh: int


class MeshWorkers(NamedTuple):
    """The workers of a stage: the index of their mesh, how many, where they lie, and what each has in flight."""

    mesh: int
    replicas: int
    lies: MeshSite
    in_flight: int = 1

    @property
    def kind(self) -> tuple[int, int, int | None, int]:
        """What stages cost and need does not depend on more of the workers."""
        return self.mesh, self.lies.number, self.lies.site.memory_bytes, self.in_flight


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
    every_cut: bool = False
    cycle: int = 0

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

    @cached_property
    def _shared(self) -> Tables:
        """What programs with the same places and stages share, whatever the memory."""
        key = self.how, self.allow_single_stage, self.every_cut, self.space.positions, self.space.meshes
        return self.space.shared_tables.setdefault(str(key), Tables())

    def _compute_seconds(self, workers: MeshWorkers, before: int | None, after: int | None) -> FloatArray:
        """Seconds; infinite where a stage is not allowed, or does not fit."""
        cost = partial(self._compute_cost, workers.mesh, workers.lies, before=before, after=after)
        need = partial(self._compute_need, workers)
        return limit_costs(self.space.choices, workers.lies.site.memory_bytes, cost, need)

    def _compute_least_need(self, workers: MeshWorkers, before: int | None, after: int | None) -> FloatArray:
        need = least_need(self.space.choices, partial(self._compute_need, workers))
        return np.where(self._allowed, need, np.inf)

    def _compute_cost(
        self, mesh: int, lies: MeshSite, recompute: bool, before: int | None = None, after: int | None = None
    ) -> FloatArray:
        """Seconds, whatever the memory."""

        def make() -> FloatArray:
            (first, last), end = self._ends, int(self._places[-1])
            space = self.space.of_rank(self.space.meshes[mesh], lies.reach)
            key = "passes", mesh, lies.reach
            passes = self._shared.get(key) or (*space.passes_s(first, last), space.trained_bytes(first, last))
            self._shared[key] = forward, backward, weights = passes
            received, sent = self._compute_crossing(mesh, before, after)
            edges = np.where(first == 0, 0, received[first]), np.where(last == end, 0, sent[last])
            delay = self.space.update_delay if lies.site.replicas > 1 else 0
            update = np.array(np.broadcast_to(space.update_s(first, last, delay, edges), first.shape), dtype=float)
            if delay:  # a single stage never has one
                update[(first == 0) & (last == end)] = space.update_s(0, end, 0, (0, 0))
            backward = backward + forward if recompute else backward
            seconds = lies.site.period_s(forward, backward, update, weights, *edges)
            return spread(np.asarray(seconds), self._allowed, np.inf)

        return self._shared.look_up((mesh, lies.number, recompute, before, after), make)

    @cached_property
    def _ends(self) -> tuple[IntArray, IntArray]:
        first, last = np.nonzero(self._allowed)
        return self._places[first], self._places[last]

    def _compute_crossing(self, mesh: int, before: int | None, after: int | None) -> tuple[IntArray, IntArray]:
        """Bytes at each place, to a stage that begins there and from one that ends there."""
        key = "bytes", mesh, before, after
        if key not in self._shared:
            every, stage_mesh = self.space.meshes, self.space.meshes[mesh]
            unknown = every if self.how == "above" else (stage_mesh,)
            senders = unknown if before is None else (every[before],)
            receivers = unknown if after is None else (every[after],)
            received = np.maximum.reduce([self.space.boundary(sender, stage_mesh) for sender in senders])
            sent = np.maximum.reduce([self.space.boundary(stage_mesh, receiver) for receiver in receivers])
            self._shared[key] = received, sent
        return self._shared[key]  # type: ignore[no-any-return]

    def _estimate_in_flight(self, replicas: int, ranks: int, workers: int) -> int:
        """Returns what a stage has in flight before so many ranks and workers.

        If workers are not counted, it is the least or the most possible, and 1 where memory is unlimited.
        """
        if not self.space.cluster.is_limited:
            return 1
        if not self._counts_workers:
            sizes = self._mesh_sizes
            workers = ranks // min(sizes) if self.how == "above" else -(-ranks // max(sizes))
        return (workers + replicas - 1) // replicas + 1

    @cached_property
    def _mesh_sizes(self) -> tuple[int, ...]:
        return tuple(mesh.size for mesh in self.space.meshes)

    def _compute_need(self, workers: MeshWorkers, recompute: bool) -> IntArray:
        mesh, replicas, lies, in_flight = workers

        def make() -> IntArray:
            space = self.space.of_rank(self.space.meshes[mesh], lies.reach)
            delay = self.space.update_delay if replicas > 1 else 0
            if ("sizes", mesh) not in self._shared:
                self._shared["sizes", mesh] = space.sizes(*self._ends)
            sizes = self._shared["sizes", mesh]
            needs = space.need_bytes(*self._ends, in_flight, delay, recompute, replicas, sizes)
            need = spread(np.asarray(needs), self._allowed, 0)
            need[0, -1] = space.need_bytes(0, int(self._places[-1]), in_flight, 0, recompute, replicas)
            return need

        key = *self._list_limits(workers, recompute), in_flight
        return add_spare_bytes(self.space, self.space.needs.look_up(key, make))

    def _list_limits(self, workers: MeshWorkers, recompute: bool) -> tuple[Any, ...]:
        """What the needs of stages on these workers depend on, besides what they have in flight."""
        replicas = workers.replicas
        return self.space.meshes[workers.mesh], -(-self.space.microbatches // replicas), replicas > 1, recompute
