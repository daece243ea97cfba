"""The dynamic program over pipelines whose stages have replicas and meshes.

As in `planner.dynamic_program.recurrence`, stages take consecutive ranks up to the last one, and the recurrence runs
over suffixes. With A(a, n, o) for the layers from place a on, run by the last n ranks, the first stage on the mesh o of
c ranks:

    A(a, n, o) = min over r, b of max(cost(a, b, n, r, o), min over o' of A(b, n - r c, o'))

Two things depend on more than that: what crosses a boundary on the meshes of both sides, and what a stage has in flight
on the workers after it, whose number is not that of the ranks. Each is in the state only of the exact program, the
latter only if memory is limited. The others are smaller and bound it: *below*, with each rank's own bytes at a boundary
and the fewest workers that may follow; *above*, with the most bytes and the most workers (`MeshPeriods` has the true
workers).

Ties go to fewer stages, then fewer ranks, then the meshes in their order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from pipedream.core.plan.mesh import Mesh
from pipedream.planner.arrays import FloatArray, IntArray
from pipedream.planner.dynamic_program.mesh_costs import MeshCosts, MeshState
from pipedream.planner.dynamic_program.pruning import chain_workers
from pipedream.planner.dynamic_program.recurrence import RECOMPUTE, states_of_counts
from pipedream.planner.tables.mesh_space import MeshSite, StageChoice


@dataclass(frozen=True, eq=False)
class MeshProgram(MeshCosts):
    """All plans of a space, and the tables that find the best of them."""

    _merged: dict[tuple[int, int], FloatArray] = field(default_factory=dict, init=False)
    """The least over the meshes of the first stage."""

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
        return float(sum(1 for _ in self._iterate_stages()) * pairs * len(self._places) ** 2)

    @cached_property
    def _before(self) -> tuple[int | None, ...]:
        """The meshes that the stage before may have, where they matter."""
        return tuple(range(len(self.space.meshes))) if self.how == "exact" else (None,)

    @cached_property
    def _requested(self) -> frozenset[tuple[int, int]] | None:
        """The pairs (workers up to the output, replicas) of `counts`."""
        return None if self.counts is None else frozenset(states_of_counts(self.counts))

    def _iterate_stages(self) -> Iterator[tuple[MeshState, int, MeshSite]]:
        """Yields each state with the replicas and the site of its stage, by increasing ranks."""
        after = {0: {0}}  # ranks -> how many workers they may be, for those that can be reached
        for ranks in range(1, self._total + 1):
            for number, mesh in enumerate(self.space.meshes):
                for replicas in self._list_replicas(ranks, mesh):
                    later = after.get(ranks - replicas * mesh.size)
                    lies = self.space.site_at(self._total - ranks, replicas, mesh) if later else None
                    if lies is None or later is None:
                        continue
                    for workers in sorted({rest + replicas if self._counts_workers else 0 for rest in later}):
                        if self._requested is None or (workers, replicas) in self._requested:
                            after.setdefault(ranks, set()).add(workers)
                            yield MeshState(ranks, workers, number), replicas, lies

    def _list_replicas(self, ranks: int, mesh: Mesh) -> list[int]:
        return [count for count in range(1, ranks // mesh.size + 1) if not self.cycle % count]

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
        for state, replicas, lies in self._iterate_stages():
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
        for replicas in self._list_replicas(state.ranks, mesh):
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


_FAR = 1 << 29  # more workers than any cluster has


@dataclass(frozen=True, eq=False)
class MeshPeriods(MeshProgram):
    """Plans within a given period, where memory is limited and there are many ranks.

    What a stage has in flight grows with the workers after it, and the fewer these are, the better for all stages
    before. So for a period, the fewest workers W(a, n) that run the layers from place a on, on the last n ranks, say
    all:

        W(a, n) = min over r, b, o of r + W(b, n - r c), where stage [a, b) keeps the period and fits with these after

    This is `MeshProgram` below with the true workers. Bisection over the period bounds the best plan from both sides.
    Bytes at a boundary are each rank's own.
    """

    how: str = "below"
    _rooms: dict[tuple[int, int | None, int, bool, bool], IntArray] = field(default_factory=dict, init=False)
    _most: dict[tuple[float, int, int, int | None, int], IntArray] = field(default_factory=dict, init=False)

    def within(self, period_s: float) -> tuple[StageChoice, ...] | None:
        """Returns the stages of a plan whose stages all keep the period, with the fewest workers; None if none does."""
        total, sizes = self._total, [mesh.size for mesh in self.space.meshes]
        fewest = np.full((total + 1, len(self._places)), _FAR, dtype=np.int32)  # small numbers, for speed
        fewest[0, -1] = 0
        self._most.clear()
        rows = [
            (state.ranks, sizes[state.mesh] * replicas, replicas, self._find_most(state, replicas, lies, period_s))
            for state, replicas, lies in self._all_stages
        ]
        spans = self._find_spans()
        for ranks, taken, replicas, most in rows:
            first, last = spans[ranks], spans[ranks - taken]
            if first.start < first.stop and last.start < last.stop:
                rest = fewest[ranks - taken, last]
                possible = self._count_in_flight(rest, replicas) <= most[first, last]
                workers = np.where(possible, rest + replicas, np.int32(_FAR)).min(axis=1)
                np.minimum(fewest[ranks, first], workers, out=fewest[ranks, first])
        starts = [total] if self.all_ranks else range(1, total + 1)
        start = min(starts, key=lambda n: int(fewest[n, 0]))
        return None if fewest[start, 0] >= _FAR else tuple(self._iterate_choices(fewest, start, period_s))

    def _find_spans(self) -> list[slice]:
        """For each number of ranks up to the output, where a stage on the first of them can begin.

        Before and after it there must be enough ranks to keep the period, whatever fits.
        """
        total = self._total
        least = np.full(self._allowed.shape, total + 1)
        for (_, mesh, _, _, replicas), most in self._most.items():
            ranks = replicas * self.space.meshes[mesh].size
            least[(most > 0) & (least > ranks)] = ranks
        before, after = chain_workers(least, total)
        rows = (np.flatnonzero((after <= ranks) & (before + ranks <= total)) for ranks in range(total + 1))
        return [slice(int(row[0]), int(row[-1]) + 1) if len(row) else slice(0, 0) for row in rows]

    @cached_property
    def _all_stages(self) -> list[tuple[MeshState, int, MeshSite]]:
        return list(self._iterate_stages())

    def _iterate_choices(self, fewest: IntArray, ranks: int, period_s: float) -> Iterator[StageChoice]:
        place = 0
        while ranks:
            choice, place = self._find_next(fewest, ranks, place, period_s)
            ranks -= choice.ranks
            yield choice

    def _find_next(self, fewest: IntArray, ranks: int, place: int, period_s: float) -> tuple[StageChoice, int]:
        for number, mesh in enumerate(self.space.meshes):
            for replicas in self._list_replicas(ranks, mesh):
                lies = self.space.site_at(self._total - ranks, replicas, mesh)
                if lies is None:
                    continue
                rest = fewest[ranks - replicas * mesh.size]
                state = MeshState(ranks, 0, number)
                may = self._count_in_flight(rest, replicas) <= self._find_most(state, replicas, lies, period_s)[place]
                ends = np.flatnonzero(may & (rest + replicas == fewest[ranks, place]))
                if len(ends):
                    end = int(ends[0])
                    in_flight = self._count_in_flight(rest, replicas)[end]
                    again = self.recompute == "always" or bool(
                        in_flight > self._find_room(state, replicas, lies, False)[place, end]
                    )
                    span = int(self._places[place]), int(self._places[end])
                    return StageChoice(*span, replicas, mesh, again), end
        raise AssertionError("the tables have no such stage")

    def _find_most(self, state: MeshState, replicas: int, lies: MeshSite, period_s: float) -> IntArray:
        """The most in flight with which stages [from, to] fit; 0 for those that do not keep the period."""
        key = period_s, state.mesh, lies.number, lies.site.memory_bytes, replicas
        if key not in self._most:
            ways = [
                np.where(
                    self._compute_cost(state.mesh, lies, recompute) <= period_s,
                    self._find_room(state, replicas, lies, recompute),
                    0,
                )
                for recompute in RECOMPUTE[self.recompute]
            ]
            self._most[key] = np.maximum.reduce(ways).astype(np.int32)
        return self._most[key]

    @staticmethod
    def _count_in_flight(rest: IntArray, replicas: int) -> IntArray:
        return (rest + (replicas - 1)) // replicas + 1

    def _find_room(self, state: MeshState, replicas: int, lies: MeshSite, recompute: bool) -> IntArray:
        """The most in flight for which each stage has memory."""
        limit, share = lies.site.memory_bytes, -(-self.space.microbatches // replicas)
        key = state.mesh, limit, share, replicas > 1, recompute
        if key not in self._rooms:
            low = np.zeros(self._allowed.shape, dtype=int)  # it fits at `low`, and not at `high`
            high = np.full(self._allowed.shape, self._total + 2 if limit is None else self._total + 1)
            while limit is not None and (high - low > 1).any():
                middle = (low + high) // 2
                for in_flight in np.unique(middle[high - low > 1]):
                    need = self._compute_need_in_flight(state.mesh, lies, int(in_flight), replicas, recompute)
                    here = (middle == in_flight) & (high - low > 1)
                    low = np.where(here & (need <= limit), middle, low)
                    high = np.where(here & (need > limit), middle, high)
            self._rooms[key] = low if limit is not None else high
        return self._rooms[key]
