"""ZB-V: split backwards over a V of stages; no worker waits between its first op and its last, with 1F1B's activations.

Qi et al., Pipeline Parallelism with Controllable Memory, NeurIPS 2024, section 3.3, and Zero Bubble Pipeline
Parallelism, ICLR 2024, section 6. Worker r has stages r and 2p - 1 - r, so that the first worker has the loss too and
begins its backwards as early as the last one. It warms up with 2(p - r) - 1 forwards of its first stage, fills with
forwards of both, then takes a forward, an input gradient I and a weight gradient W of each stage in turn. With
f = i = w a run of n minibatches takes 6 n m f + (p - 1) f, and no worker has more than 2p in flight at its two stages:
what 1F1B's first worker has at its one, which is as large as two of these. The digits are stage and microbatch.

    rank 0 | 0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 3W1 0F3 0I0 0W0 3F2
    rank 1 | .   1F0 2F0 1F1 2F1 2I0 2W0 1F2 1I0 1W0 2F2 2I1 2W1
"""

from __future__ import annotations

from collections.abc import Iterator

from pipedream.core.plan.plan import Plan
from pipedream.core.schedule.op import Op
from pipedream.core.schedule.properties import MethodProperties
from pipedream.core.schedule.schedule import Claims, Schedule
from pipedream.schedules.idioms import SPLIT, F, I, Turns, W, flushing, minibatch_by_minibatch
from pipedream.schedules.layouts import wave
from pipedream.schedules.method import Method, Picture

__all__ = ["METHODS", "zbv"]


def zbv(plan: Plan, microbatches: int | None = None) -> Schedule:
    """Returns ZB-V with a flush; 4 microbatches a worker unless asked.

    Args:
        plan: of 2p stages on p workers, laid out as a `wave`.
        microbatches: m; below 2p workers wait.

    Raises:
        ScheduleError: the plan is laid out otherwise.
    """
    wave.check("zbv", plan, 2)
    p = plan.workers
    m = microbatches or 4 * p

    return flushing(
        "zbv",
        plan,
        m,
        minibatch_by_minibatch(m, lambda rank, mine: _minibatch(rank, p, mine)),
        Claims(
            assumption="p workers with two equal stages each, messages cost nothing; m at least 2p, f = i = w",
            least=lambda p: 2 * p,
            bubble=lambda p, m: (p - 1) / (6 * m + p - 1),
            in_flight=lambda p, m, s: 2 * p,
            staleness=lambda p, m, s: 0,
            versions=lambda p, m, s: 2,
            makespan_s=lambda p, m, n, f, i, w: 2 * n * m * (f + i + w) + (p - 1) * f,
        ),
        kinds=SPLIT,
    )


def _minibatch(rank: int, p: int, mine: range) -> Iterator[Op]:
    """Yields what a worker does with the microbatches of one minibatch; steps that have none left are left out."""
    there, back = (rank, 0), (2 * p - 1 - rank, 0)
    turns = Turns(mine)
    yield from turns.take((F, there), times=2 * (p - rank) - 1)
    yield from turns.take((F, back), (F, there), times=rank)
    yield from turns.take((F, back), (I, back), (W, back), times=p - rank)
    while turns.left(F, back):
        yield from turns.take((F, there), (I, there), (W, there), (F, back), (I, back), (W, back))
    yield from turns.take((I, there), (I, back), times=rank)
    yield from turns.take((I, there), (W, there), times=p - rank)
    yield from turns.take((W, back), times=len(mine))
    yield from turns.take((W, there), times=len(mine))


METHODS = (
    Method(
        zbv,
        since=2024,
        layout=wave,
        properties=MethodProperties(splits_backward=True, replicates_stages=False),
        picture=Picture("ZB-V: two stages (s) a worker, m = 8", 8, 8),
        choose="When two stages a worker and the messages that go with them are cheap: no bubble in a run of many "
        "minibatches, with the activations of 1f1b. Needs m >= 2p, and forwards and both halves of backwards "
        "about equal.",
    ),
)
