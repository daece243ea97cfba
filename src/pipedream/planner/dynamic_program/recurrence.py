"""The dynamic program over pipelines whose stages may be replicated, on any cluster.

After PipeDream, SOSP 2019, section 3.1. Stages take consecutive workers of a line (`planner.workers.worker_line`), up
to its last; what is left idle stands in front. The period of a full pipeline is that of its slowest stage, its sum
over the replicas and its messages included, which is a function of the stage's layers and of where on the line it
stands (`core.plan.site`). The paper's recurrence runs over prefixes; here it runs over suffixes, because a stage's
memory depends on what is in flight, which at the paper's depth follows from its own replicas and from the workers from
it to the output. With A(a, w, r) for layers a and on, run by the line's last w workers of which r are the first stage's:

    A(a, w, r) = min over b of max(cost(a, b, w, r), min over q of A(b, w - r, q))

where stage [a, b) fits the memory of its smallest worker at (w - 1) // r + 1 in flight; a stage that does not may keep
only its input and do its forward again, if that is asked. What is searched is a set of such (w, r):
all of them; r = 1 for straight pipelines; one for each stage where the counts are given. (Where an update delay
raises the depth upstream, `core.plan.depth.legal`, that is not known here: the depth is applied after the search,
and the memory checked again.)

Ties, exactly: of all plans with the smallest period, those that send the fewest bytes over boundaries; of
these, those with the fewest stages; then with the fewest workers; then the one that is smallest, stage by
stage, in (last layer, replicas). A recurrence on (period, bytes, ...) would not give this (a suffix may trade
its own slack for bytes), so a second one minimises bytes and stages within the period.

O(n^2 s) for n places to cut and s states, vectorised over n; on one level of like workers the costs of all states with
as many replicas are the same, on several levels those that stand alike within their components.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np

from pipedream.core.errors import PlanError
from pipedream.core.plan.plan import Plan
from pipedream.core.plan.site import PortLoad, Site
from pipedream.core.schedule.occupancy import StageOccupancy
from pipedream.planner.dynamic_program.shortage import Shortage
from pipedream.planner.tables.search_space import Space
from pipedream.planner.workers.worker_line import WorkerLine

__all__ = ["RECOMPUTE", "Pipelines", "State", "check_recompute", "of_counts", "rank", "replicated", "straights"]

RECOMPUTE = ("never", "auto", "always")
"""Which stages keep only their input between forward and backward: none, those that do not fit otherwise, all."""


def check_recompute(recompute: str) -> None:
    """Checks that a word is one of `RECOMPUTE`. Raises PlanError."""
    if recompute not in RECOMPUTE:
        raise PlanError(f"recompute {recompute!r} is not known; write {', '.join(RECOMPUTE)}")


_CACHE_BYTES = 2**29  # of costs that are kept for states to come

State = tuple[int, int]
"""Workers from a stage to the output, and replicas of the stage."""


def replicated(workers: int) -> tuple[State, ...]:
    """Returns the states of all plans on at most so many workers."""
    return tuple((w, r) for w in range(1, workers + 1) for r in range(1, w + 1))


def straights(stages: int) -> tuple[State, ...]:
    """Returns the states of straight pipelines of at most so many stages."""
    return tuple((w, 1) for w in range(1, stages + 1))


def of_counts(replicas: tuple[int, ...]) -> tuple[State, ...]:
    """Returns the states of pipelines with these replicas, stage by stage."""
    return tuple((sum(replicas[s:]), replicas[s]) for s in range(len(replicas) - 1, -1, -1))


@dataclass(frozen=True, eq=False)
class Pipelines:
    """All plans of a space over a set of states, and the tables that find the best of them.

    Attributes:
        space: what each stage costs.
        states: which are searched, by rising workers.
        starts: those that may stand at the input; all of them unless said.
        whole: a single stage is a plan too.
        line: of the cluster's workers; as they stand unless said.
        recompute: one of `RECOMPUTE`.
    """

    space: Space
    states: tuple[State, ...]
    starts: tuple[State, ...] | None = None
    whole: bool = True
    line: WorkerLine | None = None
    recompute: str = "never"

    def best(self, note: str = "") -> Plan | None:
        """Returns the best plan at the paper's depth, or None where none fits the memory."""
        period = min(self.periods.values())
        if np.isinf(period):
            return None
        return self._plan(*self._walk(period), note)

    @cached_property
    def periods(self) -> dict[State, float]:
        """The smallest period, in seconds, from each state at the input; infinite where none fits."""
        return {start: float(self._suffixes[start][0]) for start in self._starts}

    @property
    def least_bytes(self) -> int:
        """The least memory of a worker that would let one plan fit, were all workers alike; there must be a plan."""
        suffixes = self._bottlenecks(self._least)
        return int(min(suffixes[start][0] for start in self._starts))

    @property
    def shortage(self) -> Shortage:
        """What is in the way of the plan whose workers miss the fewest bytes; no plan may fit."""
        suffixes = self._bottlenecks(self._missing)
        most = min(suffixes[start][0] for start in self._starts)
        place, choices = 0, [start for start in self._starts if suffixes[start][0] <= most]
        while True:
            for state in choices:
                rest = self._rest(suffixes, state, np.inf)
                missing = self._missing(state)[place]
                ends = np.flatnonzero(np.maximum(missing, rest) <= most)
                if len(ends):
                    break
            end = int(ends[0])
            if missing[end] == most:
                memory = self._site(state).memory_bytes or 0
                first, last = (self.space.downsets[self._places[at]].bit_count() for at in (place, end))
                return Shortage(int(most) + memory, memory, first, last)
            place, choices = end, self._behind(state)

    @property
    def _starts(self) -> tuple[State, ...]:
        return self.states if self.starts is None else self.starts

    @cached_property
    def _line(self) -> WorkerLine:
        return self.line or WorkerLine.of(self.space.cluster)

    @cached_property
    def _sites(self) -> dict[State, Site]:
        workers, replicas = np.array(self.states).T
        sites = self._line.each(len(self._line.order) - workers, replicas)
        return dict(zip(self.states, sites, strict=True))

    def _site(self, state: State) -> Site:
        return self._sites[state]

    @cached_property
    def _places(self) -> Any:
        return np.array(self.space.positions)

    @cached_property
    def _allowed(self) -> Any:
        """Which places make a stage, from one to the other."""
        order = self.space.precede.copy()
        order[0, -1] &= self.whole
        return order

    @cached_property
    def _passes(self) -> tuple[Any, Any]:
        forward, backward = self.space.passes_s(self._places[:, None], self._places[None, :])
        return np.asarray(forward, dtype=float), np.asarray(backward, dtype=float)

    @cached_property
    def _redone(self) -> tuple[Any, Any]:
        """The same of a stage that does its forward again."""
        forward, backward = self._passes
        return forward, backward + forward

    @cached_property
    def _bytes(self) -> tuple[Any, ...]:
        """Bytes of all stages, as `Site` asks for them."""
        return self.space.bytes_of(self._places[:, None], self._places[None, :])

    @cached_property
    def _updates(self) -> tuple[Any, Any]:
        """Seconds of the updates of all stages, without and with an update delay, which one stage alone never has."""
        ends = self._places[:, None], self._places[None, :]
        without, delayed = (np.array(self.space.update_s(*ends, update_delay), dtype=float) for update_delay in (0, 1))
        delayed[0, -1] = without[0, -1]
        return without, delayed

    @cached_property
    def _costs(self) -> dict[Any, Any]:
        return {}

    @cached_property
    def _needs(self) -> dict[tuple[StageOccupancy, StageOccupancy, int, bool, bool], Any]:
        return {}

    def _cost(self, site: Site, recompute: bool) -> Any:
        """Seconds of each stage on a site; infinite where it is none."""
        held, before, behind = self._bytes
        bare = replace(site, ports=(), memory_bytes=None)
        compute_s = self._kept((bare, recompute), lambda: self._compute_s(site, recompute))
        port_s = self._kept(site.ports, lambda: site.port_s(held, before, behind))
        return np.maximum(compute_s, port_s)

    def _compute_s(self, site: Site, recompute: bool) -> Any:
        update_delay = self.space.update_delay if site.replicas > 1 else 0
        if (recompute, update_delay) not in self._rows:
            rows = (*(self._redone if recompute else self._passes), self._updates[update_delay], self._bytes[0])
            self._rows[recompute, update_delay] = tuple(row[self._allowed] for row in rows)
        found = np.full(self._allowed.shape, np.inf)
        found[self._allowed] = site.compute_s(*self._rows[recompute, update_delay])
        return found

    @cached_property
    def _rows(self) -> dict[tuple[bool, int], tuple[Any, ...]]:
        """What `Site.compute_s` asks of the stages that are allowed, one after the other."""
        return {}

    def _kept(self, key: Site | tuple[PortLoad, ...] | tuple[Site, bool], make: Callable[[], Any]) -> Any:
        if key in self._costs:
            return self._costs[key]
        made = make()
        if len(self._costs) * 8 * len(self._places) ** 2 < _CACHE_BYTES:
            self._costs[key] = made
        return made

    def _need(self, state: State, recompute: bool) -> Any:
        workers, replicas = state
        held, update_delay = (workers - 1) // replicas + 1, self.space.update_delay if replicas > 1 else 0
        # One stage alone does not update delay.
        share = -(-self.space.microbatches // replicas)
        key = (
            self.space.held(held, update_delay, replicas),
            self.space.held(held, 0, replicas),
            share,
            replicas > 1,
            recompute,
        )
        if key not in self._needs:
            ends = self._places[:, None], self._places[None, :]
            need = self.space.need_bytes(*ends, held, update_delay, recompute, replicas) + self.space.spare_bytes
            need[0, -1] = self.space.need_bytes(0, int(self._places[-1]), held, 0, recompute, replicas)
            self._needs[key] = need
        return self._needs[key]

    def _seconds(self, state: State) -> Any:
        """Seconds of the stage from one place to the other; infinite where it is none, or does not fit."""
        site, always = self._site(state), self.recompute == "always"
        cost = self._cost(site, always)
        if site.memory_bytes is None:
            return cost
        fits = self._need(state, always) <= site.memory_bytes
        if self.recompute != "auto" or fits.all():
            return np.where(fits, cost, np.inf)
        fits_then = self._need(state, True) <= site.memory_bytes
        return np.where(fits, cost, np.where(fits_then, self._cost(site, True), np.inf))

    def _least(self, state: State) -> Any:
        need = self._need(state, self.recompute == "always")
        if self.recompute == "auto":
            need = np.minimum(need, self._need(state, True))
        return np.where(self._allowed, need, np.inf)

    def _missing(self, state: State) -> Any:
        memory = self._site(state).memory_bytes
        return np.where(self._allowed, -np.inf if memory is None else self._least(state) - (memory or 0), np.inf)

    def _behind(self, state: State) -> list[State]:
        """The states that may follow; none where the stage must be the last."""
        return self._by_workers.get(state[0] - state[1], [])

    @cached_property
    def _by_workers(self) -> dict[int, list[State]]:
        found: dict[int, list[State]] = {}
        for state in self.states:
            found.setdefault(state[0], []).append(state)
        return found

    @cached_property
    def _suffixes(self) -> dict[State, Any]:
        return self._bottlenecks(self._seconds)

    def _bottlenecks(self, cost: Callable[[State], Any]) -> dict[State, Any]:
        """For each state, the smallest maximum of a cost from each place on."""
        suffixes: dict[State, Any] = {}
        best: dict[int, Any] = {}
        for state in self.states:
            workers, count = state
            rest = best.get(workers - count)
            rest = np.full(len(self._places), np.inf) if rest is None else rest
            if workers == count:
                rest = rest.copy()
                rest[-1] = -np.inf  # the model's output stays where it is
            suffixes[state] = np.maximum(cost(state), rest[None, :]).min(axis=1)
            best[workers] = np.minimum(best.get(workers, np.inf), suffixes[state])
        return suffixes

    def _rest(self, tables: dict[State, Any], state: State, none: float) -> Any:
        """The least of a table over the states that may follow one, from each place on."""
        rest = np.full(len(self._places), none)
        for after in self._behind(state):
            if after in tables:
                np.minimum(rest, tables[after], out=rest)
        if state[0] == state[1]:
            rest[-1] = -np.inf
        return rest

    def _walk(self, period: float) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The cuts and replicas that win the ties among the plans within a period."""
        none = np.iinfo(np.int64).max // 4
        stages = len(self._places) + 1
        # One number for (bytes, stages), the bytes first: exact up to 2^60 / places, a petabyte at a thousand.
        sends = self.space.crossing[self._places].astype(np.int64) * stages
        keys: dict[State, Any] = {}
        rests: dict[State, Any] = {}
        best: dict[int, Any] = {}
        for state in self.states:
            workers, count = state
            if self._suffixes[state].min() > period:
                continue
            rest = np.full(len(self._places), none)
            if workers - count in best:
                np.minimum(rest, best[workers - count] + sends, out=rest)
            if workers == count:
                rest[-1] = 0
            rests[state] = rest
            keys[state] = np.where(self._seconds(state) <= period, rest[None, :] + 1, none).min(axis=1)
            best[workers] = np.minimum(best.get(workers, none), keys[state])

        place = 0
        cuts: list[int] = []
        counts: list[int] = []
        wanted = min(int(keys[start][0]) for start in self._starts if start in keys)
        choices = [start for start in self._starts if start in keys and keys[start][0] == wanted]
        choices = [start for start in choices if start[0] == choices[0][0]]
        while True:
            ends = [
                (int(np.flatnonzero(here)[0]), choice[1], choice)
                for choice in choices
                if choice in keys
                and (here := (self._seconds(choice)[place] <= period) & (rests[choice] + 1 == wanted)).any()
            ]
            place, count, state = min(ends)
            counts.append(count)
            wanted -= 1
            if place == len(self._places) - 1:
                return tuple(cuts), tuple(counts)
            cuts.append(int(self._places[place]))
            wanted -= int(sends[place])
            choices = self._behind(state)

    def _plan(self, cuts: tuple[int, ...], counts: tuple[int, ...], note: str) -> Plan:
        """The plan of these stages, on the end of the line, each recomputing where it must."""
        workers = sum(counts)
        again = []
        indices = {int(place): index for index, place in enumerate(self._places)}
        left = workers
        for (first, last), count in zip(pairwise((0, *cuts, int(self._places[-1]))), counts, strict=True):
            memory = self._site((left, count)).memory_bytes
            must = memory is not None and self._need((left, count), False)[indices[first], indices[last]] > memory
            again.append(self.recompute == "always" or (self.recompute == "auto" and bool(must)))
            left -= count
        taken = self._line.taken(workers)
        return self.space.plan(cuts, counts, note, order=taken, recompute=tuple(again))


def rank(plan: Plan) -> tuple[float, int, int, int, tuple[tuple[int, int], ...], tuple[bool, ...]]:
    """Returns what the best plan has least of: the ties of this module's first lines, then stages that recompute."""
    sent = sum(stage.output_bytes for stage in plan.stages[:-1])
    order = tuple((stage.last, stage.replicas) for stage in plan.stages)
    again = tuple(stage.recompute for stage in plan.stages)
    return plan.slowest_stage_s, sent, len(plan.stages), plan.workers, order, again
