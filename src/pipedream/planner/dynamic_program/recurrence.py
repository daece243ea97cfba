"""The dynamic program over pipelines whose stages may be replicated, on any cluster.

After PipeDream, SOSP 2019, section 3.1. Stages take consecutive workers of a line (`planner.workers`), up
to its end. The paper's recurrence runs over prefixes, this one over suffixes, because a stage's memory depends on what
is in flight: on its replicas and on the workers from it to the output. With A(a, w, r) for the layers from a on, run by
the last w workers, r of them in the first stage:

    A(a, w, r) = min over b of max(cost(a, b, w, r), min over q of A(b, w - r, q))

where stage [a, b) must fit the memory of its smallest worker with (w - 1) // r + 1 in flight, perhaps by recomputing
its forward. (An update delay may raise the depth upstream, `core.plan.depth.raise_to_legal`: memory is checked again.)

Ties, exactly: the smallest period, then the fewest bytes between stages, the fewest stages, the fewest workers, and the
plan that is smallest, stage by stage, in (last layer, replicas). A recurrence on (period, bytes, ...) would not give
this, because a suffix may trade its own slack for bytes. So a second recurrence minimises bytes and stages.

The cost is O(n^2 s) for n places and s states, vectorised over n.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import pairwise
from typing import Any, NoReturn, TypeVar

import numpy as np
from numpy.typing import NDArray

from pipedream.core.errors import PlanError, ShortageError
from pipedream.core.plan.choices import Choices
from pipedream.core.plan.cost import Site
from pipedream.core.plan.memory import StageSizes
from pipedream.core.plan.plan import Plan
from pipedream.core.units import format_bytes
from pipedream.planner.arrays import BoolArray, Bytes, FloatArray, IntArray, Tables
from pipedream.planner.tables.search_space import SearchSpace, add_spare_bytes, describe_copies, list_savings
from pipedream.planner.workers import WorkerLine


def limit_costs(
    choices: Choices, memory_bytes: int | None, cost: Callable[[bool], FloatArray], need: Callable[[bool], IntArray]
) -> FloatArray:
    """Returns the costs of stages, infinite where they do not fit a memory.

    Args:
        cost, need: from whether stages recompute to their costs, and the bytes that they need.
    """
    first, *others = choices.recomputing
    if memory_bytes is None:
        return cost(first)
    fits = need(first) <= memory_bytes
    if not others or fits.all():
        return np.where(fits, cost(first), np.inf)
    fits_then = need(True) <= memory_bytes
    return np.where(fits, cost(first), np.where(fits_then, cost(True), np.inf))


def least_need(choices: Choices, need: Callable[[bool], IntArray]) -> IntArray:
    """Returns the bytes that stages need at least; `need` as in `limit_costs`."""
    least: IntArray = np.minimum.reduce([need(way) for way in choices.recomputing])
    return least


_Kept = TypeVar("_Kept")

State = tuple[int, int]
"""(workers from a stage to the output, replicas of the stage)."""


def count_in_flight(state: State) -> int:
    """Returns the microbatches that a stage has in flight, at the paper's depth."""
    return (state[0] - 1) // state[1] + 1


def spread(values: NDArray[Any], allowed: BoolArray, other: float) -> NDArray[Any]:
    """Returns values of the allowed stages as [from, to], with another one for the rest."""
    table = np.full(allowed.shape, other, dtype=values.dtype)
    table[allowed] = values
    return table


def straight_states(stages: int) -> tuple[State, ...]:
    """Returns the states of straight pipelines."""
    return tuple((w, 1) for w in range(1, stages + 1))


def states_of_counts(replicas: tuple[int, ...]) -> tuple[State, ...]:
    """Returns the states of pipelines with these replicas."""
    return tuple((sum(replicas[s:]), replicas[s]) for s in range(len(replicas) - 1, -1, -1))


