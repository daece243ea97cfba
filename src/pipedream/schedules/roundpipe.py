"""RoundPipe: stages are bound to no worker, but dispatched in round robin; their weights travel from a home.

Efficient Training on Multiple Consumer GPUs with RoundPipe (arXiv 2604.27085). A minibatch is a row of *slots*, the
forward of stage 0, 1, ..., then the backwards down to stage 0; the last stage's forward and backward are one slot. Slot
j goes to the worker behind that of slot j - 1, which does all m microbatches at it, and then slot j + p. A backward does
its forward again, from what that has read. So the stages need not be as many as the workers, nor a multiple of them; p
workers do n equal slots in floor((n - 1) / p) m + (n - 1) mod p + m of them (m >= p), of which at most p - 1 are idle at
either end of a minibatch. The digits are stage and microbatch; ``'`` is an update.

    rank 0 | .    .    .    4F0  4B0  4F1  4B1' 1B0  1B1'
    rank 1 | ...

What is said here beside the paper: the workers keep the weights themselves, where the paper has the memory of the host.
The home of a stage is the worker of its backwards, so that its gradients stay there, and its weights travel once a
minibatch, to the worker of its forwards, and not at all where that is the same one. The forwards may be cut more
coarsely than the backwards (section 4: a backward with its recomputation takes about three times as long): one slot
then has those of several stages. The update is synchronous: a minibatch begins when the one before has ended, which is
why the round robin begins anew with each.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ..core.errors import ScheduleError
from ..core.op import Kind, Op
from ..core.placement import Dispatched
from ..core.plan import Plan
from ..core.schedule import Claims, Schedule
from .idioms import backward, flushing, forward, minibatch_by_minibatch
from .layouts import dispatched, homes

__all__ = ["roundpipe"]


def roundpipe(plan: Plan, microbatches: int | None = None, *, forwards: int = 1) -> Schedule:
    """Returns RoundPipe, synchronous; a microbatch a worker unless asked.

    Args:
        plan: of at least as many stages as workers, laid out `dispatched`. Those whose forwards run away from home
            recompute.
        microbatches: m, of a minibatch.
        forwards: stages whose forwards are one slot.

    Raises:
        ScheduleError: the plan is laid out otherwise.
    """
    p, last = plan.workers, len(plan.stages) - 1
    taken = plan.order or tuple(range(sum(plan.replicas)))
    if set(plan.replicas) != {1} or taken != homes(p, last + 1):
        raise ScheduleError(
            f"schedule 'roundpipe' needs {dispatched.words}, without replicas; found plan {plan.config} on workers "
            f"{taken}; plan for this method, or name the workers {homes(p, last + 1)} in the plan's order"
        )
    if forwards < 1:
        raise ScheduleError(f"schedule 'roundpipe': a slot has the forwards of at least 1 stage, found {forwards}")
    m = microbatches or p
    groups = [range(first, min(first + forwards, last)) for first in range(0, last, forwards)]
    # Slots are counted from the one that has the last stage, which is on the first worker.
    dispatch = {stage: (slot - len(groups)) % p for slot, group in enumerate(groups) for stage in group}
    placement = Dispatched(plan.placement.ranks, (*dispatch.values(), 0))

    def ops(rank: int, mine: range) -> Iterator[Op]:
        for group in groups:
            if dispatch[group[0]] != rank:
                continue
            for k in mine:
                for stage in group:
                    if k == mine[0] and placement.is_fetched(stage):
                        yield Op(Kind.FETCH, stage, k)
                    yield forward((stage, 0), k)
        for stage in range(last, -1, -1):
            if placement.rank_of(stage, 0) != rank:
                continue
            for k in mine:
                if stage == last:
                    yield forward((stage, 0), k)
                yield backward((stage, 0), k)

    stages = tuple(replace(stage, recompute=stage.recompute or s < last) for s, stage in enumerate(plan.stages))
    flushed = flushing(
        "roundpipe",
        replace(plan, stages=stages),
        m,
        minibatch_by_minibatch(m, ops),
        Claims(staleness=lambda p, m, s: 0),
    )
    return replace(flushed, placement=placement)
