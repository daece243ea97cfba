"""Chimera: two pipelines in opposite directions, each with half of the microbatches, fill each other's bubbles.

Li and Hoefler, Chimera, SC 2021, section 3. Worker w has stage w of the down pipeline and stage p - 1 - w of the up
pipeline; the two holders of a stage all-reduce their gradients. The first forwards of each p microbatches fill the last
bubbles of the previous p (section 3.5, direct concatenation): p - 2 idle slots in total, against 1F1B's 2(p - 1). Even
microbatches go down. The two holders are replicas: BatchNorm's running statistics are those of a direction's
microbatches, averaged at drains, so evaluations differ from 1F1B's; so do draws from a generator that a module holds.

    rank 0 | 0F0  1F1  1B1  0B0'
    rank 1 | 0F1  1F0  1B0  0B1'
"""

from collections.abc import Iterator
from itertools import count

from pipedream.schedules import kit


def chimera(plan: kit.Plan, microbatches: int | None = None) -> kit.Schedule:
    """Returns Chimera, on a `mirrored` plan; m is a multiple of p, by default p."""
    kit.mirrored.check("chimera", plan)
    p = plan.workers
    m = microbatches or p
    if m % p:
        raise kit.ScheduleError(
            f"schedule 'chimera' on {p} workers with {m} microbatches a minibatch: it takes them in units of {p}; "
            "split the minibatch into a multiple of that"
        )

    def order_unit(rank: int, first: int) -> list[tuple[int, kit.Op]]:
        """Returns the ops of p microbatches with their start slots, where a forward is as long as a backward."""
        slots = []
        for up, stage in enumerate((rank, p - 1 - rank)):
            stage_replica = (stage, up)
            for i in range(p // 2):
                k = first + 2 * i + up
                slots += [
                    (2 * i + stage, kit.forward(stage_replica, k)),
                    (2 * p - 1 - stage + 2 * i, kit.backward(stage_replica, k)),
                ]
        return slots

    def order(rank: int) -> Iterator[kit.Op]:
        for number in count():
            slots = [(2 * p * u + slot, op) for u in range(m // p) for slot, op in order_unit(rank, number * m + u * p)]
            yield from (op for _, op in sorted(slots))

    claims = kit.Claims(
        assumption="p equal stages, two holders each, backward as long as forward, messages and sums cost nothing",
        ratio=1.0,
        bubble=lambda p, m: (p - 2) / (2 * m + p - 2),
        in_flight=lambda p, m, s: p // 2 + min(s, p - 1 - s) + 1,
    )
    return both_directions("chimera", plan, m, order, claims)


def both_directions(name: str, plan: kit.Plan, m: int, order: kit.Order, claims: kit.Claims) -> kit.Schedule:
    """Returns the schedule of two pipelines on a `mirrored` plan; adds the updates of both holders of each stage."""

    def with_updates(rank: int) -> Iterator[kit.Op]:
        p = plan.workers
        remaining = 2 * m  # passes of a minibatch at the rank's two stages
        number = 0
        for op in order(rank):
            yield op
            remaining -= 1
            if not remaining:
                number, remaining = number + 1, 2 * m
                # After all backwards, so that one stage's sum can overlap with the other stage; both holders use
                # the same order.
                for stage in sorted((rank, p - 1 - rank), reverse=True):
                    yield kit.update((stage, int(stage != rank)), number)

    return kit.flushing(name, plan, m, with_updates, claims)


METHODS = (
    kit.Method(
        chimera,
        since=2021,
        stage_order=kit.mirrored,
        properties=kit.MethodProperties(replicates_stages=False),
        picture=kit.Picture("Chimera: one pipeline down, one up; s is the stage; m = 4", 4, 8),
        choose="When a minibatch has few microbatches, about as many as workers, and weights are small compared with "
        "activations: about half of 1f1b's bubble, for two sets of weights per worker and an all-reduce over two "
        "holders at each update. The number of workers must be even.",
    ),
)
