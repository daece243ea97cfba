"""Leaves out places that no plan as fast as a known one can use. This is exact, and removes most places.

Given the period T of some plan, let R(a, b) be the fewest replicas with which the stage from place a to place b takes
at most T, f(b) the fewest workers of a chain of such stages from the input to b, and g(b) of one from b to the output.
A plan with a period of at most T has a cut at b only if f(b) + g(b) workers exist; memory only rules out more.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from pipedream.core.plan.cost import Site
from pipedream.planner.arrays import BoolArray, ExactSums, IntArray
from pipedream.planner.dynamic_program.recurrence import DynamicProgram, chain_workers
from pipedream.planner.tables.search_space import SearchSpace, with_positions

_ENOUGH = 160  # with so few places the dynamic program takes a fraction of a second
_LITTLE = 4e6  # comparisons of a dynamic program that need no pruning either
_MOST = 400  # places to keep if the space is not complete anyway
_FIRST = 64  # places on which a first plan is searched
_MAX_WORKERS = 64
_CLOSE = 1e-3  # relative precision of the best period
_SLACK = 1e-9  # relative; seconds are added in floating point here, exactly in the search space


def prune_places(
    pipelines: DynamicProgram, *, enough: int = _ENOUGH, first: int = _FIRST, little: float = _LITTLE
) -> DynamicProgram:
    """Returns the same search on fewer places, with the same best plan (if the space is complete, else about as good).

    Unchanged with at most `enough` places, `little` work, or many workers. A first plan is searched on `first` places.
    """
    space, workers = pipelines.space, max(w for w, _ in pipelines.states)

    def is_enough(cuts: int) -> bool:
        return cuts <= enough or cuts**2 * len(pipelines.states) <= little

    if is_enough(len(space.positions)) or workers > _MAX_WORKERS:
        return pipelines
    sites, single = pipelines.distinct_sites, pipelines.allow_single_stage
    first_plan = replace(pipelines, space=with_positions(space, thin_out(space, first))).best()
    if first_plan is None:
        return pipelines
    work_s = float(sum(space.passes_s(0, len(space.profile.layers))))
    low = work_s / workers / max(site.speed for row in sites.values() for site in row)
    high = first_plan.slowest_stage_s
    before, after = fewest_workers(space, high, sites, workers)
    is_kept = before + after <= workers
    # What is counted exactly has a plan: all counted stages are allowed, wherever they are, and memory is unlimited.
    every = {(w, count) for w in range(1, workers + 1) for count in sites if count <= w}
    is_exact = space.cluster.is_flat and not space.cluster.is_limited and False in space.choices.recomputing
    is_exact &= pipelines.starts is None and set(pipelines.states) == every
    while not is_enough(is_kept.sum()) and high - low > _CLOSE * high:
        middle = (low + high) / 2
        # A single stage matters to before[-1] alone: both ends are kept anyway.
        before, after = fewest_workers(space, middle, sites, workers, allow_single_stage=single)
        if before[-1] > workers:
            low = middle
        elif is_exact:
            high, is_kept = middle, before + after <= workers
        else:
            # A plan found within `middle` is the best: every place of a better one is kept.
            pruned = _keep(pipelines, before + after <= workers)
            if min(pruned.periods.values()) <= middle:
                return pruned
            low = middle
    pruned = _keep(pipelines, is_kept)
    if not space.is_complete and space.cluster.is_flat and is_kept.sum() > _MOST:
        # Still fewer places will do if they have as good a plan.
        few = replace(pipelines, space=with_positions(space, thin_out(pruned.space, _MOST)))
        if min(few.periods.values()) <= high * (1 + _CLOSE):
            return few
    return pruned


def _keep(pipelines: DynamicProgram, is_kept: BoolArray) -> DynamicProgram:
    is_kept[[0, -1]] = True
    positions = tuple(cut for cut, keep in zip(pipelines.space.positions, is_kept, strict=True) if keep)
    return replace(pipelines, space=with_positions(pipelines.space, positions))


def fewest_workers(
    space: SearchSpace,
    period_s: float,
    sites: Mapping[int, Sequence[Site]],
    workers: int,
    allow_single_stage: bool = True,
) -> tuple[IntArray, IntArray]:
    """Returns the fewest workers of stages that take at most `period_s`, up to each position and from it.

    `sites` has those of stages with each number of replicas, by increasing numbers; `workers` + 1 means more.
    """
    least = _find_least_replicas(space, period_s * (1 + _SLACK), sites, workers)
    if not allow_single_stage:
        least[0, -1] = workers + 1
    return chain_workers(least, workers)


def _find_least_replicas(
    space: SearchSpace, period_s: float, sites: Mapping[int, Sequence[Site]], workers: int
) -> IntArray:
    """As [from, to]; `workers` + 1 if no count is enough."""
    cuts, speed = np.array(space.positions), max(site.speed for row in sites.values() for site in row)
    forward, backward = (np.asarray(part, dtype=float) for part in space.passes_s(0, cuts))
    trained = space.trained[cuts]
    work = (forward + backward) / (period_s * speed)
    before, after = np.ceil(work * (1 - _SLACK)), np.ceil((work[-1] - work) * (1 - _SLACK))
    sends = space.crossing[cuts].astype(float) * space.terms.message_share
    sends[[0, -1]] = 0.0
    # Two lower bounds of the replicas: from the compute, and from the messages, which all cross the innermost level.
    sends /= space.cluster.levels[0].link_bytes_per_s * period_s
    i, j = np.nonzero(space.precedes & (work[None, :] - work[:, None] <= (workers - before)[:, None] - after[None, :]))
    available = workers - before[i] - after[j]
    needs = np.maximum(work[j] - work[i], sends[i] + sends[j])
    least = np.full((len(cuts), len(cuts)), workers + 1, dtype=np.int16)
    for count, row in sites.items():
        open_now = (needs <= available) & (available >= count)
        i, j, available, needs = i[open_now], j[open_now], available[open_now], needs[open_now]
        tried = np.flatnonzero(needs <= count)
        for site in row:
            # An all-reduce never overlaps with forwards, which quickly rules out most pairs. Its bytes alone, however
            # they are divided into buckets, bound it from below.
            weight_bytes, forward_s = trained[j[tried]] - trained[i[tried]], forward[j[tried]] - forward[i[tried]]
            sum_s = site.sum_link._replace(latency_s=0.0).all_reduce_s(weight_bytes, count, site.sum_costs)
            pairs = tried[sum_s + forward_s / site.speed <= count * period_s]
            a, b = i[pairs], j[pairs]
            passes_s = np.maximum(forward[b] - forward[a], 0.0), np.maximum(backward[b] - backward[a], 0.0)
            fits = space.period_s(passes_s, cuts[a], cuts[b], site) <= period_s
            least[a[fits], b[fits]] = count
            needs[pairs[fits]] = np.inf  # their fewest replicas are known, as counts increase
            tried = tried[needs[tried] <= count]
    return least


def thin_out(space: SearchSpace, count: int) -> tuple[int, ...]:
    """Returns the ends, and the place that the fewest bytes cross in each of `count` parts of about equal compute."""
    cuts = np.array(space.positions)
    sums = ExactSums(space.forward.whole + space.backward.whole, space.forward.scale)
    done_s = np.asarray(sums.between(0, cuts), dtype=float)
    shares = np.floor(done_s / max(done_s[-1], 1e-300) * count)
    order = 1 + np.lexsort((space.crossing[cuts][1:-1], shares[1:-1]))  # without the ends; stable
    starts = np.flatnonzero(np.diff(shares[order], prepend=-1.0))
    indices = {0, len(cuts) - 1, *order[starts].tolist()}
    return tuple(space.positions[i] for i in sorted(indices))