@dataclass(frozen=True, eq=False)
class DynamicProgram:
    """All plans of a space over a set of states, and the tables that find the best of them.

    Attributes:
        states: by increasing workers.
        starts: the states that the first stage may have; None: all.
        allow_single_stage: a single stage is a plan too.
        line: None: the cluster's own.
    """

    space: SearchSpace
    states: tuple[State, ...]
    starts: tuple[State, ...] | None = None
    allow_single_stage: bool = True
    line: WorkerLine | None = None
    _costs: Tables = field(default_factory=Tables, init=False)

    def best(self) -> Plan | None:
        """Returns the best plan at the paper's depth; None if none fits."""
        period = min(self.periods.values())
        if np.isinf(period):
            return None
        return self._build_plan(*self._walk(period))

    @cached_property
    def periods(self) -> dict[State, float]:
        """The smallest period for each state of the first stage; infinite if nothing fits."""
        return {start: float(self._suffixes[start][0]) for start in self._starts}

    @property
    def shortage(self) -> Shortage:
        """The shortage of the plan whose workers lack the fewest bytes. Only valid if no plan fits.

        Raises:
            PlanError: no chain of cuts is long enough.
        """
        suffixes = self._find_bottlenecks(self._compute_missing_bytes)
        most = min(suffixes[start][0] for start in self._starts)
        if most == np.inf:
            raise PlanError("the layers of this graph cannot be cut into that many stages; ask for fewer stages")
        cut, choices = 0, [start for start in self._starts if suffixes[start][0] <= most]
        while True:
            for state in choices:
                rest = self._find_rest(suffixes, state, np.inf)
                missing = self._compute_missing_bytes(state)[cut]
                ends = np.flatnonzero(np.maximum(missing, rest) <= most)
                if len(ends):
                    break
            end = int(ends[0])
            if missing[end] == most:
                memory = self._sites[state].memory_bytes or 0
                span = int(self._places[cut]), int(self._places[end])
                first, last = (self.space.downsets[at].bit_count() for at in span)
                moves = describe_copies(self.space, *span, recompute=any(self.space.choices.recomputing))
                savings = list_savings(self.space, partial(self._count_least, state, span))
                return Shortage(int(most) + memory, memory, first, last, moves, savings)
            cut, choices = end, self._list_followers(state)

    @property
    def _starts(self) -> tuple[State, ...]:
        return self.states if self.starts is None else self.starts

    @cached_property
    def _line(self) -> WorkerLine:
        return self.line or WorkerLine.of(self.space.cluster, terms=self.space.terms)

    @cached_property
    def _sites(self) -> dict[State, Site]:
        workers, replicas = np.array(self.states).T
        sites = self._line.site_list(len(self._line.order) - workers, replicas)
        return dict(zip(self.states, sites, strict=True))

    @cached_property
    def distinct_sites(self) -> dict[int, list[Site]]:
        """The sites that stages with each number of replicas may have, whatever their memory."""
        rows: dict[int, dict[Site, None]] = {}
        for (_, replicas), site in sorted(self._sites.items(), key=lambda row: row[0][1]):
            rows.setdefault(replicas, {})[replace(site, memory_bytes=None)] = None
        return {replicas: list(sites) for replicas, sites in rows.items()}

    @cached_property
    def _places(self) -> IntArray:
        return np.array(self.space.positions)

    @cached_property
    def _allowed(self) -> BoolArray:
        order = self.space.precedes.copy()
        order[0, -1] &= self.allow_single_stage
        return order

    def _keep(self, name: Any, make: Callable[[], _Kept]) -> _Kept:
        """Returns what all programs on these places and links have in common."""
        programs, key = self.space.shared_tables.setdefault("programs", Tables()), (name, self.allow_single_stage)
        programs[key] = value = programs[key] if key in programs else make()
        return value

    @cached_property
    def _ends(self) -> tuple[IntArray, IntArray]:
        """The places from which, and to which, the allowed stages are; other arrays of all stages have their order."""
        first, last = np.nonzero(self._allowed)
        return self._places[first], self._places[last]

    @property
    def _bytes(self) -> tuple[Bytes, Bytes, Bytes]:
        return self._keep("bytes", lambda: self.space.bytes_of(*self._ends))

    @property
    def _sizes(self) -> StageSizes:
        return self._keep("sizes", lambda: self.space.sizes(*self._ends))

    def _list_costs(self, recompute: bool, update_delay: int) -> tuple[Any, ...]:
        """Returns the arguments of `Site.compute_s` for all stages."""
        first, last = self._ends
        forward, backward = self.space.passes_s(first, last)
        update = np.array(np.broadcast_to(self.space.update_s(first, last, update_delay), first.shape), dtype=float)
        if update_delay:  # a single stage never has one
            end = int(self._places[-1])
            update[(first == 0) & (last == end)] = self.space.update_s(0, end)
        return forward, backward + forward if recompute else backward, update, self._bytes[0]

    def _compute_cost(self, site: Site, recompute: bool) -> FloatArray:
        bare, costs = replace(site, ports=(), memory_bytes=None), self._keep("costs", Tables)
        compute_s = costs.look_up((bare, recompute), lambda: self._compute_s(site, recompute))
        port_s = costs.look_up(site.ports, lambda: np.asarray(site.port_s(*self._bytes)))
        return spread(np.maximum(compute_s, port_s), self._allowed, np.inf)

    def _compute_s(self, site: Site, recompute: bool) -> FloatArray:
        update_delay = self.space.update_delay if site.replicas > 1 else 0
        rows = self._keep((recompute, update_delay), lambda: self._list_costs(recompute, update_delay))
        return np.asarray(site.compute_s(*rows))

    def _compute_need(self, state: State, recompute: bool) -> IntArray:
        replicas = state[1]
        in_flight, update_delay = count_in_flight(state), self.space.update_delay if replicas > 1 else 0
        share = -(-self.space.microbatches // replicas)
        key = (
            self.space.stage_occupancy(in_flight, update_delay, replicas),
            self.space.stage_occupancy(in_flight, 0, replicas),
            share,
            replicas > 1,
            recompute,
        )

        def make() -> IntArray:
            needs = self.space.need_bytes(*self._ends, in_flight, update_delay, recompute, replicas, self._sizes)
            need = spread(np.asarray(needs), self._allowed, 0)
            need[0, -1] = self.space.need_bytes(0, int(self._places[-1]), in_flight, 0, recompute, replicas)
            return need

        return add_spare_bytes(self.space, self.space.needs.look_up(key, make))

    def _count_least(self, state: State, span: tuple[int, int], space: SearchSpace) -> int:
        """Returns the least that a stage needs in another space of these places."""
        in_flight, replicas = count_in_flight(state), state[1]
        update_delay = space.update_delay if replicas > 1 and span != (0, self._places[-1]) else 0
        how = space.choices.recomputing
        return min(int(space.need_bytes(*span, in_flight, update_delay, recompute, replicas)) for recompute in how)

    def _compute_seconds(self, state: State) -> FloatArray:
        site, need = self._sites[state], partial(self._compute_need, state)
        key = id(site), 0 if site.memory_bytes is None else count_in_flight(state)  # equal sites are the same one
        cost = partial(self._compute_cost, site)
        return self._costs.look_up(key, lambda: limit_costs(self.space.choices, site.memory_bytes, cost, need))

    def _compute_missing_bytes(self, state: State) -> FloatArray:
        memory = self._sites[state].memory_bytes
        if memory is None:
            return np.where(self._allowed, -np.inf, np.inf)
        need = least_need(self.space.choices, partial(self._compute_need, state))
        return np.where(self._allowed, need - memory, np.inf)

    def _list_followers(self, state: State) -> list[State]:
        return self._by_workers.get(state[0] - state[1], [])

    @cached_property
    def _by_workers(self) -> dict[int, list[State]]:
        by_workers: dict[int, list[State]] = {}
        for state in self.states:
            by_workers.setdefault(state[0], []).append(state)
        return by_workers

    @cached_property
    def _suffixes(self) -> dict[State, FloatArray]:
        return self._find_bottlenecks(self._compute_seconds)

    def _find_bottlenecks(self, cost: Callable[[State], FloatArray]) -> dict[State, FloatArray]:
        """For each state and place, the smallest possible maximum of the costs from there on."""
        suffixes: dict[State, FloatArray] = {}
        best: dict[int, FloatArray] = {}
        for state in self.states:
            workers, count = state
            rest = best.get(workers - count)
            rest = np.full(len(self._places), np.inf) if rest is None else rest
            if workers == count:
                rest = rest.copy()
                rest[-1] = -np.inf
            suffixes[state] = np.maximum(cost(state), rest[None, :]).min(axis=1)
            best[workers] = np.minimum(best.get(workers, np.inf), suffixes[state])
        return suffixes

    def _find_rest(self, tables: dict[State, FloatArray], state: State, none: float) -> FloatArray:
        rest = np.full(len(self._places), none)
        for after in self._list_followers(state):
            if after in tables:
                np.minimum(rest, tables[after], out=rest)
        if state[0] == state[1]:
            rest[-1] = -np.inf
        return rest

    def _find_spans(self, period: float) -> list[slice]:
        """`find_spans` of the stages that keep a period, whatever fits."""
        workers = len(self._line.order)
        least = np.full(self._allowed.shape, workers + 1)
        sites = {(site.replicas, site.speed, site.sum_link): site for site in self._sites.values()}
        for site in sorted(sites.values(), key=lambda site: -site.replicas):
            site = site if self.space.cluster.is_flat else replace(site, ports=())  # else there are many ports
            least[self._compute_cost(site, self.space.choices.recomputing[0]) <= period] = site.replicas
        return find_spans(least, workers)

    def _walk(self, period: float) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The cuts and replicas that win the ties within a period."""
        none = np.iinfo(np.int64).max // 4
        stages = len(self._places) + 1
        # (bytes, stages) as one number, bytes first: exact up to 2^60 / places, a petabyte at a thousand places.
        sends = self.space.crossing[self._places].astype(np.int64) * stages
        keys: dict[State, IntArray] = {}
        rests: dict[State, IntArray] = {}
        best: dict[int, IntArray] = {}
        spans = self._find_spans(period)
        for state in self.states:
            workers, count = state
            rows, columns = spans[workers], spans[workers - count]
            if rows.start == rows.stop or columns.start == columns.stop or self._suffixes[state].min() > period:
                continue
            rest = np.full(len(self._places), none)
            if workers - count in best:
                np.minimum(rest, best[workers - count] + sends, out=rest)
            if workers == count:
                rest[-1] = 0
            rests[state], keys[state] = rest, np.full(len(self._places), none)
            keeps = self._compute_seconds(state)[rows, columns] <= period
            keys[state][rows] = np.where(keeps, rest[columns] + 1, none).min(axis=1)
            best[workers] = np.minimum(best.get(workers, none), keys[state])

        cut = 0
        cuts: list[int] = []
        counts: list[int] = []
        key = min(int(keys[start][0]) for start in self._starts if start in keys)
        choices = [start for start in self._starts if start in keys and keys[start][0] == key]
        choices = [start for start in choices if start[0] == choices[0][0]]
        while True:
            ends = [
                (int(np.flatnonzero(here)[0]), choice[1], choice)
                for choice in choices
                if choice in keys
                and (here := (self._compute_seconds(choice)[cut] <= period) & (rests[choice] + 1 == key)).any()
            ]
            cut, count, state = min(ends)
            counts.append(count)
            key -= 1
            if cut == len(self._places) - 1:
                return tuple(cuts), tuple(counts)
            cuts.append(int(self._places[cut]))
            key -= int(sends[cut])
            choices = self._list_followers(state)

    def _build_plan(self, cuts: tuple[int, ...], counts: tuple[int, ...]) -> Plan:
        recompute, ways = [], self.space.choices.recomputing
        indices = {int(cut): index for index, cut in enumerate(self._places)}
        left = workers = sum(counts)
        for (first, last), count in zip(pairwise((0, *cuts, int(self._places[-1]))), counts, strict=True):
            memory, span = self._sites[left, count].memory_bytes, (indices[first], indices[last])
            fitting = (way for way in ways if memory is None or self._compute_need((left, count), way)[span] <= memory)
            recompute.append(next(fitting, ways[-1]))
            left -= count
        return self.space.build_plan(cuts, counts, order=self._line.take_last(workers), recompute=tuple(recompute))


def find_spans(least: IntArray, workers: int) -> list[slice]:
    """For each number of workers up to the output, returns where a stage on the first of them can begin.

    Before and after it there must be enough workers, of which stages [from, to] take the least.
    """
    before, after = chain_workers(least, workers)
    rows = (np.flatnonzero((after <= count) & (before + count <= workers)) for count in range(workers + 1))
    return [slice(int(row[0]), int(row[-1]) + 1) if len(row) else slice(0, 0) for row in rows]


def chain_workers(least: IntArray, workers: int) -> tuple[IntArray, IntArray]:
    """Returns the fewest workers up to each place and from it, given those of stages [from, to].

    `workers` + 1 means more.
    """
    count = len(least)
    before, after = np.full(count, workers + 1), np.full(count, workers + 1)
    before[0] = after[-1] = 0
    for i in range(1, count):
        before[i] = min(workers + 1, (before[:i] + least[:i, i]).min())
    for i in range(count - 2, -1, -1):
        after[i] = min(workers + 1, (after[i + 1 :] + least[i, i + 1 :]).min())
    return before, after


def tie_break_key(plan: Plan) -> tuple[float, int, int, int, tuple[tuple[int, int], ...], tuple[bool, ...]]:
    """Returns the key by which the best plan is the smallest: the ties of the module docstring, then recomputation."""
    sent = sum(stage.output_bytes for stage in plan.stages[:-1])
    order = tuple((stage.last, stage.replicas) for stage in plan.stages)
    again = tuple(stage.recompute for stage in plan.stages)
    return plan.slowest_stage_s, sent, len(plan.stages), plan.workers, order, again


@dataclass(frozen=True)
class Shortage:
    """A stage that does not fit, of the plan that comes nearest to fitting.

    Attributes:
        first, last: its layers first <= i < last.
        moves: what it moves, in words.
        savings: of `list_savings`.
    """

    need_bytes: int
    memory_bytes: int
    first: int
    last: int
    moves: str = ""
    savings: Mapping[str, int] = field(default_factory=dict)

    @property
    def missing_bytes(self) -> int:
        return self.need_bytes - self.memory_bytes


def refuse(shortage: Shortage, what: str) -> NoReturn:
    """Refuses a family of plans, none of which fits the memory. Raises ShortageError."""
    first, last = shortage.first, shortage.last - 1
    layers = f"layer {first}" if first == last else f"layers {first} to {last}"
    raise ShortageError(
        f"none of the {what} fits: the least that any of them needs on its fullest worker, for {layers}, is "
        f"{format_bytes(shortage.need_bytes)} ({shortage.need_bytes} bytes){shortage.moves}, a worker has "
        f"{format_bytes(shortage.memory_bytes)}; give more memory or workers, smaller minibatches, more microbatches, "
        "recomputation or a schedule that holds fewer versions",
        shortage.need_bytes,
        shortage.missing_bytes,
        shortage.savings,
    )
