"""RoundPipe: workers take the stages' passes in round robin; weights stay in host memory.

Efficient Training on Multiple Consumer GPUs with RoundPipe (arXiv 2604.27085). A minibatch is a row of *slots*: the
forwards of stage 0, 1, ..., then the backwards down to stage 0; the last stage's two passes are one slot. Each slot
goes to the next worker, which runs all its m microbatches. A backward recomputes its forward. The number of stages need
not be a multiple of p. With n equal slots, p divides n and m >= p, the bubble is p (p - 1)/(n m + p (p - 1)).

    rank 0 | .    1F0  1F1  3F0  3B0  3F1  3B1' 1B0  1B1'
    rank 1 | 0F0  0F1  2F0  2F1  .    2B0  .    2B1' 0B0  0B1'

Weights are in memory that all workers, on one machine, share; a worker copies those of its slot when the slot begins. A
slot may hold the forwards of several stages, since backwards take about three times as long.

A minibatch starts when the one before has ended. In the paper's asynchronous form (`delay=1`) it does not wait: its
passes read weights that lack one update, w(t+1) = w(t) - lr grad f(w(t-1)), while the host makes it. Its slots go on
from the worker after that of the minibatch before, so with equal slots workers wait at the two ends of a run alone. The
workers then take turns at a stage's backwards, and leave its gradients in shared memory for its home, the worker that
makes its updates.

Unlike the paper's, a slot has all m microbatches, not p of them. A worker counts as in flight the microbatches of its
forwards until its next minibatch, and the one whose backward it runs for another worker's forward.
"""

import itertools
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from itertools import accumulate
from math import gcd

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
    _check(plan, forwards, delay)
    p, last = plan.workers, len(plan.stages) - 1
    m = microbatches or 4 * p
    slots = [range(first, min(first + forwards, last)) for first in range(0, last, forwards or 1)]
    if not forwards and last:
        slots = _choose_slots(plan, m, continued=delay > 0)
    count = len(slots) + last + 1
    turns = p // gcd(count, p) if delay else 1  # minibatches until one begins again with the same worker

    def find_worker(slot: int, minibatch: int) -> int:
        # Counted from the last stage's slot, on worker 0 in the first minibatch.
        return (slot - len(slots) + count * (minibatch % turns)) % p

    def order(rank: int) -> Iterator[kit.Op]:
        due: list[kit.Op] = []  # updates from gradients of other workers
        for minibatch in itertools.count():
            for slot in range(count):
                stage, is_mine = last - slot + len(slots), find_worker(slot, minibatch) == rank
                for k in range(minibatch * m, (minibatch + 1) * m) if is_mine else ():
                    for s in slots[slot] if slot < len(slots) else (last,) * (stage == last):
                        yield kit.forward((s, 0), k)
                    if stage <= last:
                        yield kit.backward((stage, 0), k)
                if is_mine:  # what another worker began before this slot has ended
                    yield from due
                    due = []
                if stage <= last and find_worker(slot, 0) == rank:
                    due.append(kit.update((stage, 0), minibatch + 1))
                    if is_mine:
                        yield due.pop()

    def find_workers(slot: int) -> tuple[int, ...]:
        return tuple(find_worker(slot, minibatch) for minibatch in range(turns))

    again = tuple(replace(stage, recompute=stage.recompute or s < last) for s, stage in enumerate(plan.stages))
    claims = _make_claims(last) if forwards == 1 and not delay else kit.Claims()
    schedule = kit.flushing("roundpipe", replace(plan, stages=again), m, order, claims)
    if delay:
        schedule = replace(schedule, weights=kit.DoubleBuffer(m), flushes=False, claims=claims)
    forward_slots = [*(number for number, slot in enumerate(slots) for _ in slot), len(slots)]
    placement = replace(
        plan.placement,
        forwards=tuple(map(find_workers, forward_slots)),
        backwards=tuple(map(find_workers, range(count - 1, len(slots) - 1, -1))),
        turn=m if turns > 1 else 1,
    )
    return replace(schedule, placement=placement)


