"""PipeDream-2BW: 1F1B without a flush, one update a minibatch of m microbatches, two weight buffers.

Narayanan et al., ICML 2021, section 3.1: w(t+1) = w(t) - lr grad f(w(t-1)), at every stage.

    rank 0 | F0  F1  .   B0  F2  B1' F3  B2  F4  B3'
    rank 1 | .   F0  B0  F1  B1' F2  B2  F3  B3' F4
"""

from __future__ import annotations

from collections.abc import Iterator

from ..core.depth import legal
from ..core.errors import ScheduleError
from ..core.op import Op
from ..core.placement import Seat
from ..core.plan import Plan
from ..core.schedule import Claims, Schedule
from ..core.update import UpdateRule
from ..core.weights import DoubleBuffer
from .idioms import at_one_seat, endless, one_forward_one_backward, with_updates

__all__ = ["pipedream_2bw"]


def pipedream_2bw(plan: Plan, microbatches: int | None = None) -> Schedule:
    """Returns PipeDream-2BW; as many microbatches as the input stage holds in flight unless asked.

    Raises:
        ScheduleError: floor(m / r_s) < W_s at some stage: a forward would read a version not yet made. (The
            paper asks m >= p; m = p - 1 works too and leaves the update no slack.) Or a depth that is legal only
            with the plan's lag, which this method has no use for.
    """
    if legal(plan.in_flight, plan.replicas) != plan.in_flight:
        raise ScheduleError(
            f"schedule 'pipedream_2bw' at in-flight counts {plan.in_flight}: they need the lag {plan.lag} of the plan, "
            "but this method updates once a minibatch and does not lag; plan without a lag"
        )
    warmup = tuple(count - 1 for count in plan.in_flight)
    m = microbatches or max(count * r for count, r in zip(plan.in_flight, plan.replicas, strict=True))
    for stage, (wait, replicas) in enumerate(zip(warmup, plan.replicas, strict=True)):
        if m // replicas < max(wait, 1):
            raise ScheduleError(
                f"schedule 'pipedream_2bw' with {m} microbatches a minibatch: stage {stage} has {wait} warm-up "
                f"forwards and {replicas} replicas, so it needs at least {max(wait, 1) * replicas}; split the "
                "minibatch further or take a smaller depth"
            )

    def ops(seat: Seat) -> Iterator[Op]:
        replicas = plan.replicas[seat[0]]
        steady = one_forward_one_backward(seat, mine=endless(seat, replicas), warmup=warmup[seat[0]])
        return with_updates(steady, replicas=replicas, per_update=m)

    return Schedule(
        name="pipedream_2bw",
        plan=plan,
        placement=plan.placement,
        order=at_one_seat(plan.placement, ops),
        weights=DoubleBuffer(m),
        updates=UpdateRule((m,) * len(plan.stages)),
        microbatches=m,
        claims=Claims(
            in_flight=lambda p, m, s: min(p - s, m),
            staleness=lambda p, m, s: 1,
            versions=lambda p, m, s: 2,
        ),
    )
