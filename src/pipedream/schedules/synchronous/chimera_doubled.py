"""Chimera with forward doubling: two forwards take as long as one backward, which leaves no bubble in between.

Li and Hoefler, Chimera, SC 2021, section 3.5. A slot is two forwards or one backward, a backward if one can start. Only
p - 2 slots are idle, for any number of microbatches, at twice `chimera`'s activations. Backward halving is the same
order over microbatches of half the size.

    rank 0 | 0F0  0F2  1F1  1F3  1B1  1B3  0B0  0B2'
    rank 1 | 0F1  0F3  1F0  1F2  1B0  1B2  0B1  0B3'
"""

from collections.abc import Iterator
from itertools import count

from pipedream.schedules import kit
from pipedream.schedules.synchronous.chimera import both_directions


def chimera_doubled(plan: kit.Plan, microbatches: int | None = None) -> kit.Schedule:
    """Returns Chimera with forward doubling, on a `mirrored` plan; m is a multiple of 2p, by default 2p."""
    kit.mirrored.check("chimera_doubled", plan)
    p = plan.workers
    m = microbatches or 2 * p
    if m % (2 * p):
        raise kit.ScheduleError(
            f"schedule 'chimera_doubled' on {p} workers with {m} microbatches a minibatch: it takes them in units of "
            f"{2 * p}; split the minibatch into a multiple of that"
        )
    rows = _order_in_pairs(p, m)

    def order(rank: int) -> Iterator[kit.Op]:
        for number in count():
            for kind, stage, k, replica in rows[rank]:
                yield kit.Op(kind, stage, number * m + k, replica)

    claims = kit.Claims(
        assumption="p equal stages, two holders each, backward twice a forward, messages and sums free; m at least 4p",
        ratio=2.0,
        least=lambda p: 4 * p,
        bubble=lambda p, m: (p - 2) / (3 * m / 2 + p - 2),
        in_flight=lambda p, m, s: p + 2 + 2 * min(s, p - 1 - s) if m == 2 * p else 2 * p,
    )
    return both_directions("chimera_doubled", plan, m, order, claims)


def _order_in_pairs(p: int, m: int) -> list[list[kit.Op]]:
    """Returns the ops of each worker in a minibatch: in each slot a backward, if one can start, else two forwards.

    Of two that can start, the one at the later stage runs; at most 2p are in flight.
    """
    rows: list[list[kit.Op]] = [[] for _ in range(p)]
    started = dict.fromkeys(((kind, s, up) for kind in "FB" for s in range(p) for up in (0, 1)), 0)

    def choose_next(rank: int) -> tuple[str, int, int] | None:
        stage_replicas = sorted(((rank, 0), (p - 1 - rank, 1)), reverse=True)
        for s, up in stage_replicas:
            backwards = started["B", s, up]
            if backwards < done_before["F", s, up] and (s == p - 1 or backwards < done_before["B", s + 1, up]):
                return "B", s, up
        in_flight = sum(started["F", *stage_replica] - started["B", *stage_replica] for stage_replica in stage_replicas)
        for s, up in stage_replicas if in_flight <= 2 * p - 2 else ():
            forwards = started["F", s, up]
            if forwards < m // 2 and (s == 0 or forwards < done_before["F", s - 1, up]):
                return "F", s, up
        return None

    while any(started["B", s, up] < m // 2 for s in range(p) for up in (0, 1)):
        done_before = dict(started)  # done by the end of the previous slot
        for rank, row in enumerate(rows):
            step = choose_next(rank)
            if step is not None:
                kind, s, up = step
                first = started[step]
                started[step] += 1 if kind == "B" else 2
                make_op = kit.backward if kind == "B" else kit.forward
                row += [make_op((s, up), 2 * i + up) for i in range(first, started[step])]
    return rows


METHODS = (
    kit.Method(
        chimera_doubled,
        since=2021,
        aliases=("chimera_forward_doubling", "chimera_backward_halving"),
        stage_order=kit.mirrored,
        properties=kit.MethodProperties(replicates_stages=False),
        picture=kit.Picture("Chimera with forward doubling; s is the stage; m = 8", 8, 16),
        choose="Like chimera, with many microbatches, and backwards that take twice as long as forwards, as usual; "
        "keeps twice as many microbatches in flight.",
    ),
)
