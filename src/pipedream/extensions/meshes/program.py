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
from functools import cached_property, partial, reduce
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
from numpy.lib.stride_tricks import as_strided, sliding_window_view

from pipedream.extensions.meshes.space import MeshSite, MeshSpace, StageChoice
from pipedream.planner.arrays import BoolArray, FloatArray, IntArray, Tables
from pipedream.planner.dynamic_program.recurrence import find_spans, least_need, limit_costs, spread, states_of_counts
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
        return self.space.choices.recomputing[-1 if must else 0]


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
                again = all(self.space.choices.recomputing) or bool(
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
