"""Plans that repeat themselves soon enough to be proved, and so to run.

A plan repeats itself after the least common multiple of its replica counts, its *cycle*. Where the fastest plan has too
long a one, others are searched whose counts all divide one number. The longest that can be proved takes minutes to
lower on a thousand workers, so a short one is taken if its plan is nearly as fast.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from pipedream.core.plan.plan import Plan
from pipedream.core.schedule.lowering import MOST_PROVED
from pipedream.planner.arrays import IntArray
from pipedream.planner.dynamic_program.recurrence import tie_break_key

MOST = (128, MOST_PROVED)
"""Microbatches of a cycle: at most so many if that makes the plan `LOSS` slower at most, else so many."""

LOSS = 0.02


def shorten_cycle(plan: Plan, workers: int, search: Callable[[int], Plan | None], tried: int) -> Plan:
    """Returns the fastest plan, or if it cannot be proved the fastest that is found whose counts divide one number.

    With enough tries it is the fastest whose cycle is at most the last of `MOST`, or `LOSS` slower than `plan` at most.

    Args:
        search: from a number to the fastest plan whose counts divide it; None if there is none.
        tried: numbers for each of `MOST`.
    """
    if plan.placement.cycle <= MOST[-1]:
        return plan
    best: Plan | None = None
    for most in MOST:
        for cycle in list_cycles(plan.replicas, workers, most)[:tried]:
            other = search(cycle)
            if other is not None and (best is None or tie_break_key(other) < tie_break_key(best)):
                best = other
        if best is not None and best.slowest_stage_s <= plan.slowest_stage_s * (1 + LOSS):
            break
    return plan if best is None else replace(best, bound_s=min(plan.bound_s, best.slowest_stage_s))


def list_cycles(counts: Sequence[int], workers: int, most: int) -> list[int]:
    """Returns the numbers up to `most` that have not all of their divisors up to `workers` in common with a larger one.

    The best come first: those to whose divisors the counts may be rounded down with the least loss, then the smallest.
    """
    divisors: dict[int, IntArray] = {}
    for cycle in range(1, most + 1):
        few = np.arange(1, min(workers, cycle) + 1)
        few = few[cycle % few == 0]
        divisors[int(np.lcm.reduce(few))] = few
    largest = (n for n in divisors if not any(more in divisors for more in range(2 * n, most + 1, n)))
    asked = np.array(counts)

    def compute_loss(cycle: int) -> tuple[float, int]:
        below = divisors[cycle][np.searchsorted(divisors[cycle], asked, side="right") - 1]
        return float((asked / below).max()), cycle

    return sorted(largest, key=compute_loss)
