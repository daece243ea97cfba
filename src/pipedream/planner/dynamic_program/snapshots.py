"""The best plan whose workers have room for each other's snapshots, by branch and bound.

What a worker keeps for another one depends on that one's stage, which is in no state of the dynamic program. It counts
nothing of that. If its best plan lacks memory for what p keeps for q, then for any number of bytes all plans are of two
kinds: a snapshot of q is smaller, or p needs memory for as many. The program is solved for each, with a number such
that its best plan is of neither kind. As the better of all kinds is always split next, the first plan that fits is the
best.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush
from itertools import pairwise
from math import inf
from typing import Any, NamedTuple

import numpy as np

from pipedream.core.plan.host_memory import NEXT_COPIES, OWN_COPIES, find_neighbours
from pipedream.core.plan.plan import Plan
from pipedream.core.plan.stage import Stage
from pipedream.planner.arrays import IntArray
from pipedream.planner.dynamic_program.pruning import prune_places
from pipedream.planner.dynamic_program.recurrence import DynamicProgram, State, count_in_flight, tie_break_key
from pipedream.planner.workers import WorkerLine

_MAX_SPLITS = 500
_MAX_WORK = 1e7  # comparisons of costs: about a second
_SPARE_SHARE = 0.1  # of these while memory is kept free for messages, which takes many searches

_UNLIMITED = 1 << 60  # bytes


def find_best(programs: Iterable[DynamicProgram]) -> Plan | None:
    """Returns the best plan of some programs, with its bound; ties go to the first program.

    If none has room for the snapshots, it is the one found that lacks the fewest bytes; its bound is infinite if none
    can. None: nothing fits even without other workers' snapshots.
    """
    heap, lacking, solved = list[tuple[Any, int, int, _Branch, Plan]](), list[tuple[int, int, Plan]](), 0
    branches: Iterable[_Branch] = (_Branch(program, number) for number, program in enumerate(programs))
    while True:
        for branch in branches:
            solved += 1
            if (plan := branch.best()) is not None:
                heappush(heap, (tie_break_key(plan), branch.number, solved, branch, plan))
        if not heap:
            return replace(min(lacking)[2], bound_s=inf) if lacking else None
        *_, number, branch, plan = heappop(heap)
        shortfall = branch.find_shortfall(plan)
        if shortfall is None:
            return replace(plan, bound_s=plan.slowest_stage_s)
        lacking.append((shortfall.missing_bytes, number, plan))
        share = _SPARE_SHARE if branch.program.space.spare_bytes else 1.0
        if len(lacking) > share * min(_MAX_SPLITS, _MAX_WORK / branch.program.work):
            return replace(min(lacking)[2], bound_s=plan.slowest_stage_s)
        branches = branch.split(plan, shortfall)


class _Shortfall(NamedTuple):
    """The bytes that a worker lacks for snapshots; one of their senders, and how many bytes it saves."""

    missing_bytes: int
    sender: int
    saved_bytes: int


@dataclass(frozen=True)
class _Branch:
    """Some of a program's plans. Workers are numbered from the output on, from 1.

    Attributes:
        number: that of the program.
        senders: worker -> those of which it keeps snapshots, if all plans have as many workers.
        limits: worker -> the fewest and the most bytes of its snapshot.
    """

    program: DynamicProgram
    number: int
    senders: Mapping[int, Sequence[int]] | None = None
    limits: Mapping[int, tuple[int, int]] = field(default_factory=dict)

    def best(self) -> Plan | None:
        raise_need = self._raise_need if self.limits else None
        return prune_places(replace(self.program, raise_need=raise_need)).best()

    def _raise_need(self, state: State, need: IntArray, saved_bytes: IntArray) -> IntArray:
        first, replicas = state
        kept = [self._count_least_kept(worker) for worker in range(first, first - replicas, -1)]
        # The first replica alone keeps snapshots of its own, which the need contains.
        more = np.maximum(kept[0], max(kept[1:], default=0) - OWN_COPIES * saved_bytes)
        fewest, most = self.limits.get(first, (0, _UNLIMITED))
        return np.where((fewest <= saved_bytes) & (saved_bytes <= most), need + more, _UNLIMITED)

    def _count_least_kept(self, worker: int) -> int:
        senders = (self.senders or {}).get(worker, ())
        return NEXT_COPIES * sum(self.limits[sender][0] for sender in senders if sender in self.limits)

    def find_shortfall(self, plan: Plan) -> _Shortfall | None:
        """Returns the largest shortfall of a plan, its messages counted as the program does; None if it has room."""
        if plan.cluster.snapshots != "next" or plan.costs.on_gpus:
            return None
        saved_bytes, room_bytes = dict[int, int](), dict[int, int]()
        first, ends = plan.workers, self.program.space.ends(plan)
        for stage, site, span, delay in zip(plan.stages, plan.costs.sites, ends, plan.update_delay, strict=True):
            saved_bytes[first] = stage.parameter_bytes + stage.optimizer_bytes
            if site.memory_bytes is not None:
                free_bytes = site.memory_bytes - self._count_need(first, stage, span, delay)
                for worker in range(first, first - stage.replicas, -1):
                    room_bytes[worker] = free_bytes + (worker != first) * OWN_COPIES * saved_bytes[first]
            first -= stage.replicas
        shortfalls = []
        for worker, senders in (self.senders or _find_senders(self.program, plan.workers)).items():
            kept = [(saved_bytes[sender], sender) for sender in senders if sender in saved_bytes]
            missing_bytes = NEXT_COPIES * sum(size for size, _ in kept) - room_bytes.get(worker, _UNLIMITED)
            if missing_bytes > 0:
                size, sender = max(kept, key=lambda row: row[0] - self.limits.get(row[1], (0, 0))[0])
                shortfalls.append(_Shortfall(missing_bytes, sender, size))
        return max(shortfalls, default=None)

    def _count_need(self, first: int, stage: Stage, span: tuple[int, int], update_delay: int) -> int:
        in_flight, space = count_in_flight((first, stage.replicas)), self.program.space
        need_bytes = space.need_bytes(*span, in_flight, update_delay, stage.recompute, stage.replicas)
        return int(need_bytes) + space.spare_bytes

    def split(self, plan: Plan, shortfall: _Shortfall) -> Iterator[_Branch]:
        """Yields branches that together have all plans of this one but its best."""
        if self.senders is None:
            starts = self.program.states if self.program.starts is None else self.program.starts
            for workers in sorted({workers for workers, _ in starts}):
                program = replace(self.program, starts=tuple(state for state in starts if state[0] == workers))
                yield replace(self, program=program, senders=_find_senders(program, workers))
            return
        missing_bytes, sender, saved_bytes = shortfall
        fewest, most = self.limits.get(sender, (0, _UNLIMITED))
        fitting_bytes = saved_bytes - -(-missing_bytes // NEXT_COPIES)
        middle = (max(fitting_bytes, fewest) + saved_bytes + 1) // 2
        for limits in ((fewest, middle - 1), (middle, most)):
            yield replace(self, limits={**self.limits, sender: limits})


def _find_senders(program: DynamicProgram, workers: int) -> dict[int, list[int]]:
    """Returns the workers of which each worker of a plan on the last ones of the line keeps snapshots."""
    cluster = program.space.cluster
    line = program.line or WorkerLine.of(cluster)
    order = line.take_last(workers) or tuple(range(workers))
    starts = cluster.starts(1) if len(cluster.levels) > 1 else range(cluster.workers + 1)
    ranks = sorted(order)
    machines = [
        [rank for rank, worker in enumerate(ranks) if first <= worker < last] for first, last in pairwise(starts)
    ]
    numbers = [workers - order.index(worker) for worker in ranks]
    senders: dict[int, list[int]] = {}
    for sender, receiver in find_neighbours([machine for machine in machines if machine]).items():
        senders.setdefault(numbers[receiver], []).append(numbers[sender])
    return senders
