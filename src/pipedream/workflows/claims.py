"""The claims of a method's file, compared with the simulation of its schedule."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from pipedream import metrics, schedules
from pipedream import simulator as clock
from pipedream.core.errors import ScheduleError
from pipedream.core.schedule.lowering import lower
from pipedream.core.schedule.schedule import Schedule
from pipedream.core.schedule.timeline import Timeline

_SAME = 1e-9
_SHOWN = {"in_flight": "in flight", "makespan_s": "makespan in seconds"}


@dataclass(frozen=True)
class ClaimCheck:
    """A method's claims beside its simulation, under their own assumption.

    Attributes:
        compared: names of `Claims` that the method makes for so many workers and microbatches.
        omitted: for each claim that it makes but that was not compared, the claim and why, in words.
        differences: for each claim that does not hold, the claim and what was found, in words.
    """

    schedule: str
    workers: int
    microbatches: int
    assumption: str
    compared: tuple[str, ...]
    differences: tuple[str, ...]
    omitted: tuple[str, ...] = ()

    def __str__(self) -> str:
        omitted = "".join(f"\nnot compared: {claim}" for claim in self.omitted)
        if not self.compared:
            return f"{self.schedule} claims nothing for p = {self.workers}, m = {self.microbatches}{omitted}"
        shown = ", ".join(_SHOWN.get(name, name) for name in self.compared)
        setting = f"p = {self.workers}, m = {self.microbatches} ({self.assumption})"
        if not self.differences:
            return f"claims of {self.schedule} at {setting}: {shown}; the simulation agrees{omitted}"
        head = f"claims of {self.schedule} at {setting} differ from the simulation:"
        return "\n".join([head, *self.differences]) + omitted


def check_claims(name: str, workers: int, microbatches: int | None = None, chunks: int | None = None) -> ClaimCheck:
    """Simulates a method on equal stages and compares the claims of its file.

    Args:
        microbatches: m; None for the method's own choice.
        chunks: stages per worker, for methods that leave the choice.

    Raises:
        ScheduleError: the method does not work so, or a claim cannot be computed.
    """
    plan = schedules.uniform(name, workers, chunks=chunks)
    built = schedules.build(name, plan, microbatches)
    p, m, claims = workers, built.microbatches, built.claims
    if claims.ratio is not None:
        stages = tuple(replace(stage, backward_s=claims.ratio * stage.forward_s) for stage in plan.stages)
        built = schedules.build(name, replace(plan, stages=stages), m if built.flushes else microbatches)
    total = 3 * m if built.flushes else max(3 * m, 4 * p)
    counted = m if built.flushes else total  # the claims' m: of a minibatch, or of a run that does not flush
    timeline = _simulate(built, total)
    applies = m >= claims.least(p)
    pairs: dict[str, list[tuple[str, float, float]]] = {}
    try:
        for s in range(p):
            if claims.in_flight is not None and applies:
                pair = claims.in_flight(p, counted, s), metrics.in_flight(timeline, s)
                pairs.setdefault("in_flight", []).append((f"worker {s}", *pair))
            if claims.staleness is not None:
                pair = claims.staleness(p, counted, s), metrics.staleness(timeline, s)
                pairs.setdefault("staleness", []).append((f"stage {s}", *pair))
            if claims.versions is not None:
                pair = claims.versions(p, counted, s), timeline.peak_versions[s]
                pairs.setdefault("versions", []).append((f"worker {s}", *pair))
        if built.flushes and applies:
            once = _simulate(built, m)
            if claims.bubble is not None:
                pairs["bubble"] = [("one minibatch", claims.bubble(p, m), metrics.run_metrics(once).bubble)]
            if claims.makespan_s is not None:
                stage = built.plan.stages[0]
                halves_s = (stage.backward_s / 2, stage.backward_s / 2)  # the input and the weight gradient
                seconds = claims.makespan_s(p, m, 1, stage.forward_s, *halves_s)
                pairs["makespan_s"] = [("one minibatch", seconds, once.makespan_s)]
    except ScheduleError:
        raise
    except Exception as error:  # of the file's functions
        raise ScheduleError(f"schedule {name!r}: a claim failed with {type(error).__name__}: {error}") from error
    differences = tuple(
        f"{_SHOWN.get(what, what)} of {where}: claimed {claimed:.6g}, simulated {value:.6g}"
        for what, rows in pairs.items()
        for where, claimed, value in rows
        if abs(claimed - value) > _SAME * max(1.0, abs(value))
    )
    return ClaimCheck(
        built.name, p, m, claims.assumption, tuple(pairs), differences, tuple(_list_omitted(built, p, set(pairs)))
    )


def _list_omitted(built: Schedule, workers: int, compared: set[str]) -> Iterator[str]:
    claims, m = built.claims, built.microbatches
    for name in ("in_flight", "staleness", "versions", "bubble", "makespan_s"):
        if getattr(claims, name) is None or name in compared:
            continue
        if name in ("bubble", "makespan_s") and not built.flushes:
            why = "it is compared over one minibatch, and this method does not flush"
        else:
            why = f"it is claimed from m = {claims.least(workers)} on, and m is {m}"
        yield f"{_SHOWN.get(name, name)}: {why}"


def _simulate(built: Schedule, total: int) -> Timeline:
    return clock.simulate(lower(built), clock.costs(built.plan), total)
