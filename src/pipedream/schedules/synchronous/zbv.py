"""ZB-V: split backwards over a V of stages; no worker waits between its first op and its last, with 1F1B's
activations.

Qi et al., Pipeline Parallelism with Controllable Memory, NeurIPS 2024, section 3.3, and Zero Bubble Pipeline
Parallelism, ICLR 2024, section 6. Worker r has stages r and 2p - 1 - r, so the first worker also has the loss and
starts its backwards as early as the last worker. With f = i = w, n minibatches take 6 n m f + (p - 1) f; at most 2p are
in flight at a worker's two stages.

    rank 0 | 0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 3W1 0F3 0I0 0W0 3F2
    rank 1 | .   1F0 2F0 1F1 2F1 2I0 2W0 1F2 1I0 1W0 2F2 2I1 2W1
"""

from collections.abc import Iterator

from pipedream.schedules import kit

F, I, W = kit.SPLIT  # noqa: E741  # the field's letters


def zbv(plan: kit.Plan, microbatches: int | None = None) -> kit.Schedule:
    """Returns ZB-V, on a `wave` of 2p stages; by default m = 4 p, and with m < 2p workers wait."""
    kit.wave.check("zbv", plan, 2)
    p = plan.workers
    m = microbatches or 4 * p
    claims = kit.Claims(
        assumption="p workers with two equal stages each, messages cost nothing; m at least 2p, f = i = w",
        least=lambda p: 2 * p,
        bubble=lambda p, m: (p - 1) / (6 * m + p - 1),
        in_flight=lambda p, m, s: 2 * p,
        makespan_s=lambda p, m, n, f, i, w: 2 * n * m * (f + i + w) + (p - 1) * f,
    )
    order = kit.minibatch_by_minibatch(m, lambda rank, mine: _order_minibatch(rank, p, mine))
    return kit.flushing("zbv", plan, m, order, claims, kinds=kit.SPLIT)


def _order_minibatch(rank: int, p: int, mine: range) -> Iterator[kit.Op]:
    down, up = (rank, 0), (2 * p - 1 - rank, 0)
    progress = kit.MicrobatchProgress(mine)
    yield from progress.take((F, down), times=2 * (p - rank) - 1)
    yield from progress.take((F, up), (F, down), times=rank)
    yield from progress.take((F, up), (I, up), (W, up), times=p - rank)
    while progress.count_left(F, up):
        yield from progress.take((F, down), (I, down), (W, down), (F, up), (I, up), (W, up))
    yield from progress.take((I, down), (I, up), times=rank)
    yield from progress.take((I, down), (W, down), times=p - rank)
    yield from progress.take((W, up), times=len(mine))
    yield from progress.take((W, down), times=len(mine))


METHODS = (
    kit.Method(
        zbv,
        since=2024,
        stage_order=kit.wave,
        properties=kit.MethodProperties(splits_backward=True, replicates_stages=False),
        picture=kit.Picture("ZB-V: two stages (s) a worker, m = 8", 8, 8),
        choose="When two stages per worker and their additional messages are cheap: no bubble over many minibatches, "
        "with 1f1b's activations. Needs m >= 2p, and about equal times for forwards and both halves of backwards.",
    ),
)
