"""PipeDream-2BW: 1F1B without a flush, one update a minibatch of m microbatches, two weight buffers.

Narayanan et al., ICML 2021, section 3.1: w(t+1) = w(t) - lr grad f(w(t-1)), at every stage.

    rank 0 | F0  F1  .   B0  F2  B1' F3  B2  F4  B3'
    rank 1 | .   F0  B0  F1  B1' F2  B2  F3  B3' F4
"""

from __future__ import annotations

from pipedream.core.errors import ScheduleError
from pipedream.core.plan.plan import Plan
from pipedream.core.schedule.properties import MethodProperties
from pipedream.core.schedule.schedule import Claims, Schedule
from pipedream.core.schedule.update import UpdateRule
from pipedream.core.schedule.weights import DoubleBuffer
from pipedream.schedules.idioms import admitted, refuse_update_delay, unflushed
from pipedream.schedules.method import Method, Picture

__all__ = ["METHODS", "double_buffered", "pipedream_2bw"]


def pipedream_2bw(plan: Plan, microbatches: int | None = None) -> Schedule:
    """Returns PipeDream-2BW; as many microbatches as the input stage holds in flight unless asked.

    Raises:
        ScheduleError: floor(m / r_s) < W_s at some stage: a forward would read a version not yet made. (The
            paper asks m >= p; m = p - 1 works too and leaves the update no slack.) Or a depth that is legal only
            with the plan's update delay, which this method has no use for.
    """
    return double_buffered("pipedream_2bw", plan, microbatches)


def double_buffered(name: str, plan: Plan, microbatches: int | None) -> Schedule:
    """Returns PipeDream-2BW, or a method of that order and those weights, by its name.

    Raises:
        ScheduleError: see `pipedream_2bw`.
    """
    refuse_update_delay(name, plan)
    warmup = tuple(count - 1 for count in plan.in_flight)
    m = microbatches or admitted(plan)
    for stage, (wait, replicas) in enumerate(zip(warmup, plan.replicas, strict=True)):
        if m // replicas < max(wait, 1):
            raise ScheduleError(
                f"schedule {name!r} with {m} microbatches a minibatch: stage {stage} has {wait} warm-up "
                f"forwards and {replicas} replicas, so it needs at least {max(wait, 1) * replicas}; split the "
                "minibatch further or take a smaller depth"
            )

    return Schedule(
        name=name,
        plan=plan,
        placement=plan.placement,
        order=unflushed(plan, m),
        weights=DoubleBuffer(m),
        updates=UpdateRule((m,) * len(plan.stages)),
        microbatches=m,
        claims=Claims(
            in_flight=lambda p, m, s: min(p - s, m),
            staleness=lambda p, m, s: 1,
            versions=lambda p, m, s: 2,
        ),
    )


METHODS = (
    Method(
        pipedream_2bw,
        since=2021,
        aliases=("2bw",),
        properties=MethodProperties(flushes=False, uses_depth=True),
        picture=Picture("PipeDream-2BW: 1F1B, no flush, two versions (v) of the weights; m = 4", 4, 12),
        choose="When the weights are large: no bubble in steady state with two sets of weights at any depth, and a "
        "staleness of one update everywhere. Needs m >= p - 1 microbatches in a minibatch.",
    ),
)
