"""Plans with meshes within a given period, where memory is limited and there are many ranks.

What a stage has in flight grows with the workers after it, and the fewer these are, the better for all stages before.
So for a period, the fewest workers W(a, n) that run the layers from place a on, on the last n ranks, say all:

    W(a, n) = min over r, b, o of r + W(b, n - r c), where stage [a, b) keeps the period and fits with these after it

This is `MeshProgram` below with the true workers. Bisection over the period bounds the best plan from both sides.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from pipedream.planner.arrays import BoolArray, FloatArray, IntArray
from pipedream.planner.dynamic_program.mesh_costs import MeshState
from pipedream.planner.dynamic_program.mesh_program import MeshProgram
from pipedream.planner.tables import MeshSite, StageChoice

_FAR = 1e9  # more workers than any cluster has


@dataclass(frozen=True, eq=False)
class MeshPeriods(MeshProgram):
    """The plans of a program that keep a period; bytes at a boundary are each rank's own."""

    how: str = "below"

    def within(self, period_s: float) -> tuple[StageChoice, ...] | None:
        """Returns the stages of a plan whose stages all keep the period, with the fewest workers; None if none does."""
        fewest = {0: self._end}
        for state, replicas, lies in self._iterate_stages():
            rest = fewest[state.ranks - replicas * self.space.meshes[state.mesh].size]
            workers = np.where(self._find_possible(state, replicas, lies, rest, period_s), rest + replicas, _FAR).min(
                axis=1
            )
            fewest[state.ranks] = np.minimum(fewest.get(state.ranks, _FAR), workers)
        total = self._total
        starts = [total] if self.all_ranks else range(1, total + 1)
        ranks = min((n for n in starts if n in fewest), key=lambda n: fewest[n][0], default=0)
        return None if not ranks or fewest[ranks][0] >= _FAR else tuple(self._iterate_choices(fewest, ranks, period_s))

    @cached_property
    def _end(self) -> FloatArray:
        end = np.full(len(self._places), _FAR)
        end[-1] = 0.0
        return end

    def _iterate_choices(self, fewest: dict[int, FloatArray], ranks: int, period_s: float) -> Iterator[StageChoice]:
        place = 0
        while ranks:
            choice, place = self._find_next(fewest, ranks, place, period_s)
            ranks -= choice.ranks
            yield choice

    def _find_next(
        self, fewest: dict[int, FloatArray], ranks: int, place: int, period_s: float
    ) -> tuple[StageChoice, int]:
        for number, mesh in enumerate(self.space.meshes):
            for replicas in range(1, ranks // mesh.size + 1):
                lies = self.space.site_at(self._total - ranks, replicas, mesh)
                rest = fewest.get(ranks - replicas * mesh.size)
                if lies is None or rest is None:
                    continue
                state = MeshState(ranks, 0, number)
                may = self._find_possible(state, replicas, lies, rest, period_s)[place]
                ends = np.flatnonzero(may & (rest + replicas == fewest[ranks][place]))
                if len(ends):
                    end = int(ends[0])
                    in_flight = self._count_in_flight(rest, replicas)[end]
                    again = self.recompute == "always" or bool(
                        in_flight > self._find_room(state, replicas, lies, False)[place, end]
                    )
                    span = int(self._places[place]), int(self._places[end])
                    return StageChoice(*span, replicas, mesh, again), end
        raise AssertionError("the tables have no such stage")

    def _find_possible(
        self, state: MeshState, replicas: int, lies: MeshSite, rest: FloatArray, period_s: float
    ) -> BoolArray:
        """Which stages [from, to] keep the period and fit, with so many workers after each end."""
        in_flight = self._count_in_flight(rest, replicas)
        possible: BoolArray = np.zeros((len(self._places), len(self._places)), dtype=bool)
        for recompute in {"never": (False,), "auto": (False, True), "always": (True,)}[self.recompute]:
            costs = self._compute_cost(state.mesh, lies, recompute)
            possible |= (costs <= period_s) & (in_flight <= self._find_room(state, replicas, lies, recompute))
        return possible & (rest < _FAR)

    @staticmethod
    def _count_in_flight(rest: FloatArray, replicas: int) -> FloatArray:
        return np.floor((rest + replicas - 1) / replicas) + 1

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

    @cached_property
    def _rooms(self) -> dict[tuple[int, int | None, int, bool, bool], IntArray]:
        return {}
