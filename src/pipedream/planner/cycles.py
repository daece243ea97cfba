"""Plans that repeat themselves soon enough to be proved, and so to run.

A plan repeats itself after the least common multiple of its replica counts, its *cycle*. If that of the fastest plan is
too long, others are searched whose counts all divide one number. The longest cycle that can be proved takes minutes to
lower on a thousand workers, so a short one is preferred if its plan is nearly as fast.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from pipedream.core.plan.plan import Plan
from pipedream.core.schedule.lowering import MAX_PROVED
from pipedream.planner.arrays import IntArray
from pipedream.planner.dynamic_program.recurrence import tie_break_key

CYCLE_LIMITS = (128, MAX_PROVED)
"""Limits of a cycle's microbatches: the first applies if it makes the plan at most `MAX_LOSS` slower."""

MAX_LOSS = 0.02


def shorten_cycle(plan: Plan, workers: int, search: Callable[[int], Plan | None], tried: int) -> Plan:
    """Returns `plan`, or if it cannot be proved the fastest plan found whose counts all divide one number.

    With enough tries it is the fastest whose cycle is within the last limit, or at most `MAX_LOSS` slower than `plan`.

    Args:
        search: a number -> the fastest plan whose counts divide it; None if there is none.
        tried: how many numbers to try for each of `CYCLE_LIMITS`.
    """
    if plan.placement.cycle <= CYCLE_LIMITS[-1]:
        return plan
    best: Plan | None = None
    for limit in CYCLE_LIMITS:
        for cycle in list_cycles(plan.replicas, workers, limit)[:tried]:
            other = search(cycle)
            if other is not None and (best is None or tie_break_key(other) < tie_break_key(best)):
                best = other
        if best is not None and best.slowest_stage_s <= plan.slowest_stage_s * (1 + MAX_LOSS):
            break
    # The bound is that of all plans, also of those that cannot be proved.
    return plan if best is None else replace(best, bound_s=min(plan.bound_s, best.slowest_stage_s))


def list_cycles(counts: Sequence[int], workers: int, limit: int) -> list[int]:
    """Returns numbers up to `limit`, but none whose divisors up to `workers` are all divisors of a larger one.

    The numbers to whose divisors the counts can be rounded down with the least loss come first, then smaller ones.
    """
    divisors: dict[int, IntArray] = {}
    for cycle in range(1, limit + 1):
        row = np.arange(1, min(workers, cycle) + 1)
        row = row[cycle % row == 0]
        divisors[int(np.lcm.reduce(row))] = row  # the smallest number with these divisors
    largest = (n for n in divisors if not any(multiple in divisors for multiple in range(2 * n, limit + 1, n)))
    exact_counts = np.array(counts)

    def compute_loss(cycle: int) -> tuple[float, int]:
        rounded = divisors[cycle][np.searchsorted(divisors[cycle], exact_counts, side="right") - 1]
        return float((exact_counts / rounded).max()), cycle

    return sorted(largest, key=compute_loss)
