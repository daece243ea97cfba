"""The dynamic program over pipelines whose stages have replicas and meshes.

As in `planner.dynamic_program.recurrence`, stages take consecutive ranks up to the last one, and the recurrence runs
over suffixes. With A(a, n, o) for the layers from place a on, run by the last n ranks, the first stage on the mesh o of
c ranks:

    A(a, n, o) = min over r, b of max(cost(a, b, n, r, o), min over o' of A(b, n - r c, o'))

Two things depend on more than that: what crosses a boundary on the meshes of both sides, and what a stage has in flight
on the workers after it, whose number is not that of the ranks. Each is in the state only of the exact program, the
latter only if memory is limited. The others are smaller and bound it: *below*, with each rank's own bytes at a boundary
and the fewest workers that may follow; *above*, with the most bytes and the most workers (`mesh_periods` has the true
workers).

Ties go to fewer stages, then fewer ranks, then the meshes in their order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from pipedream.core.plan.memory import StageSizes
from pipedream.planner.arrays import BoolArray, FloatArray, IntArray
from pipedream.planner.dynamic_program.recurrence import states_of_counts
from pipedream.planner.tables.mesh_space import MeshSite, MeshSpace, StageChoice
from pipedream.planner.tables.search_space import SearchSpace

MESH_PROGRAMS = ("below", "exact", "above")

_CACHE_BYTES = 2**29  # of costs that are kept for further states


class MeshState(NamedTuple):
    """A stage: its ranks with all later ones, its workers with all later ones (0 if not counted), its mesh's index."""

    ranks: int
    workers: int
    mesh: int


