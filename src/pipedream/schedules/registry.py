"""From a name to a schedule."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ..core.artifact import Artifact
from ..core.errors import ScheduleError
from ..core.plan import Plan
from ..core.schedule import Schedule
from .gpipe import gpipe
from .interleaved import interleaved_1f1b
from .naive import naive
from .one_f_one_b import one_f_one_b
from .pipedream import pipedream, pipedream_vertical_sync
from .two_bw import pipedream_2bw

__all__ = ["ALIASES", "CHUNKED", "SCHEDULES", "Choice", "build", "claims_at", "uniform"]

SCHEDULES: dict[str, Callable[[Plan, int | None], Schedule]] = {
    "naive": naive,
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "interleaved_1f1b": interleaved_1f1b,
    "pipedream": pipedream,
    "pipedream_vertical_sync": pipedream_vertical_sync,
    "pipedream_2bw": pipedream_2bw,
}
"""The methods, each by its name."""

CHUNKED = frozenset({"interleaved_1f1b"})
"""Those whose workers run several stages, p stages apart."""

ALIASES = {
    "pipedream_flush": "1f1b",
    "2bw": "pipedream_2bw",
    "vertical_sync": "pipedream_vertical_sync",
    "interleaved": "interleaved_1f1b",
}
"""Other names that papers use."""


def build(name: str, plan: Plan, microbatches: int | None = None) -> Schedule:
    """Returns a method's schedule for a plan.

    Args:
        name: of the method; case and the difference of ``-`` and ``_`` do not matter.
        plan: stages, replicas, depth.
        microbatches: m, how many a minibatch is split into; None takes the method's own choice.

    Raises:
        ScheduleError: no such method, or it cannot work with this plan or number.
    """
    key = _key(name)
    if microbatches is not None and microbatches < 1:
        raise ScheduleError(f"a minibatch is split into at least 1 microbatch, found {microbatches}")
    return SCHEDULES[key](plan, microbatches)


def uniform(
    name: str,
    workers: int,
    forward_s: float = 1.0,
    backward_s: float = 2.0,
    transfer_s: float = 0.0,
    *,
    chunks: int = 2,
) -> Plan:
    """Returns a plan of equal stages that a method can work with, for studies and pictures (`Plan.uniform`).

    Args:
        forward_s, backward_s: of one microbatch at one stage.
        chunks: stages of each worker, where the method runs several.

    Raises:
        ScheduleError: no such method.
    """
    each = chunks if _key(name) in CHUNKED else 1
    order = tuple(range(workers)) * each if each > 1 else ()
    return Plan.uniform(workers * each, forward_s, backward_s, transfer_s, order=order)


def _key(name: str) -> str:
    """Returns the name of a method in the registry. Raises ScheduleError: there is none."""
    key = name.lower().replace("-", "_")
    key = ALIASES.get(key, key)
    if key not in SCHEDULES:
        raise ScheduleError(f"schedule {name!r} is not known; choose one of {', '.join(sorted(SCHEDULES))}")
    return key


@dataclass(frozen=True)
class Choice(Artifact):
    """A Schedule as a file: the method's name, the plan, the split; `build` makes the rest again."""

    FORMAT = 1

    name: str
    plan: Plan
    microbatches: int

    @classmethod
    def of(cls, schedule: Schedule) -> Choice:
        """Returns what is needed to build a schedule again."""
        return cls(schedule.name, schedule.plan, schedule.microbatches)

    def build(self) -> Schedule:
        """Returns the schedule."""
        return build(self.name, self.plan, self.microbatches)


def claims_at(schedule: Schedule, stages: int, microbatches: int) -> dict[str, object]:
    """Returns what a method's paper promises for p workers and m microbatches, as JSON values."""
    claims = schedule.claims
    lists = {
        name: None if form is None else [form(stages, microbatches, s) for s in range(stages)]
        for name, form in (
            ("in_flight", claims.in_flight),
            ("staleness", claims.staleness),
            ("versions", claims.versions),
        )
    }
    bubble = None if claims.bubble is None else claims.bubble(stages, microbatches)
    return {"flushes": schedule.flushes, "assumption": claims.assumption, "bubble": bubble, **lists}