def _check(plan: kit.Plan, forwards: int, delay: int) -> None:
    workers, needed = plan.worker_order or tuple(range(sum(plan.replicas))), homes(plan.workers, len(plan.stages))
    if set(plan.replicas) != {1} or workers != needed:
        raise kit.ScheduleError(
            f"schedule 'roundpipe' needs {dispatched.words}, without replicas; found plan {plan.config} on workers "
            f"{workers}; plan for this method, or name the workers {needed} in the plan's order"
        )
    if apart := [worker for worker in workers if plan.cluster.reach(workers[0], worker)]:
        raise kit.ScheduleError(
            f"schedule 'roundpipe' keeps weights in the memory of one machine, but workers {workers[0]} and {apart[0]} "
            "of the cluster are on different ones; plan for one machine, or choose another method"
        )
    if plan.choices.activations or plan.ranks > plan.workers:
        reason = (
            f"the meshes of plan {plan.config}, but its workers compute with weights of others, which a mesh divides"
        )
        if plan.choices.activations:
            activations = plan.choices.activations
            reason = f"{activations=}, but its backwards recompute, which leaves only inputs to offload"
        raise kit.ScheduleError(
            f"schedule 'roundpipe' was asked for with {reason}; leave that out, or choose another method"
        )
    if forwards < 0 or delay not in (0, 1):
        raise kit.ScheduleError(
            "schedule 'roundpipe': a slot has the forwards of at least 1 stage, or with 0 as many as the plan's seconds"
            f" say, and the delay is 0 or 1; found forwards={forwards} and delay={delay}"
        )


def _choose_slots(plan: kit.Plan, m: int, *, continued: bool) -> list[range]:
    """Returns the stages of each slot of forwards.

    Of the 16 numbers of slots with the least max(slots, p) times the longest slot, which the paper minimises, it takes
    the one whose minibatches take the least time.

    Args:
        continued: a minibatch continues from the worker after that of the one before, and does not wait for its end.
    """
    p, stages = plan.workers, plan.stages
    before = list(accumulate((stage.forward_s for stage in stages[:-1]), initial=0.0))
    # A backward repeats its forward before its gradient arrives; the last stage's follows the forward.
    backwards_s = [stage.backward_s + stage.forward_s for stage in reversed(stages)]
    early_s = [0.0, *(stage.forward_s for stage in reversed(stages[:-1]))]

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

    def find_bound_s(count: int) -> float:
        return max(count + len(stages), p) * max(*backwards_s, split(len(stages) - 1, count)[0])

    def dispatch_s(count: int) -> float:
        """Returns the seconds of a minibatch, or of p of them after p others, dispatched slot by slot."""
        _, ends = split(len(stages) - 1, count)
        slots_s = [(before[end] - before[begin], 0.0) for begin, end in zip((0, *ends), ends, strict=False)]
        slots_s += zip(backwards_s, early_s, strict=True)
        free_s, workers = [0.0] * p, itertools.cycle(range(p))
        begin_s = 0.0
        for number in range(2 * p if continued else 1):
            if number == p:
                begin_s = max(free_s)
            ends_s = [0.0] * m
            for (slot_s, slot_early_s), worker in zip(slots_s, workers, strict=False):
                for k in range(m):
                    free_s[worker] = ends_s[k] = max(free_s[worker], ends_s[k] - slot_early_s) + slot_s
        return max(free_s) - begin_s

    # With fewer than 2 p - 2 slots a forward would wait for its weights, which their home makes after its next slot.
    fewest = max(1, 2 * p - 2 - len(stages)) if continued else 1
    counts = sorted(range(len(stages) - 1, fewest - 1, -1), key=find_bound_s)[:16]
    _, ends = split(len(stages) - 1, min(counts, key=dispatch_s))
    return [range(begin, end) for begin, end in zip((0, *ends), ends, strict=False)]


def _make_claims(last: int) -> kit.Claims:
    """Returns the closed forms for S = last + 1 equal stages, each forward a slot.

    A forward takes f, a backward f + b with the forward that it repeats, b >= f. Slot j + 1 starts as soon as its
    worker has finished slot j + 1 - p and its first microbatch has left slot j; a backward slot starts f earlier, to
    repeat a forward. It waits for the worker once in p slots, if m >= p, or m (f + b) >= p b in backwards; of the
    p - r slots after the last stage's, r = (S - 1) mod p, only if forwards are long.
    """

    def makespan_s(p: int, m: int, n: int, f: float, i: float, w: float) -> float:
        b, (rounds, rest) = i + w, divmod(last, p)
        waits = max(0.0, (m - p) * f - (p - rest) * (b - f)) if 2 * rest >= p else 0.0
        forwards = (rounds * max(m, p) + rest) * f
        return n * (forwards + rounds * max(m * (f + b), p * b) + rest * b + m * (f + b) + waits)

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
        stage_order=dispatched,
        properties=kit.MethodProperties(replicates_stages=False, recomputes=True),
        picture=kit.Picture("RoundPipe: forwards and backwards dispatched in round robin; s is the stage; m = 4", 4, 8),
        choose="When the stages do not divide evenly over the workers, or weights and optimizer state take more memory "
        "than activations: any number of stages from p on, in one machine's memory, while a worker holds only one "
        "slot's weights. Its bubble is that of as many slots as there are forwards and backwards together. It runs "
        "each forward twice, and copies each stage's weights twice per minibatch.",
    ),
)
