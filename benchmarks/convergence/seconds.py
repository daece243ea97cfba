"""Simulated time: when the updates of an arm are made, by `pipedream.simulate`.

Stages are equal and messages cost nothing. The unit is a forward of a whole minibatch at one stage; a backward takes 2.
A method that splits a minibatch has p microbatches of 1/p of that; that small microbatches are less efficient is left
out. A change of methods drains the pipeline, and fills it again.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache

from arms import Arm, Method

import pipedream as pd
from pipedream import schedules
from pipedream.core.plan.plan import Plan

SETTLED = 32
"""Minibatches behind which a pipeline of at most eight stages repeats itself."""


def times_of(arm: Arm, stages: int, updates: int, at: list[int]) -> list[float]:
    """Returns the time at which each of these numbers of updates has been made, of so many in all."""
    times, begin, first = [], 0.0, 0
    for turn in arm.turns:
        last = round(turn.until * updates)
        period, fill = _find_paces(turn.method, stages)
        times += [begin + fill + (n - first) * period for n in at if first < n <= last]
        begin, first = begin + fill + (last - first) * period, last
    return times


@cache
def _find_paces(method: Method, p: int) -> tuple[float, float]:
    """Returns the time of an update in a full pipeline, and what filling and draining one takes beside that."""
    m = method.microbatches(p) or 1
    plan = Plan.uniform(p, 1 / m, 2 / m)
    if method.rule == "recompute":
        plan = replace(plan, stages=tuple(replace(stage, recompute=True) for stage in plan.stages))
    # What differs in the weights alone has the same order, at the depth of its own clock.
    late = tuple(method.late(p, s) for s in range(p))
    name = "1f1b" if method.flushes else "pipedream_2bw" if m > 1 else "pipedream"
    if name == "pipedream" and late[0] > p - 1:
        plan = replace(plan, in_flight=tuple(count + 1 for count in late), depth_mode="hand")
    schedule = schedules.build(name, plan, m if m > 1 else None)
    if method.flushes:
        return pd.simulate(plan, schedule=schedule).makespan_s, 0.0
    some, more = (pd.simulate(plan, schedule=schedule, minibatches=n).makespan_s for n in (SETTLED, 2 * SETTLED))
    period = (more - some) / SETTLED
    return period, some - SETTLED * period
