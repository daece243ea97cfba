"""V-Min: split backwards over a V of stages, with about a third of 1F1B's activations.

Qi et al., Pipeline Parallelism with Controllable Memory, NeurIPS 2024, sections 3.2 and 4. Worker r has stages r and 2p
- 1 - r. A microbatch traverses the workers and back without a pause, first its forwards, then its input gradients, and
a new one follows every six slots. If p is a multiple of 3 it waits twice for two slots, since two ops would need the
same one. With f = i = w a minibatch takes (4p - 5) f longer than its work 6 m f, then (4p - 4) f.

    rank 0 | 0F0 .   .   3F0 3I0 3W0 0F1 0I0 0W0 3F1 3I1 3W1 0F2
    rank 1 | .   1F0 2F0 .   .   2I0 1I0 1F1 2F1 2W0 1W0 2I1 1I1
"""

from pipedream.schedules import kit


def v_min(plan: kit.Plan, microbatches: int | None = None) -> kit.Schedule:
    """Returns V-Min, on a `wave` of 2p stages; by default m = 4 p."""
    kit.wave.check("v_min", plan, 2)
    p = plan.workers
    m = microbatches or 4 * p
    claims = kit.Claims(
        assumption="p workers with two equal stages each, messages cost nothing; m > p, f = i = w",
        least=lambda p: 2 * (p // 3) + 1 + (p % 3 == 2),
        bubble=lambda p, m: _count_idle_slots(p) / (6 * m + _count_idle_slots(p)),
        in_flight=lambda p, m, s: 2 * (p // 3) + 2 + 2 * (p % 3 == 2 and s % 3 > 0),
        makespan_s=lambda p, m, n, f, i, w: n * (2 * m * (f + i + w) + _count_idle_slots(p) * f),
    )
    order = kit.repeated_wave(plan, m, hops=(1, 1, 1, 1), waits=(0, 0, 0) if p % 3 else (2, 0, 2))
    return kit.flushing("v_min", plan, m, order, claims, kinds=kit.SPLIT)


def _count_idle_slots(p: int) -> int:
    """Returns the slots in which each worker waits in a minibatch."""
    return max(0, 4 * p - (5 if p % 3 else 4))


METHODS = (
    kit.Method(
        v_min,
        since=2024,
        stage_order=kit.wave,
        properties=kit.MethodProperties(splits_backward=True, replicates_stages=False),
        picture=kit.Picture("V-Min: two stages (s) a worker, m = 8", 8, 8),
        choose="When activations do not fit otherwise: about a third of 1f1b's, with two thirds of its bubble. Needs "
        "two stages per worker, with their additional messages.",
    ),
)
