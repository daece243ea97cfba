"""V-Half: split backwards over a V of stages, with half of 1F1B's activations.

Qi et al., Pipeline Parallelism with Controllable Memory, NeurIPS 2024, sections 3.2 and 4. Worker r has stages r and 2p
- 1 - r. On its way back a microbatch waits one slot at each worker, which loses fewer slots than `v_min`; a new one
follows every six slots. With f = i = w and m > p a minibatch takes (7 p / 2 - 4) f longer than its work 6 m f if p is
even, (7 p - 9) f / 2 if it is odd and more than 1.

    rank 0 | 0F0 0F1 .   3F0 3I0 3W0 0F2 .   3F1 3I1 3W1 0I0 0W0
    rank 1 | .   1F0 2F0 1F1 .   2I0 2W0 2F1 1F2 1I0 2I1 2W1 2F2
"""

from pipedream.schedules import kit


def v_half(plan: kit.Plan, microbatches: int | None = None) -> kit.Schedule:
    """Returns V-Half, on a `wave` of 2p stages; by default m = 4 p."""
    kit.wave.check("v_half", plan, 2)
    p = plan.workers
    m = microbatches or 4 * p
    claims = kit.Claims(
        assumption="p workers with two equal stages each, messages cost nothing; m > p, f = i = w",
        least=lambda p: 2 * (p // 2) + 1,
        bubble=lambda p, m: _count_idle_slots(p) / (6 * m + _count_idle_slots(p)),
        in_flight=lambda p, m, s: 2 * (p // 2) + 2,
        makespan_s=lambda p, m, n, f, i, w: n * (2 * m * (f + i + w) + _count_idle_slots(p) * f),
    )
    order = kit.repeated_wave(plan, m, hops=(1, 2, 1, 2), waits=(1, 0, 0) if p % 2 else (3, 0, 4))
    return kit.flushing("v_half", plan, m, order, claims, kinds=kit.SPLIT)


def _count_idle_slots(p: int) -> int:
    """Returns the slots in which each worker waits in a minibatch."""
    return max(0, 7 * (p // 2) - (1 if p % 2 else 4))


METHODS = (
    kit.Method(
        v_half,
        since=2024,
        stage_order=kit.wave,
        properties=kit.MethodProperties(splits_backward=True, replicates_stages=False),
        picture=kit.Picture("V-Half: two stages (s) a worker, m = 8", 8, 8),
        choose="When 1f1b's activations do not fit: half of them, with a little more than half of its bubble. Needs "
        "two stages per worker, with their additional messages.",
    ),
)