@dataclass(frozen=True, eq=False)
class MeshProgram:
    """All plans of a space, and the tables that find the best of them.

    Attributes:
        how: one of `MESH_PROGRAMS`.
        counts: the replicas of each stage; None: any.
        all_ranks: no rank is idle.
        allow_single_stage: a single stage is a plan too.
        every_cut: each of the space's places is a cut.
    """

    space: MeshSpace
    how: str = "exact"
    counts: tuple[int, ...] | None = None
    all_ranks: bool = False
    allow_single_stage: bool = True
    recompute: str = "never"
    every_cut: bool = False

    def best(self) -> tuple[float, tuple[StageChoice, ...]] | None:
        """Returns the least seconds of a slowest stage, with its stages; None if nothing fits."""
        return self._find_best(self._compute_seconds)

    def least_bytes(self) -> tuple[float, tuple[StageChoice, ...]] | None:
        """Returns the least need of a fullest rank, with its stages; None if no plan has this shape."""
        return self._find_best(self._compute_least_need)

    def _find_best(self, cost: Callable[..., FloatArray]) -> tuple[float, tuple[StageChoice, ...]] | None:
        tables = self._fill_tables(cost, None)
        least = min((float(tables[state][0, 0]) for state in self._starts(tables)), default=np.inf)
        if np.isinf(least):
            return None
        return least, self._walk(cost, least)

    @property
    def work(self) -> float:
        """Comparisons of costs."""
        pairs = len(self._before) * (len(self.space.meshes) if self.how == "exact" else 1)
        return float(sum(1 for _ in self._iterate_stages(self._after)) * pairs * len(self._places) ** 2)

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
    def _before(self) -> tuple[int | None, ...]:
        """The meshes that the stage before may have, where they matter."""
        return tuple(range(len(self.space.meshes))) if self.how == "exact" else (None,)

    @cached_property
    def _allowed(self) -> BoolArray:
        order = self.space.precedes.copy()
        order[0, -1] &= self.allow_single_stage
        if self.every_cut:
            order &= np.eye(len(order), k=1, dtype=bool)
        return order

    @cached_property
    def _requested(self) -> frozenset[tuple[int, int]] | None:
        """The pairs (workers up to the output, replicas) of `counts`."""
        return None if self.counts is None else frozenset(states_of_counts(self.counts))

    def _iterate_stages(self, after: dict[int, set[int]]) -> Iterator[tuple[MeshState, int, MeshSite]]:
        """Yields each state with the replicas and the site of its stage, by increasing ranks.

        `after` says for each number of ranks how many workers they may be; it is filled for those that are reached.
        """
        for ranks in range(1, self._total + 1):
            for number, mesh in enumerate(self.space.meshes):
                for replicas in range(1, ranks // mesh.size + 1):
                    later = after.get(ranks - replicas * mesh.size)
                    lies = self.space.site_at(self._total - ranks, replicas, mesh) if later else None
                    if lies is None or later is None:
                        continue
                    for workers in sorted({rest + replicas if self._counts_workers else 0 for rest in later}):
                        if self._requested is None or (workers, replicas) in self._requested:
                            after.setdefault(ranks, set()).add(workers)
                            yield MeshState(ranks, workers, number), replicas, lies

    @property
    def _after(self) -> dict[int, set[int]]:
        return {0: {0}}

    def _starts(self, tables: dict[MeshState, FloatArray]) -> list[MeshState]:
        whole = None if self.counts is None else sum(self.counts)
        return [
            state
            for state in tables
            if (not self.all_ranks or state.ranks == self._total) and whole in (None, state.workers)
        ]

    def _fill_tables(self, cost: Callable[..., FloatArray], limit: float | None) -> dict[MeshState, FloatArray]:
        """For each state, as [mesh before, place]: the least maximum of the costs from there on; with a limit that all
        of them keep, the fewest stages."""
        tables: dict[MeshState, FloatArray] = {}
        self._merged.clear()
        for state, replicas, lies in self._iterate_stages(self._after):
            rows = []
            for before in self._before:
                least = np.full(len(self._places), np.inf)
                for after, rest in self._iterate_followers(tables, state, replicas):
                    costs = cost(state, replicas, lies, before, after)
                    joined = np.maximum(costs, rest) if limit is None else np.where(costs <= limit, rest + 1, np.inf)
                    np.minimum(least, joined.min(axis=1), out=least)
                rows.append(least)
            table = np.stack(rows)
            tables[state] = np.minimum(tables[state], table) if state in tables else table
            key = state.ranks, state.workers
            self._merged[key] = np.minimum(self._merged.get(key, np.inf), tables[state])
        return tables

    @cached_property
    def _merged(self) -> dict[tuple[int, int], FloatArray]:
        """The least over the meshes of the first stage."""
        return {}

    def _iterate_followers(
        self, tables: dict[MeshState, FloatArray], state: MeshState, replicas: int
    ) -> Iterator[tuple[int | None, FloatArray]]:
        """Yields the mesh after a stage, where it matters, with the table of what follows."""
        ranks = state.ranks - replicas * self.space.meshes[state.mesh].size
        workers = state.workers - replicas if self._counts_workers else 0
        if not ranks:
            end = np.full(len(self._places), np.inf)
            end[-1] = 0.0
            yield None, end
        elif self.how != "exact":
            yield None, self._merged[ranks, workers][0]
        else:
            for number in range(len(self.space.meshes)):
                if (after := tables.get(MeshState(ranks, workers, number))) is not None:
                    yield number, after[state.mesh]

    def _walk(self, cost: Callable[..., FloatArray], limit: float) -> tuple[StageChoice, ...]:
        tables = self._fill_tables(cost, limit)
        starts = self._starts(tables)
        fewest = min(float(tables[state][0, 0]) for state in starts)
        state = min(start for start in starts if tables[start][0, 0] == fewest)
        choices: list[StageChoice] = []
        place, before, stages_left = 0, 0, fewest
        while True:
            choice, after, place = self._step(cost, limit, tables, state, before, place, stages_left)
            choices.append(choice)
            stages_left -= 1
            ranks = state.ranks - choice.ranks
            if not ranks:
                return tuple(choices)
            workers = state.workers - choice.replicas if self._counts_workers else 0
            before = state.mesh if self.how == "exact" else 0
            numbers = range(len(self.space.meshes)) if after is None else (after,)
            nexts = (MeshState(ranks, workers, number) for number in numbers)
            state = next(
                candidate
                for candidate in nexts
                if candidate in tables and tables[candidate][before, place] == stages_left
            )

    def _step(
        self,
        cost: Callable[..., FloatArray],
        limit: float,
        tables: dict[MeshState, FloatArray],
        state: MeshState,
        before: int,
        place: int,
        stages_left: float,
    ) -> tuple[StageChoice, int | None, int]:
        """Returns the stage of a state from a place on, the mesh after it, and the index of its end."""
        mesh = self.space.meshes[state.mesh]
        for replicas in range(1, state.ranks // mesh.size + 1):
            ranks, workers = state.ranks - replicas * mesh.size, state.workers - replicas if self._counts_workers else 0
            has_rest = ranks == 0 == workers or any(
                MeshState(ranks, workers, o) in tables for o in range(len(self.space.meshes))
            )
            lies = self.space.site_at(self._total - state.ranks, replicas, mesh)
            if (
                not has_rest
                or lies is None
                or (self._requested is not None and (state.workers, replicas) not in self._requested)
            ):
                continue
            for after, rest in self._iterate_followers(tables, state, replicas):
                costs = cost(state, replicas, lies, self._before[before], after)[place]
                ends = np.flatnonzero((costs <= limit) & (rest + 1 == stages_left))
                if len(ends):
                    first, end = int(self._places[place]), int(self._places[ends[0]])
                    again = self._must_recompute(state, replicas, lies, place, int(ends[0]))
                    return StageChoice(first, end, replicas, mesh, again), after, int(ends[0])
        raise AssertionError("the tables have no such stage")

    def _must_recompute(self, state: MeshState, replicas: int, lies: MeshSite, place: int, end: int) -> bool:
        most = lies.site.memory_bytes
        must = most is not None and self._compute_need(state, replicas, lies, False)[place, end] > most
        return self.recompute == "always" or (self.recompute == "auto" and bool(must))

    def _share_cache(self, name: str) -> dict[Any, Any]:
        """What programs with the same places and stages have in common, whatever the memory."""
        key = name, self.how, self.allow_single_stage, self.every_cut, self.space.positions, self.space.meshes
        return self.space.kept.setdefault(str(key), {})

    # -- costs of all stages [from, to] on a site ---------------------------------------------------------

    def _compute_seconds(
        self, state: MeshState, replicas: int, lies: MeshSite, before: int | None, after: int | None
    ) -> FloatArray:
        """Seconds; infinite where a stage is not allowed, or does not fit."""
        site, always = lies.site, self.recompute == "always"

        def cost(recompute: bool) -> FloatArray:
            return self._compute_cost(state.mesh, lies, recompute, before, after)

        if site.memory_bytes is None:
            return cost(always)
        fits = self._compute_need(state, replicas, lies, always) <= site.memory_bytes
        if self.recompute != "auto" or fits.all():
            return np.where(fits, cost(always), np.inf)
        fits_then = self._compute_need(state, replicas, lies, True) <= site.memory_bytes
        return np.where(fits, cost(False), np.where(fits_then, cost(True), np.inf))

    def _compute_least_need(
        self, state: MeshState, replicas: int, lies: MeshSite, before: int | None, after: int | None
    ) -> FloatArray:
        need = self._compute_need(state, replicas, lies, self.recompute == "always")
        if self.recompute == "auto":
            need = np.minimum(need, self._compute_need(state, replicas, lies, True))
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
        weights = np.asarray(space.parameter_bytes(first, last))
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
        """What the stage has in flight; if later workers are not counted, the least or the most that is possible."""
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
        space, first, last = self._select_ends(mesh, lies.reach)
        delay = self.space.update_delay if replicas > 1 else 0
        if mesh not in self._sizes:
            self._sizes[mesh] = space.sizes(first, last)
        need: IntArray = np.asarray(
            space.need_bytes(first, last, in_flight, delay, recompute, replicas, sizes=self._sizes[mesh])
        )
        need = need + self.space.spare_bytes
        need[0, -1] = space.need_bytes(0, int(self._places[-1]), in_flight, 0, recompute, replicas)
        return need

    @cached_property
    def _sizes(self) -> dict[int, StageSizes]:
        return self._share_cache("sizes")

    @cached_property
    def _needs(self) -> dict[tuple[int, int, int, bool, bool], IntArray]:
        return {}
