"""The dynamic program over straight pipelines: one worker a stage.

After PipeDream, SOSP 2019, section 3.1, on one level of bandwidth (of a cluster with several levels the
slowest counts). The period of a full pipeline is the seconds of its slowest stage or of its slowest
message, whose two directions run at once. The paper's recurrence runs over prefixes; here it runs over
suffixes, because a stage's memory depends on what is in flight, which at the paper's depth is the number
of stages from it to the output:

    A(a, k) = min over cuts b > a of max(cost(a, b), A(b, k - 1)),  where stage [a, b) fits with k in flight

Ties, exactly: of all pipelines with the smallest period, those that send the fewest bytes in all; of these,
the one whose tuple of cuts is smallest. A recurrence on (period, bytes) would not give this (a suffix may
trade its own slack for bytes), so a second one minimises bytes among the stages within the period.

O(p n^2) for n places to cut, vectorised over n.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from ..core.cluster import Cluster
from ..core.cost import transfer_s
from ..core.errors import PlanError
from ..core.plan import Plan
from ..core.profile import Profile
from ..core.units import format_bytes
from .space import Space, Versions, stash

__all__ = ["Pipelines", "check_fits", "straight"]


def straight(
    profile: Profile, cluster: Cluster, *, stages: int, versions: Versions = stash, microbatches: int = 1
) -> Plan:
    """Finds the straight pipeline of so many stages with the smallest period, at the paper's depth.

    Raises:
        PlanError: more stages than workers or than the model can be cut into, or none fits the memory.
    """
    return Pipelines(Space.of(profile, cluster, versions=versions, microbatches=microbatches)).plan(stages)


@dataclass(frozen=True, eq=False)
class Pipelines:
    """All straight pipelines of a space, and the tables that find the best of each length."""

    space: Space

    @property
    def longest(self) -> int:
        """The most stages that places to cut and workers allow."""
        return min(len(self.space.positions) - 1, self.space.cluster.workers)

    def plan(self, stages: int) -> Plan:
        """Returns the best pipeline of so many stages.

        Raises:
            PlanError: see `straight`.
        """
        self._check_count(stages)
        period = self.periods(stages)[-1]
        if np.isinf(period):
            what = f"straight pipelines of {stages} stages"
            check_fits(min_need_bytes=self.least_bytes(stages)[-1], space=self.space, what=what)
        cuts = self._cuts(stages, period)
        return self.space.plan(cuts, note=f"optimal among straight pipelines of {stages} stages")

    def periods(self, stages: int) -> tuple[float, ...]:
        """Returns the smallest period of 1, 2, ... stages, in seconds; infinite where none fits."""
        return self._bottlenecks(stages, lambda held: np.where(self._fits(held), self._cost, np.inf))

    def least_bytes(self, stages: int) -> tuple[int, ...]:
        """Returns, for 1, 2, ... stages, the least memory of a worker that would let one pipeline fit."""
        needs = self._bottlenecks(stages, lambda held: np.where(self._order, self._need(held), np.inf))
        return tuple(map(int, needs))

    @cached_property
    def _places(self) -> Any:
        return np.array(self.space.positions)

    @cached_property
    def _order(self) -> Any:
        return self._places[:, None] < self._places[None, :]

    @cached_property
    def _cost(self) -> Any:
        """Seconds of the stage from place a to place b and of the message that it sends on."""
        cluster = self.space.cluster
        seconds = np.asarray(self.space.seconds(self._places[:, None], self._places[None, :]), dtype=float)
        crossing: Any = self.space.crossing[self._places]
        link: Any = transfer_s(crossing, cluster.bandwidth_bytes_per_s)  # latency occupies no link
        link[-1] = 0.0  # the model's output stays where it is
        return np.maximum(seconds, link[None, :])

    def _need(self, held: int) -> Any:
        return self.space.need_bytes(self._places[:, None], self._places[None, :], held)

    def _fits(self, held: int) -> Any:
        limit = self.space.cluster.memory_bytes
        return self._order if limit is None else self._order & (self._need(held) <= limit)

    def _bottlenecks(self, stages: int, cost: Callable[[int], Any]) -> tuple[float, ...]:
        """For 1, 2, ... stages the smallest maximum of a cost, which may depend on the count in flight."""
        best = cost(1)[:, -1]
        found = [float(best[0])]
        for held in range(2, stages + 1):
            best = np.maximum(cost(held), best[None, :]).min(axis=1)
            found.append(float(best[0]))
        return tuple(found)

    def _cuts(self, stages: int, period: float) -> tuple[int, ...]:
        """The cuts with the fewest bytes sent, then the smallest, among stages within the period."""
        # Sums of bytes stand in floats, exact below 2^53 (9 PB), because infinity marks what is not allowed.
        sent = np.where(self._fits(1) & (self._cost <= period), 0.0, np.inf)[:, -1]
        crossing = self.space.crossing[self._places].astype(float)
        after: list[Any] = []
        for held in range(2, stages + 1):
            allowed = self._fits(held) & (self._cost <= period)
            total = np.where(allowed, (crossing + sent)[None, :], np.inf)
            after.append(total.argmin(axis=1))  # the first of equals: the earliest cut
            sent = total.min(axis=1)
        cuts, place = [], 0
        for chosen in reversed(after):
            place = int(chosen[place])
            cuts.append(int(self._places[place]))
        return tuple(cuts)

    def _check_count(self, stages: int) -> None:
        space = self.space
        if stages < 1:
            raise PlanError(f"a pipeline of {stages} stages was asked; give 1 or more")
        if stages > space.cluster.workers:
            raise PlanError(
                f"a straight pipeline of {stages} stages was asked, the cluster has {space.cluster.workers} workers; "
                "ask for fewer stages or give more workers"
            )
        places = len(space.positions) - 2
        if stages > places + 1:
            raise PlanError(
                f"a straight pipeline of {stages} stages was asked, the model's {len(space.profile.layers)} layers "
                f"can be cut at {places} places; ask for at most {places + 1} stages, or profile it in finer layers"
            )


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
