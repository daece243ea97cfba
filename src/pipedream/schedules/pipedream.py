"""PipeDream: one forward, one backward, no flush; each minibatch keeps the weights that its forward read.

Narayanan et al., SOSP 2019, sections 3.2 (1F1B-RR) and 3.3 (weight stashing, vertical sync). The number
behind the letter is the minibatch; every backward is followed by the stage's own update (').

    rank 0 | F0  F1  .   B0' F2  B1' F3  B2' F4  B3'
    rank 1 | .   F0  B0' F1  B1' F2  B2' F3  B3' F4

A one-stage plan is plain data parallelism: each round of its replicas is one all-reduce and one update.
"""

from __future__ import annotations

from collections.abc import Iterator

from ..core.errors import ScheduleError
from ..core.op import Op
from ..core.placement import Seat
from ..core.plan import Plan
from ..core.schedule import Claims, Order, Schedule
from ..core.update import UpdateRule
from ..core.weights import Stash, VerticalSync
from .idioms import at_one_seat, endless, one_forward_one_backward, with_updates

__all__ = ["pipedream", "pipedream_vertical_sync"]


def pipedream(plan: Plan, microbatches: int | None = None) -> Schedule:
    """Returns PipeDream with weight stashing: stage s is W_s updates late, and keeps W_s + 1 versions.

    Raises:
        ScheduleError: a minibatch is to be split; here the minibatch itself travels.
    """
    _refuse_split("pipedream", microbatches)
    return Schedule(
        name="pipedream",
        plan=plan,
        placement=plan.placement,
        order=_order(plan),
        weights=Stash(_warmup(plan), plan.replicas, plan.lag),
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
    _refuse_split("pipedream_vertical_sync", microbatches)
    return Schedule(
        name="pipedream_vertical_sync",
        plan=plan,
        placement=plan.placement,
        order=_order(plan),
        weights=VerticalSync(_warmup(plan), plan.replicas, plan.lag),
        updates=UpdateRule(plan.replicas, mean_of_rounds=True),
        claims=Claims(
            in_flight=lambda p, m, s: min(p - s, m),
            staleness=lambda p, m, s: p - 1,
            versions=lambda p, m, s: p,
        ),
    )


def _order(plan: Plan) -> Order:
    def ops(seat: Seat) -> Iterator[Op]:
        stage = seat[0]
        replicas = plan.replicas[stage]
        steady = one_forward_one_backward(seat, mine=endless(seat, replicas), warmup=_warmup(plan)[stage])
        return with_updates(steady, replicas=replicas, per_update=replicas, lag=plan.lag[stage])

    return at_one_seat(plan.placement, ops)


def _warmup(plan: Plan) -> tuple[int, ...]:
    return tuple(count - 1 for count in plan.in_flight)


def _refuse_split(name: str, microbatches: int | None) -> None:
    if microbatches not in (None, 1):
        raise ScheduleError(
            f"schedule {name!r} updates after every minibatch and does not split it, but {microbatches} microbatches "
            "were asked for; leave the number out, or take pipedream_2bw, 1f1b or gpipe"
        )
