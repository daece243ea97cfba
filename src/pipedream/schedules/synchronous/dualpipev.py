"""DualPipeV: DualPipe's two directions in one V of stages, so that each forward can overlap with a backward.

DeepSeek-AI, DualPipe (2025), "cut in half": worker r has stages r and 2p - 1 - r, and no second copy of its weights.
In the middle of a minibatch a forward at one stage is followed by an independent backward at the other; at the end
deferred weight gradients W fill the bubbles. A minibatch takes 2m (f + i + w) + (p - 1)(f + i - w), w <= i <= f, with
2p + 1 in flight. (The authors count a pair as one block, which starts when both can: (p - 1)(f + 2i - w).)

    rank 0 | 0F0 0F1 0F2 3F0 3I0 3W0 3F1 0F3 3I1 3W1 3F2 0I0 0W0
    rank 1 | .   1F0 2F0 1F1 2F1 1F2 2I0 2W0 2F2 1I0 1W0 1F3 2I1
"""

from collections import deque
from collections.abc import Iterator

from pipedream.schedules import kit

F, I, W = kit.SPLIT  # noqa: E741  # the field's letters


def dualpipev(plan: kit.Plan, microbatches: int | None = None) -> kit.Schedule:
    """Returns DualPipeV, on a `wave` of 2p stages; m is at least 2p, by default 4 p."""
    kit.wave.check("dualpipev", plan, 2)
    p = plan.workers
    m = microbatches or 4 * p
    if m < 2 * p:
        raise kit.ScheduleError(
            f"schedule 'dualpipev' on {p} workers with {m} microbatches a minibatch: it fills both directions with {p} "
            f"each; split the minibatch into at least {2 * p}"
        )
    claims = kit.Claims(
        assumption="p workers with two equal stages each, messages cost nothing; m at least 2p, f = i = w (the "
        "makespan: w <= i <= f)",
        least=lambda p: 2 * p,
        bubble=lambda p, m: (p - 1) / (6 * m + p - 1),
        in_flight=lambda p, m, s: 2 * p + 1,
        makespan_s=lambda p, m, n, f, i, w: n * (2 * m * (f + i + w) + (p - 1) * (f + i - w)),
    )
    order = kit.minibatch_by_minibatch(m, lambda rank, mine: _order_minibatch(rank, p, mine))
    return kit.flushing("dualpipev", plan, m, order, claims, kinds=kit.SPLIT)


def _order_minibatch(rank: int, p: int, mine: range) -> Iterator[kit.Op]:
    """Yields the ops of a worker on one minibatch; numbers are the steps of the released code."""
    down, up = (rank, 0), (2 * p - 1 - rank, 0)
    progress = kit.MicrobatchProgress(mine)
    deferred: deque[tuple[int, int]] = deque()

    def backward(stage_replica: tuple[int, int], later: bool) -> Iterator[kit.Op]:
        yield from progress.take((I, stage_replica))
        deferred.append(stage_replica)
        if not later:
            yield from weight_gradient()

    def weight_gradient() -> Iterator[kit.Op]:
        yield from progress.take((W, deferred.popleft()))

    yield from progress.take((F, down), times=2 * (p - rank - 1))  # 1
    yield from progress.take((F, down), (F, up), times=rank + 1)  # 2
    yield from progress.take((I, up), (W, up), (F, up), times=p - rank - 1)  # 3
    for _ in range(len(mine) - 2 * p + rank + 1):  # 4: a forward and a backward in turn, in both directions
        yield from progress.take((F, down), (I, up), (W, up), (F, up), (I, down), (W, down))
    yield from progress.take((I, up), (W, up), (F, up), (I, down), (W, down), times=p - rank - 1)  # 5
    for i in range(2 * (rank + 1)):  # 6: from the middle on weight gradients are deferred
        yield from backward((up, down)[i % 2], later=i > rank)
    for _ in range(p - rank - 1):  # 7
        yield from weight_gradient()
        yield from backward(down, later=True)
    while deferred:  # 8
        yield from weight_gradient()


METHODS = (
    kit.Method(
        dualpipev,
        since=2025,
        stage_order=kit.wave,
        properties=kit.MethodProperties(splits_backward=True, replicates_stages=False),
        picture=kit.Picture("DualPipeV: two stages (s) a worker, m = 8", 8, 8),
        choose="When messages can overlap with the other direction's compute, as with experts on many devices: each "
        "forward has a backward next to it. Otherwise zbv has a smaller bubble and needs less memory.",
    ),
)
