"""The dynamic program over pipelines whose stages may be replicated.

After PipeDream, SOSP 2019, section 3.1, on one level of bandwidth (of a cluster with several levels the
slowest counts). The period of a full pipeline is that of its slowest stage, its sum over the replicas and its
messages included (`core.site`).
The paper's recurrence runs over prefixes; here it runs over suffixes, because a stage's memory depends on
what is in flight, which at the paper's depth follows from its own replicas and from the workers from it to
the output. With A(a, w, r) for layers a and on, run by w workers of which r are the first stage's:

    A(a, w, r) = min over b of max(cost(a, b, r), min over q of A(b, w - r, q))

where stage [a, b) fits the memory at (w - 1) // r + 1 in flight. What is searched is a set of such (w, r):
all of them; r = 1 for straight pipelines; one for each stage where the counts are given. (Where a lag
raises the depth upstream, `core.depth.legal`, that is not known here: the depth is applied after the search,
and the memory checked again.)

Ties, exactly: of all plans with the smallest period, those that send the fewest bytes over boundaries; of
these, those with the fewest stages; then with the fewest workers; then the one that is smallest, stage by
stage, in (last layer, replicas). A recurrence on (period, bytes, ...) would not give this (a suffix may trade
its own slack for bytes), so a second one minimises bytes and stages within the period.

O(n^2 c + n w^3) for n places to cut, w workers and c counts of replicas, vectorised over n.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from ..core.errors import PlanError
from ..core.holding import Held
from ..core.plan import Plan
from ..core.units import format_bytes
from .space import Space

__all__ = ["Pipelines", "State", "check_fits", "of_counts", "replicated", "straights"]

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
    """

    space: Space
    states: tuple[State, ...]
    starts: tuple[State, ...] | None = None
    whole: bool = True

    def best(self, note: str = "") -> Plan | None:
        """Returns the best plan at the paper's depth, or None where none fits the memory."""
        period = min(self.periods.values())
        if np.isinf(period):
            return None
        cuts, replicas = self._walk(period)
        return self.space.plan(cuts, replicas, note)

    @cached_property
    def periods(self) -> dict[State, float]:
        """The smallest period, in seconds, from each state at the input; infinite where none fits."""
        return {start: float(self._suffixes[start][0]) for start in self._starts}

    @property
    def least_bytes(self) -> int:
        """The least memory of a worker that would let one plan fit; there must be a plan."""
        suffixes = self._bottlenecks(self._least)
        return int(min(suffixes[start][0] for start in self._starts))

    @property
    def _starts(self) -> tuple[State, ...]:
        return self.states if self.starts is None else self.starts

    @cached_property
    def _places(self) -> Any:
        return np.array(self.space.positions)

    @cached_property
    def _allowed(self) -> Any:
        """Which places make a stage, from one to the other."""
        order = self._places[:, None] < self._places[None, :]
        order[0, -1] &= self.whole
        return order

    @cached_property
    def _passes(self) -> tuple[Any, Any]:
        forward, backward = self.space.passes_s(self._places[:, None], self._places[None, :])
        return np.asarray(forward, dtype=float), np.asarray(backward, dtype=float)

    @cached_property
    def _costs(self) -> dict[int, Any]:
        return {}

    @cached_property
    def _needs(self) -> dict[tuple[Held, Held], Any]:
        return {}

    def _cost(self, replicas: int) -> Any:
        if replicas not in self._costs:
            ends = self._places[:, None], self._places[None, :]
            cost = self.space.period_s(self._passes, *ends, replicas)
            self._costs[replicas] = np.where(self._allowed, cost, np.inf)
        return self._costs[replicas]

    def _need(self, state: State) -> Any:
        workers, replicas = state
        held, lag = (workers - 1) // replicas + 1, self.space.lag if replicas > 1 else 0
        # One stage alone does not lag.
        key = self.space.held(held, lag, replicas), self.space.held(held, 0, replicas)
        if key not in self._needs:
            ends = self._places[:, None], self._places[None, :]
            need = self.space.need_bytes(*ends, held, lag, replicas=replicas)
            need[0, -1] = self.space.need_bytes(0, int(self._places[-1]), held, replicas=replicas)
            self._needs[key] = need
        return self._needs[key]

    def _seconds(self, state: State) -> Any:
        """Seconds of the stage from one place to the other; infinite where it is none, or does not fit."""
        limit, cost = self.space.cluster.memory_bytes, self._cost(state[1])
        return cost if limit is None else np.where(self._need(state) <= limit, cost, np.inf)

    def _least(self, state: State) -> Any:
        return np.where(self._allowed, self._need(state), np.inf)

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
        for state in self.states:
            workers, count = state
            rest = np.full(len(self._places), np.inf)
            for after in self._behind(state):
                np.minimum(rest, suffixes[after], out=rest)
            if workers == count:
                rest[-1] = 0.0  # the model's output stays where it is
            suffixes[state] = np.maximum(cost(state), rest[None, :]).min(axis=1)
        return suffixes

    def _walk(self, period: float) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The cuts and replicas that win the ties among the plans within a period."""
        none = np.iinfo(np.int64).max // 4
        stages = len(self._places) + 1
        # One number for (bytes, stages), the bytes first: exact up to 2^60 / places, a petabyte at a thousand.
        sends = self.space.crossing[self._places].astype(np.int64) * stages
        keys: dict[State, Any] = {}
        rests: dict[State, Any] = {}
        for state in self.states:
            workers, count = state
            if self._suffixes[state].min() > period:
                continue
            rest = np.full(len(self._places), none)
            for after in self._behind(state):
                if after in keys:
                    np.minimum(rest, keys[after] + sends, out=rest)
            if workers == count:
                rest[-1] = 0
            rests[state] = rest
            keys[state] = np.where(self._seconds(state) <= period, rest[None, :] + 1, none).min(axis=1)

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


def check_fits(*, min_need_bytes: int, space: Space, what: str) -> None:
    """Checks that the least need of a family of plans is within the memory of a worker.

    Raises:
        PlanError: it is not; names need and limit.
    """
    limit = space.cluster.memory_bytes
    if limit is not None and min_need_bytes > limit:
        raise PlanError(
            f"none of the {what} fits: the least that any of them needs on its fullest worker is "
            f"{format_bytes(min_need_bytes)} ({min_need_bytes} bytes), a worker has {format_bytes(limit)}; give more "
            "memory or workers, smaller minibatches, more microbatches or a schedule that holds fewer versions"
        )
