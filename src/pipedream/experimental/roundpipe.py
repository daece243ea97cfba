"""RoundPipe: workers take the stages' passes in round robin; weights stay in host memory.

Efficient Training on Multiple Consumer GPUs with RoundPipe (arXiv 2604.27085). A minibatch is a row of *slots*: the
forwards of stage 0, 1, ..., then the backwards down to stage 0; the last stage's two passes are one slot. Each slot
goes to the next worker, which runs all its m microbatches. A backward recomputes its forward. The number of stages need
not be a multiple of p. With n equal slots, p divides n and m >= p, the bubble is p (p - 1)/(n m + p (p - 1)).

    rank 0 | .    1F0  1F1  3F0  3B0  3F1  3B1' 1B0  1B1'
    rank 1 | 0F0  0F1  2F0  2F1  .    2B0  .    2B1' 0B0  0B1'

Weights are in memory that all workers, on one machine, share; a worker copies those of its slot when the slot begins. A
slot may hold the forwards of several stages, since
backwards take about three times as long.

A minibatch starts when the one before has ended. In the paper's asynchronous form (`delay=1`) it does not wait: its
passes read weights that lack one update, w(t+1) = w(t) - lr grad f(w(t-1)), while the host makes it. If p divides the
number of slots, workers then wait at the two ends of a run alone.

Difference from the paper: each minibatch begins with the same worker, so a stage's backwards and its updates are always
made by one worker, its home, and some wait for one slot in each minibatch if p does not divide the number of slots.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from itertools import accumulate

from pipedream.schedules import kit


def homes(workers: int, stages: int) -> tuple[int, ...]:
    """Returns the workers of the stages, with backwards in round robin."""
    return tuple((stages - 1 - s) % workers for s in range(stages))


dispatched = kit.StageOrder(
    "the stages in round robin from the last one on, which is on the first worker",
    lambda workers, chunks: homes(workers, workers * chunks),
)


def roundpipe(plan: kit.Plan, microbatches: int | None = None, *, forwards: int = 1, delay: int = 0) -> kit.Schedule:
    """Returns RoundPipe; by default 4 microbatches per worker.

    Args:
        plan: at least as many stages as workers, on their `homes`. All but the last one are made to recompute.
        microbatches: from m = p on workers do not wait between their slots.
        forwards: number of stages whose forwards are one slot; 0 chooses the slots by the plan's seconds, as the paper.
        delay: staleness of the gradients, 0 or 1.
    """
    p, last = plan.workers, len(plan.stages) - 1
    order = plan.worker_order or tuple(range(sum(plan.replicas)))
    if set(plan.replicas) != {1} or order != homes(p, last + 1):
        raise kit.ScheduleError(
            f"schedule 'roundpipe' needs {dispatched.words}, without replicas; found plan {plan.config} on workers "
            f"{order}; plan for this method, or name the workers {homes(p, last + 1)} in the plan's order"
        )
    if apart := [worker for worker in order if plan.cluster.reach(order[0], worker)]:
        raise kit.ScheduleError(
            f"schedule 'roundpipe' keeps weights in the memory of one machine, but workers {order[0]} and {apart[0]} "
            "of the cluster are on different ones; plan for one machine, or choose another method"
        )
    if plan.activations or plan.ranks > plan.workers:
        option = f"activations={plan.activations!r}" if plan.activations else f"the meshes of plan {plan.config}"
        raise kit.ScheduleError(
            f"schedule 'roundpipe' was asked for with {option}, but its workers compute with weights of others, which "
            "a mesh would divide, and keep only inputs; leave that out, or choose another method"
        )
    if forwards < 0 or delay not in (0, 1):
        raise kit.ScheduleError(
            "schedule 'roundpipe': a slot has the forwards of at least 1 stage, or with 0 as many as the plan's seconds"
            f" say, and the delay is 0 or 1; found forwards={forwards} and delay={delay}"
        )
    m = microbatches or 4 * p
    slots = [range(first, min(first + forwards, last)) for first in range(0, last, forwards or 1)]
    if not forwards and last:
        slots = _choose_slots(plan)
    # Counted back from the last stage's slot on worker 0; the backwards after it are on workers 1, 2, ...
    worker = {stage: (number - len(slots)) % p for number, slot in enumerate(slots) for stage in slot}
    placement = replace(plan.placement, forwards=(*worker.values(), 0))

    def ops(rank: int, mine: range) -> Iterator[kit.Op]:
        for slot in (slot for slot in slots if worker[slot[0]] == rank):
            for k in mine:
                for stage in slot:
                    yield kit.forward((stage, 0), k)
        for stage in range(last - rank, -1, -p):
            for k in mine:
                if stage == last:
                    yield kit.forward((stage, 0), k)
                yield kit.backward((stage, 0), k)

    again = tuple(replace(stage, recompute=stage.recompute or s < last) for s, stage in enumerate(plan.stages))
    claims = _make_claims(last) if forwards == 1 and not delay else kit.Claims()
    schedule = kit.flushing("roundpipe", replace(plan, stages=again), m, kit.minibatch_by_minibatch(m, ops), claims)
    if delay:
        schedule = replace(schedule, weights=kit.DoubleBuffer(m), flushes=False, claims=claims)
    return replace(schedule, placement=placement)


def _choose_slots(plan: kit.Plan) -> list[range]:
    """Returns the stages of each slot of forwards for which max(slots, p) times the longest slot is shortest.

    The number of slots counts as the next multiple of p, since each minibatch begins with the same worker.
    """
    p, stages = plan.workers, plan.stages
    before = list(accumulate((stage.forward_s for stage in stages[:-1]), initial=0.0))
    # A backward repeats its forward, and the last stage's follows it.
    longest_s = max(stage.backward_s + stage.forward_s for stage in stages)

    @cache
    def split(end: int, count: int) -> tuple[float, tuple[int, ...]]:
        """Returns the shortest longest of `count` slots of the stages before `end`, and their ends."""
        if count == 1:
            return before[end], (end,)
        options = (
            (max(split(cut, count - 1)[0], before[end] - before[cut]), (*split(cut, count - 1)[1], end))
            for cut in range(count - 1, end)
        )
        return min(options)

    def period_s(count: int) -> float:
        slots = -(-(count + len(stages)) // p) * p
        return slots * max(longest_s, split(len(stages) - 1, count)[0])

    counts = range(len(stages) - 1, 0, -1)  # of equal periods the one with the shorter slots
    _, ends = split(len(stages) - 1, min(counts, key=period_s))
    return [range(begin, end) for begin, end in zip((0, *ends), ends, strict=False)]


def _make_claims(last: int) -> kit.Claims:
    """Returns the closed forms for S = last + 1 equal stages, each forward a slot.

    A forward takes f, a backward f + b with the forward that it repeats. Slot j + 1 starts as soon as it has its first
    microbatch from slot j and its worker has finished slot j + 1 - p. With m >= p it waits for the worker, once in p
    slots; of the p - r slots after the last stage's, r = (S - 1) mod p, only if forwards are long.
    """

    def makespan_s(p: int, m: int, n: int, f: float, i: float, w: float) -> float:
        b, (rounds, rest) = i + w, divmod(last, p)
        if m < p:
            return n * (last * (2 * f + b) + m * (f + b))
        waits = max(0.0, (m - p) * f - (p - rest) * b) if 2 * rest >= p else 0.0
        return n * ((rounds * m + rest) * (2 * f + b) + m * (f + b) + waits)

    def away(p: int, s: int) -> int:
        return len(range((-s) % p or p, last + 1, p))

    return kit.Claims(
        assumption="S >= p equal stages, b = 2 f and the forward done again, messages cost nothing",
        ratio=2.0,
        bubble=lambda p, m: 1 - m * (4 * last + 3) / (p * makespan_s(p, m, 1, 1.0, 1.0, 1.0)),
        in_flight=lambda p, m, s: m * away(p, s) + (s == 0 or 2 * s % p > 0),
        versions=lambda p, m, s: len(range(s, last + 1, p)) + (2 * s % p > 0 and away(p, s) > 0),
        makespan_s=makespan_s,
    )


METHODS = (
    kit.Method(
        roundpipe,
        since=2026,
        layout=dispatched,
        properties=kit.MethodProperties(replicates_stages=False, recomputes=True),
        picture=kit.Picture("RoundPipe: forwards and backwards dispatched in round robin; s is the stage; m = 4", 4, 8),
        choose="When the stages do not divide evenly over the workers, or weights and optimizer state take more memory "
        "than activations: any number of stages from p on, in one machine's memory, while a worker holds only one "
        "slot's weights. Its bubble is that of as many slots as there are forwards and backwards together. It runs "
        "each forward twice, and copies each stage's weights twice per minibatch.",
    ),
)
