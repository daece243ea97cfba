"""Seconds of a run: each update at the pace at which the library simulates a pipeline of equal stages. See README.md.

A backward takes twice as long as a forward. A method that splits a minibatch has p microbatches of 1/p of that, or
several times as many; that small microbatches are less efficient is left out. A change of methods drains the pipeline,
and fills it again.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

from arms import Arm

import pipedream as pd
from pipedream import schedules
from pipedream.core.hardware.cluster import Cluster
from pipedream.core.plan.plan import Plan

SETTLED = 32
"""Minibatches after which a pipeline of at most sixteen stages repeats itself."""


@dataclass(frozen=True)
class Pace:
    """What a minibatch takes at one stage, and between two.

    Attributes:
        forward_s: of a forward.
        update_s: of an update.
        message_bytes: of activations, and of gradients.
        bytes_per_s: of a link, in each direction.
        latency_s: of a message.
    """

    forward_s: float = 1.0
    update_s: float = 0.0
    message_bytes: int = 1
    bytes_per_s: float = 1e30
    latency_s: float = 0.0


ABSTRACT = Pace()
"""The unit is a forward of a whole minibatch at one stage; messages and updates are free."""

_FORWARD_S = 0.6e-3
_UPDATE_S = {"adamw": 0.1e-3, "nadam": 0.33e-3, "sgd": 0.05e-3, "muon": 0.83e-3}
_ROTATION_S = 1.2e-3  # more; a basis lasts 10 updates
_MESSAGE_BYTES = 16 * 32 * 32 * 4
_LATENCY_S = 1e-4


def pace_of_gpt(arm: Arm, layers: int, bytes_per_s: float) -> Pace:
    """Returns the pace of a stage of so many layers of the GPT, as one core of an AMD EPYC needs (2026-11-27)."""
    rotation_s = _ROTATION_S * any(turn.method.rotation for turn in arm.turns)
    return Pace(
        layers * _FORWARD_S, layers * (_UPDATE_S[arm.optimizer] + rotation_s), _MESSAGE_BYTES, bytes_per_s, _LATENCY_S
    )


def times_of(arm: Arm, stages: int, updates: int, at: list[int], pace: Pace = ABSTRACT, split: int = 1) -> list[float]:
    """Returns the time at which each of these numbers of updates has been made, of so many in all.

    Args:
        split: microbatches for each stage, of a method that splits a minibatch.
    """
    times, begin, first = [], 0.0, 0
    for turn in arm.turns:
        last, method = round(turn.until * updates), turn.method
        name = "1f1b" if method.flushes else "pipedream_2bw" if (method.microbatches(stages) or 1) > 1 else "pipedream"
        m = (method.microbatches(stages) or 1) * (split if method.splits else 1)
        # What differs in the weights alone has the same order, at the depth of its own clock.
        late = tuple(method.staleness(stages, s) for s in range(stages)) if name == "pipedream" else ()
        recomputes = method.paper(stages, method.parts(stages)).rule == "recompute"
        period, fill = _find_paces(name, m, late, stages, recomputes, pace)
        times += [begin + fill + (n - first) * period for n in at if first < n <= last]
        begin, first = begin + fill + (last - first) * period, last
    return times


@cache
def _find_paces(name: str, m: int, late: tuple[int, ...], p: int, recompute: bool, pace: Pace) -> tuple[float, float]:
    """Returns the time of an update in a full pipeline, and what filling and draining one takes beside that."""
    plan = Plan.uniform(p, pace.forward_s / m, 2 * pace.forward_s / m, update_s=pace.update_s)
    stages = tuple(replace(stage, recompute=recompute, output_bytes=pace.message_bytes // m) for stage in plan.stages)
    plan = replace(plan, stages=stages, cluster=Cluster.flat(p, pace.bytes_per_s, pace.latency_s))
    if late and late[0] > p - 1:
        plan = replace(plan, in_flight=tuple(count + 1 for count in late), depth_mode="hand")
    schedule = schedules.build(name, plan, None if name == "pipedream" else m)
    if name == "1f1b":
        return pd.simulate(plan, schedule=schedule).makespan_s, 0.0
    some, more = (pd.simulate(plan, schedule=schedule, minibatches=n).makespan_s for n in (SETTLED, 2 * SETTLED))
    period = (more - some) / SETTLED
    return period, some - SETTLED * period
