"""PipeDream: one forward, one backward, no flush; each minibatch keeps the weights that its forward read.

Narayanan et al., SOSP 2019, sections 3.2 (1F1B-RR) and 3.3 (weight stashing, vertical sync). The number
behind the letter is the minibatch; every backward is followed by the stage's own update (').

    rank 0 | F0  F1  .   B0' F2  B1' F3  B2' F4  B3'
    rank 1 | .   F0  B0' F1  B1' F2  B2' F3  B3' F4

A one-stage plan is plain data parallelism: each round of its replicas is one all-reduce and one update.
"""

from __future__ import annotations

from pipedream.core.plan.plan import Plan
from pipedream.core.schedule.properties import MethodProperties
from pipedream.core.schedule.schedule import Claims, Schedule
from pipedream.core.schedule.update import UpdateRule
from pipedream.core.schedule.weights import Stash, VerticalSync
from pipedream.schedules.idioms import refuse_split, unflushed
from pipedream.schedules.method import Method, Picture

__all__ = ["METHODS", "pipedream", "pipedream_vertical_sync", "stashing"]


def pipedream(plan: Plan, microbatches: int | None = None) -> Schedule:
    """Returns PipeDream with weight stashing: stage s is W_s updates late, and keeps W_s + 1 versions.

    Raises:
        ScheduleError: a minibatch is to be split; here the minibatch itself travels.
    """
    return stashing("pipedream", plan, microbatches)


def stashing(name: str, plan: Plan, microbatches: int | None) -> Schedule:
    """Returns PipeDream with weight stashing, or a method of that order and those weights, by its name.

    Raises:
        ScheduleError: a minibatch is to be split.
    """
    refuse_split(name, microbatches)
    return Schedule(
        name=name,
        plan=plan,
        placement=plan.placement,
        order=unflushed(plan),
        weights=Stash(_warmup(plan), plan.replicas, plan.update_delay),
        updates=UpdateRule(plan.replicas, mean_of_rounds=True),
        claims=Claims(
            in_flight=lambda p, m, s: min(p - s, m),
            staleness=lambda p, m, s: p - 1 - s,
            versions=lambda p, m, s: p - s,
        ),
    )


def pipedream_vertical_sync(plan: Plan, microbatches: int | None = None) -> Schedule:
    """Returns PipeDream with vertical sync: all stages are W_0 updates late, and keep W_0 + 1 versions.

    Raises:
        ScheduleError: a minibatch is to be split; here the minibatch itself travels.
    """
    refuse_split("pipedream_vertical_sync", microbatches)
    return Schedule(
        name="pipedream_vertical_sync",
        plan=plan,
        placement=plan.placement,
        order=unflushed(plan),
        weights=VerticalSync(_warmup(plan), plan.replicas, plan.update_delay),
        updates=UpdateRule(plan.replicas, mean_of_rounds=True),
        claims=Claims(
            in_flight=lambda p, m, s: min(p - s, m),
            staleness=lambda p, m, s: p - 1,
            versions=lambda p, m, s: p,
        ),
    )


def _warmup(plan: Plan) -> tuple[int, ...]:
    return tuple(count - 1 for count in plan.in_flight)


METHODS = (
    Method(
        pipedream,
        since=2019,
        properties=MethodProperties(flushes=False, splits_minibatch=False, uses_depth=True, delays_updates=True),
        picture=Picture("PipeDream: 1F1B, no flush; v is the version of the weights that an op reads", None, 12),
        choose="When the minibatch cannot be split or the bubble of a flush is too dear: no worker waits in steady "
        "state, at the price of stale gradients and of a set of weights for each minibatch in flight. The "
        "plan may replicate stages.",
    ),
    Method(
        pipedream_vertical_sync,
        since=2019,
        aliases=("vertical_sync",),
        properties=MethodProperties(
            flushes=False, splits_minibatch=False, uses_depth=True, delays_updates=True, versions_grow_with_stages=True
        ),
        picture=Picture("PipeDream with vertical sync: one version (v) for a minibatch at all stages", None, 12),
        choose="When all stages must see one version of the whole model for a minibatch, so that the update rule is "
        "exactly delayed SGD. Costs more staleness and more weight sets than pipedream.",
    ),
)
