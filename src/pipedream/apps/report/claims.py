"""A method's claims beside its simulation."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from pipedream import metrics, schedules, simulator as clock
from pipedream.core.errors import ScheduleError
from pipedream.core.schedule.lowering import lower
from pipedream.core.schedule.schedule import Schedule
from pipedream.core.schedule.timeline import Timeline
from pipedream.core.user_code import with_place

_SAME_CLAIM = 1e-9
_CLAIM_WORDS = {"in_flight": "in flight", "makespan_s": "makespan in seconds"}


@dataclass(frozen=True)
class ClaimCheck:
    """A method's claims compared with its simulation, under their own assumption.

    Attributes:
        compared: names of the claims that apply to these numbers of workers and microbatches.
        omitted: each claim that was not compared, and why.
        differences: each claim that does not hold, and what the simulation gave.
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
        names = ", ".join(_CLAIM_WORDS.get(name, name) for name in self.compared)
        setting = f"p = {self.workers}, m = {self.microbatches} ({self.assumption})"
        if not self.differences:
            return f"claims of {self.schedule} at {setting}: {names}; the simulation agrees{omitted}"
        head = f"claims of {self.schedule} at {setting} differ from the simulation:"
        return "\n".join([head, *self.differences]) + omitted


def check_claims(
    name: str,
    workers: int,
    microbatches: int | None = None,
    chunks: int | None = None,
    seconds: tuple[float, float] = (1.0, 2.0),
) -> ClaimCheck:
    """Compares a method's claims with its simulation on equal stages.

    Args:
        microbatches: m; None for the method's own choice.
        chunks: stages per worker, for methods that leave the choice.
        seconds: of a forward and, unless the claims name their ratio, of a backward.

    Raises:
        ScheduleError: the method does not work so, or a claim cannot be computed.
    """
    plan = schedules.uniform(name, workers, *seconds, chunks=chunks)
    built = schedules.build(name, plan, microbatches)
    p, m, claims = workers, built.microbatches, built.claims
    if claims.ratio is not None:
        stages = tuple(replace(stage, backward_s=claims.ratio * stage.forward_s) for stage in plan.stages)
        built = schedules.build(name, replace(plan, stages=stages), m if built.flushes else microbatches)
    total = 3 * m if built.flushes else max(3 * m, 4 * p)
    try:
        rows = list(_compare_claims(built, p, total))
    except ScheduleError:
        raise
    except Exception as error:  # of the file's functions
        raise ScheduleError(f"schedule {name!r}: a claim failed with {with_place(error)}") from error
    compared = tuple(dict.fromkeys(figure for figure, *_ in rows))
    differences = tuple(
        f"{_CLAIM_WORDS.get(figure, figure)} of {where}: claimed {claimed:.6g}, simulated {value:.6g}"
        for figure, where, claimed, value in rows
        if abs(claimed - value) > _SAME_CLAIM * max(1.0, abs(value))
    )
    omitted = tuple(_list_omitted(built, p, compared))
    return ClaimCheck(built.name, p, m, claims.assumption, compared, differences, omitted)


def _compare_claims(built: Schedule, p: int, total: int) -> Iterator[tuple[str, str, float, float]]:
    """Yields claim, place, claimed and simulated figure; in a run of `total` microbatches, or for one minibatch."""
    claims, m = built.claims, built.microbatches
    claimed_m = m if built.flushes else total  # the claims' m: of a minibatch, or of a run that does not flush
    is_claimed = m >= claims.least(p)
    timeline = _simulate(built, total)
    of_stages: dict[str, tuple[str, Callable[[int], float]]] = {
        "in_flight": ("worker", lambda s: metrics.in_flight(timeline, s)),
        "staleness": ("stage", lambda s: metrics.staleness(timeline, s)),
        "versions": ("worker", lambda s: timeline.peak_versions[s]),
    }
    for name, (place, measure) in of_stages.items():
        claim = getattr(claims, name)
        if claim is not None and (name != "in_flight" or is_claimed):
            for s in range(p):
                yield name, f"{place} {s}", claim(p, claimed_m, s), measure(s)
    if built.flushes and is_claimed:
        minibatch, stage = _simulate(built, m), built.plan.stages[0]
        if claims.bubble is not None:
            yield "bubble", "one minibatch", claims.bubble(p, m), metrics.run_metrics(minibatch).bubble
        if claims.makespan_s is not None:
            halves_s = (stage.backward_s / 2, stage.backward_s / 2)  # the input and the weight gradient
            claimed_s = claims.makespan_s(p, m, 1, stage.forward_s, *halves_s)
            yield "makespan_s", "one minibatch", claimed_s, minibatch.makespan_s


def _list_omitted(built: Schedule, workers: int, compared: tuple[str, ...]) -> Iterator[str]:
    claims, m = built.claims, built.microbatches
    for name in ("in_flight", "staleness", "versions", "bubble", "makespan_s"):
        if getattr(claims, name) is None or name in compared:
            continue
        if name in ("bubble", "makespan_s") and not built.flushes:
            why = "it is compared over one minibatch, and this method does not flush"
        else:
            why = f"it is claimed from m = {claims.least(workers)} on, and m is {m}"
        yield f"{_CLAIM_WORDS.get(name, name)}: {why}"


def _simulate(built: Schedule, total: int) -> Timeline:
    return clock.simulate(lower(built), clock.costs(built.plan), total)
