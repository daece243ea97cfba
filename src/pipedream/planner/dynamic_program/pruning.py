"""Places that no plan as fast as a known one can use, left out of the search: exact, and most of them go.

With the period T of some plan, R(a, b) the fewest replicas with which the stage from place a to place b takes at most
T, f(b) the fewest workers of a chain of such stages from the input to b, and g(b) of one from b to the output: a plan
with a period of at most T has a cut at b only if f(b) + g(b) workers are there. Memory is not asked: it could only
forbid more.

R is looked for among few pairs only: both ends of a stage leave work that takes at least its seconds / T workers.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import numpy as np

from pipedream.core.plan.cost import all_reduce_s
from pipedream.planner.dynamic_program.recurrence import Pipelines
from pipedream.planner.tables.search_space import Space

__all__ = ["fewest_workers", "narrowed"]

_ENOUGH = 160  # places that the dynamic program takes a fraction of a second for
_MOST = 400  # that are left, of a graph whose places are not all searched
_FIRST = 64  # places that a first plan is looked for on
_MOST_WORKERS = 64
_CLOSE = 1e-3  # relative; the fastest plan is not looked for more closely here
_SLACK = 1e-9  # relative; seconds are summed in floating point here, exactly there


def narrowed(pipelines: Pipelines, *, enough: int = _ENOUGH, first: int = _FIRST) -> Pipelines:
    """Returns the same search on fewer places, with the same best plan; with a good one, where `Space.is_whole` is not.

    Args:
        pipelines: the search; returned as it is where it has few places, or many workers or levels of them.
        enough: places that are few.
        first: places that a first plan is looked for on.
    """
    space = pipelines.space
    workers = max(w for w, _ in pipelines.states)
    if len(space.positions) <= enough or workers > _MOST_WORKERS or not space.cluster.is_flat:
        return pipelines
    found = replace(pipelines, space=replace(space, positions=_thinned(space, first))).best()
    if found is None:
        return pipelines
    counts = sorted({count for _, count in pipelines.states})
    low, high = 0.0, found.slowest_stage_s
    ahead, behind = fewest_workers(space, high, counts, workers)
    kept = ahead + behind <= workers
    # Halving finds faster plans, as long as memory cannot forbid them and a plan may be any that was counted.
    every = {(w, count) for w in range(1, workers + 1) for count in counts if count <= w}
    may_halve = not space.cluster.is_limited and pipelines.starts is None and set(pipelines.states) == every
    may_halve &= pipelines.recompute != "always"  # what a stage does again is not counted here
    while may_halve and kept.sum() > enough and high - low > _CLOSE * high:
        low = low or float(sum(space.passes_s(0, len(space.profile.layers)))) / workers
        middle = (low + high) / 2
        ahead, behind = fewest_workers(space, middle, counts, workers, whole=pipelines.whole)
        if ahead[-1] <= workers:
            high, kept = middle, ahead + behind <= workers
        else:
            low = middle
    kept[[0, -1]] = True
    positions = tuple(place for place, keep in zip(space.positions, kept, strict=True) if keep)
    left = replace(pipelines, space=replace(space, positions=positions))
    if not space.is_whole and len(positions) > _MOST:
        # These are some of all places anyway: still fewer will do, if there is as good a plan on them.
        few = replace(pipelines, space=replace(space, positions=_thinned(left.space, _MOST)))
        if min(few.periods.values()) <= high * (1 + _CLOSE):
            return few
    return left


def fewest_workers(
    space: Space, period_s: float, counts: Iterable[int], workers: int, whole: bool = True
) -> tuple[Any, Any]:
    """Returns the fewest workers of stages that take at most `period_s`, up to and from each position.

    Args:
        space: on workers that are alike.
        period_s: of the slowest stage.
        counts: that stages may have as replicas, rising.
        workers: more are not counted: `workers` + 1 stands for them.
        whole: one stage alone counts too.
    """
    least = _least_replicas(space, period_s * (1 + _SLACK), counts, workers)
    if not whole:
        least[0, -1] = workers + 1
    count = len(space.positions)
    ahead, behind = np.full(count, workers + 1), np.full(count, workers + 1)
    ahead[0] = behind[-1] = 0
    for i in range(1, count):
        ahead[i] = min(workers + 1, (ahead[:i] + least[:i, i]).min())
    for i in range(count - 2, -1, -1):
        behind[i] = min(workers + 1, (behind[i + 1 :] + least[i, i + 1 :]).min())
    return ahead, behind


def _least_replicas(space: Space, period_s: float, counts: Iterable[int], workers: int) -> Any:
    """The fewest replicas of the stage from one position to the other; `workers` + 1 where no count will do."""
    places = np.array(space.positions)
    forward, backward = (np.asarray(part, dtype=float) for part in (space.forward[places], space.backward[places]))
    forward, backward, parameters = forward / space.scale, backward / space.scale, space.parameters[places]
    done_s = forward + backward
    ahead = np.ceil(done_s / period_s * (1 - _SLACK))
    behind = np.ceil((done_s[-1] - done_s) / period_s * (1 - _SLACK))
    rate = space.cluster.bandwidth_bytes_per_s
    sends = space.crossing[places].astype(float)
    sends[[0, -1]] = 0.0
    # Both bounds on the replicas: those of its compute, and those of its messages.
    done, sends = done_s / period_s, sends / (rate * period_s)
    i, j = np.nonzero(space.precede & (done[None, :] - done[:, None] <= (workers - ahead)[:, None] - behind[None, :]))
    left = workers - ahead[i] - behind[j]
    needs = np.maximum(done[j] - done[i], sends[i] + sends[j])
    least = np.full((len(places), len(places)), workers + 1, dtype=np.int16)
    for count in counts:
        open_now = (needs <= left) & (left >= count)
        i, j, left, needs = i[open_now], j[open_now], left[open_now], needs[open_now]
        tried = np.flatnonzero(needs <= count)
        # A sum over replicas never hides behind forwards: most pairs that it is too long for go without more ado.
        site, held = space.site(count), parameters[j[tried]] - parameters[i[tried]]
        seen_s = all_reduce_s(held, count, site.sum_bytes_per_s, how=site.sums) + forward[j[tried]] - forward[i[tried]]
        tried = tried[seen_s <= count * period_s]
        a, b = i[tried], j[tried]
        passes_s = np.maximum(forward[b] - forward[a], 0.0), np.maximum(backward[b] - backward[a], 0.0)
        fits = space.period_s(passes_s, places[a], places[b], site) <= period_s
        least[a[fits], b[fits]] = count
        needs[tried[fits]] = np.inf
    return least


def _thinned(space: Space, count: int) -> tuple[int, ...]:
    """Of places with about the same compute before them, the one that the fewest bytes cross."""
    places = np.array(space.positions)
    done_s = np.asarray((space.forward + space.backward)[places] / space.scale, dtype=float)
    shares = np.floor(done_s / max(done_s[-1], 1e-300) * count)
    order = np.lexsort((np.arange(len(places)), space.crossing[places], shares))
    starts = np.flatnonzero(np.diff(shares[order], prepend=-1.0))
    kept = {0, len(places) - 1, *order[starts].tolist()}
    return tuple(space.positions[i] for i in sorted(kept))
