"""The length of a run that is drawn or simulated."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass

from pipedream.core.errors import ScheduleError
from pipedream.core.plan.plan import Plan
from pipedream.core.schedule.schedule import Schedule
from pipedream.schedules.kit.idioms import max_in_flight
from pipedream.schedules.pytorch_csv import is_torch_csv, load_torch_csv
from pipedream.schedules.registry import build, check_chunks, layout_of

_DEFAULT_WORKERS = 4


def uniform(
    name: str,
    workers: int | None,
    forward_s: float = 1.0,
    backward_s: float = 2.0,
    transfer_s: float = 0.0,
    *,
    chunks: int | None = None,
) -> Plan:
    """Returns a plan of equal stages that a method can work with, for studies and pictures (`Plan.uniform`).

    Args:
        workers: None takes those of a CSV file, or 4.
        forward_s, backward_s: seconds of one microbatch at one stage.
        chunks: stages per worker, for methods that leave the choice.

    Raises:
        ScheduleError: there is no such method, the file is for other workers, or `chunks` cannot be chosen.
    """
    check_chunks(name, chunks)
    if is_torch_csv(name):
        read = load_torch_csv(name).plan
        if workers not in (None, read.workers):
            raise ScheduleError(f"schedule {name!r} is for {read.workers} workers, and {workers} were asked for")
        return Plan.uniform(len(read.stages), forward_s, backward_s, transfer_s, order=read.worker_order)
    workers, layout = workers or _DEFAULT_WORKERS, layout_of(name)
    if layout is None:
        return Plan.uniform(workers, forward_s, backward_s, transfer_s)
    order, stages = layout.order(workers, chunks or layout.chunks or 1), layout.stages(workers, chunks)
    replicas = (layout.replicas,) * stages
    return Plan.uniform(stages, forward_s, backward_s, transfer_s, replicas=replicas, order=order)


def claims_at(schedule: Schedule, stages: int, run: int) -> dict[str, object]:
    """Returns a method's claims for p = `stages` workers as JSON values; for one minibatch if it flushes, else for
    the run.
    """
    claims, m = schedule.claims, schedule.microbatches
    counted = m if schedule.flushes else run
    lists = {
        name: None if form is None else [form(stages, counted, s) for s in range(stages)]
        for name, form in (
            ("in_flight", claims.in_flight),
            ("staleness", claims.staleness),
            ("versions", claims.versions),
        )
    }
    applies = m >= claims.least(stages)
    bubble = claims.bubble(stages, m) if claims.bubble is not None and applies else None
    return {
        "flushes": schedule.flushes,
        "microbatches": m,
        "assumption": claims.assumption,
        "bubble": bubble,
        **lists,
    }


@dataclass(frozen=True)
class Run:
    """A schedule, and how many minibatches it runs from an empty pipeline to an empty one."""

    schedule: Schedule
    minibatches: int

    @property
    def microbatches(self) -> int:
        return self.minibatches * self.schedule.microbatches

    def __str__(self) -> str:
        count, m = self.minibatches, self.schedule.microbatches
        words = f"a run of {count} minibatch{'es' if count > 1 else ''}"
        return words if _keeps_minibatches(self.schedule) else f"{words} of m = {m} microbatch{'es' if m > 1 else ''}"


def run_of(
    schedule: str | Schedule,
    plan: Plan,
    microbatches: int | None = None,
    minibatches: int | None = None,
    *,
    split: int | None = None,
    usual: int = 16,
) -> Run:
    """Returns a method's schedule for a plan, and the length of its run.

    Args:
        schedule: a method's name, a file, or a schedule.
        microbatches: m; 1 for a method that does not split a minibatch.
        minibatches: by default one if the method flushes; else enough to show the steady state, at least two, and at
            least `usual` microbatches.
        split: m if `microbatches` is None.
        usual: m if neither is given, for methods that flush and work with it; others choose their own.

    Raises:
        ScheduleError: the method does not work with the plan or with m.
    """
    built = _build(schedule, plan, microbatches, split, usual) if isinstance(schedule, str) else schedule
    if microbatches not in (None, built.microbatches):
        if _keeps_minibatches(built):
            raise ScheduleError(
                f"schedule {built.name!r} does not split a minibatch, but {microbatches} microbatches per minibatch "
                "were asked for; leave the number out, and give the length of the run in minibatches "
                f"(--minibatches {microbatches}, or minibatches={microbatches} in Python)"
            )
        raise ScheduleError(
            f"schedule {built.name!r} is built for {built.microbatches} microbatches per minibatch, but {microbatches} "
            "were asked for; leave the number out, and give the length of the run in minibatches"
        )
    if minibatches is not None and minibatches < 1:
        raise ScheduleError(f"a run has at least 1 minibatch, found {minibatches}")
    return Run(built, minibatches or _choose_length(built, usual))


def _build(name: str, plan: Plan, microbatches: int | None, split: int | None, usual: int) -> Schedule:
    if is_torch_csv(name):
        return build(name, plan, microbatches or split)
    if microbatches is not None:
        try:
            return build(name, plan, microbatches)
        except ScheduleError:
            if not _keeps_minibatches(built := build(name, plan)):
                raise
            return built
    built = build(name, plan, split)
    if split is None and built.flushes:
        with suppress(ScheduleError):
            return build(name, plan, usual)
    return built


def _keeps_minibatches(schedule: Schedule) -> bool:
    """Returns whether microbatches are whole minibatches."""
    return schedule.updates.mean_of_rounds


def _choose_length(schedule: Schedule, usual: int) -> int:
    if schedule.flushes:
        return 1
    m, in_flight = schedule.microbatches, max_in_flight(schedule.plan)
    return max(-(-usual // m), -(-in_flight // m) + 1)
