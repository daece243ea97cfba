"""The planner's front: one worker, data parallelism or a straight pipeline, whichever is predicted fastest.

The predicted seconds are those of a full pipeline whose messages are hidden behind compute, which takes
the depth ``full``; at the paper's depth up to 2c (p - 1) / p more may show (`core.depth`).
"""

from __future__ import annotations

from dataclasses import replace
from math import inf, isinf
from typing import NamedTuple

from ..core.cluster import Cluster
from ..core.plan import Plan
from ..core.profile import Profile
from ..core.units import format_seconds
from .dynamic import Pipelines, check_fits
from .space import Space, Versions, stash

__all__ = ["plan"]


class _Candidate(NamedTuple):
    """Sorted as written: equal seconds are won by fewer stages, then by fewer workers."""

    seconds: float
    stages: int
    workers: int

    @property
    def is_pipeline(self) -> bool:
        return self.stages > 1

    def __str__(self) -> str:
        what = f"a straight pipeline of {self.stages} stages"
        if not self.is_pipeline:
            what = "one worker" if self.workers == 1 else f"data parallelism on {self.workers} workers"
        if isinf(self.seconds):
            return f"{what} does not fit the memory"
        return f"{what} is predicted at {format_seconds(self.seconds)} per minibatch"


def plan(
    profile: Profile,
    cluster: Cluster,
    *,
    versions: Versions = stash,
    microbatches: int = 1,
    depth: str | tuple[int, ...] = "noam",
    straight: bool | None = None,
) -> Plan:
    """Finds the plan with the smallest predicted seconds per minibatch.

    Args:
        versions: versions of the weights that a stage holds, from its count in flight.
        microbatches: parts that a minibatch is split into.
        depth: applied to the plan found at the paper's depth; memory is checked again at it.
        straight: None compares one worker, data parallelism on all workers, and straight pipelines of 2
            stages up to one per worker, equal seconds going to fewer stages, then fewer workers; True takes
            the straight pipeline of exactly one stage per worker; False takes data parallelism.

    Raises:
        PlanError: more stages than the model can be cut into, or nothing fits the memory at this depth.
    """
    space = Space.of(profile, cluster, versions=versions, microbatches=microbatches)
    pipelines = Pipelines(space)
    alone, parallel = _one_stage(space, 1), _one_stage(space, cluster.workers)
    if straight is True:
        found = pipelines.plan(cluster.workers)
        return space.at_depth(replace(found, note=f"{found.note}; {parallel}"), depth)
    if straight is False:
        if isinf(parallel.seconds):
            check_fits(min_need_bytes=_whole_bytes(space), space=space, what="data-parallel plans")
        return space.at_depth(space.plan((), (cluster.workers,), f"data parallelism was asked; {alone}"), depth)

    longest = pipelines.longest
    periods = pipelines.periods(longest)
    straights = [_Candidate(periods[count - 1], count, count) for count in range(2, longest + 1)]
    best = min([alone, parallel, *straights])
    if isinf(best.seconds):
        what = f"plans (data parallelism, straight pipelines of 1 to {longest} stages)"
        check_fits(min_need_bytes=min(pipelines.least_bytes(longest)), space=space, what=what)
    note = _promise(best, alone, parallel, straights)
    if best.is_pipeline:
        return space.at_depth(replace(pipelines.plan(best.stages), note=note), depth)
    return space.at_depth(space.plan((), (best.workers,), note), depth)


def _one_stage(space: Space, workers: int) -> _Candidate:
    limit = space.cluster.memory_bytes
    fits = limit is None or _whole_bytes(space) <= limit
    seconds = float(space.seconds(0, len(space.profile.layers), workers)) if fits else inf
    return _Candidate(seconds, 1, workers)


def _whole_bytes(space: Space) -> int:
    return int(space.need_bytes(0, len(space.profile.layers), 1))


def _promise(best: _Candidate, alone: _Candidate, parallel: _Candidate, straights: list[_Candidate]) -> str:
    """What the plan promises, and what the next best kinds would take."""
    if straights:
        compared = f"one worker, data parallelism and straight pipelines of 2 to {straights[-1].stages} stages"
    elif parallel.workers > 1:
        compared = "one worker and data parallelism (the model cannot be cut)"
    else:
        return "one worker"
    others = [parallel, alone, *([min(straights)] if straights else [])]
    rest = "; ".join(str(other) for other in others if other != best)
    return f"fastest predicted among {compared}; {rest}"
