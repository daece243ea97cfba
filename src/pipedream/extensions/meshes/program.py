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

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, reduce
from itertools import islice
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import as_strided, sliding_window_view

from pipedream.extensions.meshes.costs import MeshCosts, MeshState, MeshWorkers
from pipedream.extensions.meshes.space import StageChoice
from pipedream.planner.arrays import FloatArray, IntArray, Tables
from pipedream.planner.dynamic_program.recurrence import find_spans, states_of_counts

_Cost = Callable[[MeshWorkers, int | None, int | None], FloatArray]


@dataclass(frozen=True, eq=False)
class MeshProgram(MeshCosts):
    """All plans of a space, and the tables that find the best of them."""

    _merged: Tables = field(default_factory=Tables, init=False)
    """Costs of stages on any of some workers that the same stages may follow."""

    def best(self) -> tuple[float, tuple[StageChoice, ...]] | None:
        """Returns the least seconds of a slowest stage, with its stages; None if nothing fits."""
        return self._find_best(self._compute_seconds)

    def least_bytes(self) -> tuple[float, tuple[StageChoice, ...]] | None:
        """Returns the least need of a fullest rank, with its stages; None if no plan has this shape."""
        return self._find_best(self._compute_least_need)

    def _find_best(self, cost: _Cost) -> tuple[float, tuple[StageChoice, ...]] | None:
        self._merged.clear()
        tables = self._fill_tables(cost, None)
        least = min((float(tables[state][0, 0]) for state in self._starts(tables)), default=np.inf)
        if np.isinf(least):
            return None
        return least, self._walk(cost, least)

    def exceeds(self, comparisons: float) -> bool:
        """Returns whether it has to compare more costs."""
        pairs = len(self._before) * (len(self.space.meshes) if self.how == "exact" else 1)
        most = int(comparisons // (pairs * len(self._places) ** 2))
        return next(islice(self._iterate_stages(), most, None), None) is not None

    @cached_property
    def _before(self) -> tuple[int | None, ...]:
        """The meshes that the stage before may have, where they matter."""
        return tuple(range(len(self.space.meshes))) if self.how == "exact" else (None,)

    @cached_property
    def _requested(self) -> frozenset[tuple[int, int]] | None:
        """The pairs (workers up to the output, replicas) of `counts`."""
        return None if self.counts is None else frozenset(states_of_counts(self.counts))

    @cached_property
    def _stages(self) -> dict[MeshState, dict[MeshState, list[MeshWorkers]]]:
        """Each state, by increasing ranks, with the workers that its stage may have, by the state after it.

        The mesh of the latter is always 0.
        """
        stages: dict[MeshState, dict[MeshState, list[MeshWorkers]]] = {}
        for state, rest, workers in self._iterate_stages():
            stages.setdefault(state, {}).setdefault(rest, []).append(workers)
        return stages

    def _iterate_stages(self) -> Iterator[tuple[MeshState, MeshState, MeshWorkers]]:
        after = {0: {0}}  # ranks -> how many workers they may be, for those that can be reached
        for ranks in range(1, self._total + 1):
            for number, mesh in enumerate(self.space.meshes):
                for replicas in range(1, ranks // mesh.size + 1):
                    later_ranks = ranks - replicas * mesh.size
                    later = after.get(later_ranks)
                    lies = self.space.site_at(self._total - ranks, replicas, mesh) if later else None
                    if lies is None or later is None or self.cycle % replicas:
                        continue
                    for rest in sorted(later):
                        workers = rest + replicas if self._counts_workers else 0
                        if self._requested is None or (workers, replicas) in self._requested:
                            after.setdefault(ranks, set()).add(workers)
                            state = MeshState(ranks, workers, number if self.how == "exact" else 0)
                            in_flight = self._estimate_in_flight(replicas, later_ranks, rest)
                            yield state, MeshState(later_ranks, rest, 0), MeshWorkers(number, replicas, lies, in_flight)

    def _starts(self, tables: dict[MeshState, FloatArray]) -> list[MeshState]:
        whole = None if self.counts is None else sum(self.counts)
        return [
            state
            for state in tables
            if (not self.all_ranks or state.ranks == self._total) and whole in (None, state.workers)
        ]

    def _fill_tables(self, cost: _Cost, limit: float | None) -> dict[MeshState, FloatArray]:
        """For each state, as [mesh before, place]: the least maximum of the costs from there on; with a limit that all
        of them keep, the fewest stages."""
        tables: dict[MeshState, FloatArray] = {}
        for state, stages in self._stages.items():
            table = np.full((len(self._before), len(self._places)), np.inf)
            for rest, workers in stages.items():
                for before, least in zip(self._before, table, strict=True):
                    for after, then in self._iterate_followers(tables, rest, state.mesh):
                        costs = self._merge_costs(cost, workers, before, after)
                        joined = (
                            np.maximum(costs, then) if limit is None else np.where(costs <= limit, then + 1, np.inf)
                        )
                        np.minimum(least, joined.min(axis=1), out=least)
            tables[state] = table
        return tables

    def _merge_costs(
        self, cost: _Cost, workers: Sequence[MeshWorkers], before: int | None, after: int | None
    ) -> FloatArray:
        """Returns the least costs of stages on any of these workers."""
        rows = (cost(choice, before, after) for choice in workers)
        key = tuple(choice.kind for choice in workers), before, after
        return self._merged.look_up(key, lambda: reduce(np.minimum, rows))

    def _iterate_followers(
        self, tables: dict[MeshState, FloatArray], rest: MeshState, mesh: int
    ) -> Iterator[tuple[int | None, FloatArray]]:
        """Yields the mesh after a stage on a mesh, where it matters, with the table of what follows."""
        if not rest.ranks:
            end = np.full(len(self._places), np.inf)
            end[-1] = 0.0
            yield None, end
        elif self.how != "exact":
            yield None, tables[rest][0]
        else:
            for number in range(len(self.space.meshes)):
                if (after := tables.get(rest._replace(mesh=number))) is not None:
                    yield number, after[mesh]

    def _walk(self, cost: _Cost, limit: float) -> tuple[StageChoice, ...]:
        tables = self._fill_tables(cost, limit)
        starts = self._starts(tables)
        stages_left = min(float(tables[state][0, 0]) for state in starts)
        state = min(start for start in starts if tables[start][0, 0] == stages_left)
        cut, before = 0, 0

        def find_next() -> tuple[MeshWorkers, MeshState, int]:
            """Returns the workers of a state's stage from a place on, the state after it, and the index of its end."""
            for workers, rest in self._list_workers(state):
                for after, then in self._iterate_followers(tables, rest, state.mesh):
                    costs = cost(workers, self._before[before], after)[cut]
                    ends = np.flatnonzero((costs <= limit) & (then + 1 == stages_left))
                    if len(ends):
                        return workers, rest._replace(mesh=after or 0), int(ends[0])
            raise AssertionError("the tables have no such stage")

        choices: list[StageChoice] = []
        while state.ranks:
            workers, rest, end = find_next()
            again = self._must_recompute(workers, cut, end)
            choices.append(self._make_choice(workers, cut, end, again))
            before, state, cut, stages_left = state.mesh, rest, end, stages_left - 1
        return tuple(choices)

    def _make_choice(self, workers: MeshWorkers, cut: int, end: int, recompute: bool) -> StageChoice:
        span = int(self._places[cut]), int(self._places[end])
        return StageChoice(*span, workers.replicas, self.space.meshes[workers.mesh], recompute)

    def _list_workers(self, state: MeshState) -> list[tuple[MeshWorkers, MeshState]]:
        """Returns the workers that a state's stage may have, by their mesh and number, each with the state after it."""
        rows = [(workers, rest) for rest, same in self._stages[state].items() for workers in same]
        return sorted(rows, key=lambda row: row[0][:2])

    def _must_recompute(self, workers: MeshWorkers, cut: int, end: int) -> bool:
        most = workers.lies.site.memory_bytes
        must = most is not None and self._compute_need(workers, False)[cut, end] > most
        return self.space.choices.recompute == "always" or (self.space.choices.recompute == "auto" and bool(must))


_FAR = 1 << 29  # more workers than any cluster has


def _look_ahead(limits: IntArray) -> IntArray:
    """Returns limits of stages [from, to] as [places ahead, from], up to the last that are not negative."""
    count = len(limits)
    padded = np.full((count, 2 * count), -1, dtype=np.int32)
    padded[:, :count] = limits
    down, right = padded.strides
    ahead = as_strided(padded, (count, count), (right, down + right))
    longest = np.flatnonzero((ahead >= 0).any(axis=1))
    return np.ascontiguousarray(ahead[: longest[-1] + 1 if len(longest) else 1])


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

    def within(self, period_s: float) -> tuple[StageChoice, ...] | None:
        """Returns the stages of a plan whose stages all keep the period, with the fewest workers; None if none does."""
        total, count = self._total, len(self._places)
        padded = np.full((total + 1, 2 * count), _FAR, dtype=np.int32)  # small numbers, for speed
        fewest, ahead = padded[:, :count], sliding_window_view(padded, count + 1, axis=1)  # [ranks, places ahead, from]
        fewest[0, -1] = 0
        least = np.full(self._allowed.shape, total + 1)  # ranks that keep the period, whatever fits
        limits = {}
        for number, same in {id(same): same for *_, same in self._alike}.items():
            most = reduce(np.maximum, (self._find_most(workers, period_s) for workers in same))
            replicas, stage_ranks = same[0].replicas, same[0].replicas * self._mesh_sizes[same[0].mesh]
            least[(most > 0) & (least > stage_ranks)] = stage_ranks
            limits[number] = _look_ahead(replicas * (most - 1))
        spans = find_spans(least, total)
        for ranks, rest, replicas, same in self._alike:
            first, limit = spans[ranks], limits[id(same)]
            if first.start < first.stop and spans[rest].start < spans[rest].stop:
                after = ahead[rest, : len(limit), first]
                workers_from = np.where(after <= limit[:, first], after + replicas, np.int32(_FAR)).min(axis=0)
                np.minimum(fewest[ranks, first], workers_from, out=fewest[ranks, first])
        starts = [total] if self.all_ranks else range(1, total + 1)
        ranks, cut, choices = min(starts, key=lambda n: int(fewest[n, 0])), 0, list[StageChoice]()
        if fewest[ranks, 0] >= _FAR:
            return None
        while ranks:
            choice, cut = self._find_next(fewest, ranks, cut, period_s)
            choices.append(choice)
            ranks -= choice.ranks
        return tuple(choices)

    @cached_property
    def _alike(self) -> list[tuple[int, int, int, list[MeshWorkers]]]:
        """Ranks up to the output, those after a stage, its replicas, and all such workers; equal lists are the same."""
        rows: dict[tuple[int, int, int], list[MeshWorkers]] = {}
        for state, stages in self._stages.items():
            for rest, same in stages.items():
                for workers in same:
                    rows.setdefault((state.ranks, rest.ranks, workers.replicas), []).append(workers)
        kinds: dict[Any, list[MeshWorkers]] = {}
        return [(*row, kinds.setdefault(tuple(choice.kind[:3] for choice in same), same)) for row, same in rows.items()]

    def _find_next(self, fewest: IntArray, ranks: int, cut: int, period_s: float) -> tuple[StageChoice, int]:
        for workers, rest in self._list_workers(MeshState(ranks, 0, 0)):
            after, replicas = fewest[rest.ranks], workers.replicas
            may = after + replicas == fewest[ranks, cut]
            if not may.any():
                continue
            in_flight = (after + (replicas - 1)) // replicas + 1
            ends = np.flatnonzero(may & (in_flight <= self._find_most(workers, period_s, cut)))
            if len(ends):
                end = int(ends[0])
                again = self.space.choices.recompute == "always" or bool(
                    in_flight[end] > self._find_room(workers, False)[cut, end]
                )
                return self._make_choice(workers, cut, end, again), end
        raise AssertionError("the tables have no such stage")

    def _find_most(self, workers: MeshWorkers, period_s: float, cuts: int | slice = slice(None)) -> IntArray:
        """The most in flight with which stages [from, to] fit; 0 for those that do not keep the period."""
        ways = (
            np.where(
                self._compute_cost(workers.mesh, workers.lies, recompute)[cuts] <= period_s,
                self._find_room(workers, recompute)[cuts],
                0,
            )
            for recompute in self.space.choices.recomputing
        )
        return reduce(np.maximum, ways)

    def _find_room(self, workers: MeshWorkers, recompute: bool) -> IntArray:
        """The most in flight for which each stage has memory."""
        limit = workers.lies.site.memory_bytes

        def make() -> IntArray:
            low = np.zeros(self._allowed.shape, dtype=int)  # it fits at `low`, and not at `high`
            high = np.full(self._allowed.shape, self._total + 2 if limit is None else self._total + 1)
            while limit is not None and (high - low > 1).any():
                middle = (low + high) // 2
                for in_flight in np.unique(middle[high - low > 1]):
                    need = self._compute_need(workers._replace(in_flight=int(in_flight)), recompute)
                    at_count = (middle == in_flight) & (high - low > 1)
                    low = np.where(at_count & (need <= limit), middle, low)
                    high = np.where(at_count & (need > limit), middle, high)
            return low if limit is not None else high

        key = "room", limit, self.space.spare_bytes, *self._list_limits(workers, recompute)
        return self.space.needs.look_up(key, make)
