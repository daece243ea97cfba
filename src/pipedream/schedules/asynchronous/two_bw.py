"""PipeDream-2BW: 1F1B without a flush, one update per minibatch of m microbatches, two weight buffers.

Narayanan et al., ICML 2021, section 3.1: w(t+1) = w(t) - lr grad f(w(t-1)), at every stage.

    rank 0 | F0  F1  .   B0  F2  B1' F3  B2  F4  B3'
    rank 1 | .   F0  B0  F1  B1' F2  B2  F3  B3' F4
"""

from pipedream.schedules import kit


def pipedream_2bw(plan: kit.Plan, microbatches: int | None = None) -> kit.Schedule:
    """Returns PipeDream-2BW; by default as many microbatches as the input stage holds in flight.

    Raises:
        ScheduleError: floor(m / r_s) < W_s at some stage, so a forward would read a version not yet made. (The paper
            asks for m >= p; m = p - 1 works too and leaves the update no slack.) Or the in-flight counts need an update
            delay.
    """
    return double_buffered("pipedream_2bw", plan, microbatches)


def double_buffered(name: str, plan: kit.Plan, microbatches: int | None) -> kit.Schedule:
    """Returns `pipedream_2bw` under another name."""
    kit.refuse_update_delay(name, plan)
    m = microbatches or kit.max_in_flight(plan)
    for stage, (wait, replicas) in enumerate(zip(kit.warmup_forwards(plan), plan.replicas, strict=True)):
        if m // replicas < max(wait, 1):
            raise kit.ScheduleError(
                f"schedule {name!r} with {m} microbatches a minibatch: stage {stage} has {wait} warm-up "
                f"forwards and {replicas} replicas, so it needs at least {max(wait, 1) * replicas}; split the "
                "minibatch further or take a smaller depth"
            )
    claims = kit.Claims(
        in_flight=lambda p, m, s: min(p - s, m),
        staleness=lambda p, m, s: 1,
        versions=lambda p, m, s: 2,
    )
    return kit.unflushed(name, plan, kit.DoubleBuffer(m), claims, m=m)


METHODS = (
    kit.Method(
        pipedream_2bw,
        since=2021,
        aliases=("2bw",),
        properties=kit.MethodProperties(flushes=False, uses_depth=True),
        picture=kit.Picture("PipeDream-2BW: 1F1B, no flush, two versions (v) of the weights; m = 4", 4, 12),
        choose="When weights are large: no bubble in steady state with two sets of weights at any depth, and a "
        "staleness of one update everywhere. Needs m >= p - 1 microbatches per minibatch.",
    ),
)
