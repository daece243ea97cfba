"""The phases of a run made ready: the method of each, lowered and proved, over one set of channels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from pipedream import schedules
from pipedream.core.errors import PlanError, ScheduleError
from pipedream.core.model.profile import Profile
from pipedream.core.plan.plan import Plan
from pipedream.core.schedule.compensation import compensations
from pipedream.core.schedule.coupling import Policy, coupled
from pipedream.core.schedule.lowering import lower, with_common_channels
from pipedream.core.schedule.phase import Phase, check_phases, read_phases
from pipedream.core.schedule.program import Program
from pipedream.core.schedule.schedule import Schedule
from pipedream.verifier import Proof, verify
from pipedream.workflows.check import check_memory
from pipedream.workflows.methods import asked_of

__all__ = [
    "Prepared",
    "all_flush",
    "check_phases_fit",
    "compensated",
    "evaluation_of",
    "phases_of",
    "planned_for",
    "prepare",
]


@dataclass(frozen=True)
class Prepared:
    """A phase that can be run.

    Attributes:
        phase: what was asked.
        schedule: its method.
        program: lowered, with the channels of all phases.
        proof: of the program.
    """

    phase: Phase
    schedule: Schedule
    program: Program
    proof: Proof


def phases_of(
    schedule: str | Schedule | None, microbatches: int | None, phases: str | Sequence[Phase] | None
) -> tuple[Phase, ...]:
    """Returns the phases of a run, of which one that has but one method has one.

    Raises:
        ScheduleError: phases that cannot follow each other, or phases and a schedule beside them.
    """
    if not phases:
        return (Phase(schedule if schedule is not None else "", microbatches=microbatches),)
    if schedule is not None or microbatches is not None:
        raise ScheduleError(
            "phases were asked for (or stand in the recipe or the checkpoint) and a schedule or microbatches beside "
            "them; each phase says its own: "
            "Phase('1f1b', until=200, microbatches=4), as text 1f1b/4:200"
        )
    return read_phases(phases) if isinstance(phases, str) else check_phases(phases)


def all_flush(plan: Plan, phases: Sequence[Phase]) -> bool:
    """Tells whether none of the phases has gradients that are late."""
    return all(_built(plan, phase).flushes for phase in phases)


def compensated(plan: Plan, phases: Sequence[Phase], asked: Any) -> tuple[Phase, ...]:
    """Returns phases, those that do not flush with a compensation unless they say their own.

    Where all of them flush it is given to all, for `prepare` to refuse it with the reason.

    Args:
        asked: one or several of `core.schedule.compensation`, or their texts; () for none, None to leave the phases
        as they are.

    Raises:
        ScheduleError: an unknown one, or a method that does not work with this plan.
    """
    if asked is None:
        return tuple(phases)
    chosen, none_late = compensations(asked), all_flush(plan, phases)
    return tuple(
        replace(phase, compensation=chosen)
        if phase.compensation is None and (none_late or not _built(plan, phase).flushes)
        else phase
        for phase in phases
    )


def prepare(plan: Plan, phases: Sequence[Phase], policy: Policy) -> tuple[Prepared, ...]:
    """Returns the phases of a run, lowered and proved.

    Raises:
        ScheduleError: a method does not work with this plan or this policy, or they are not of one placement.
        DeadlockError: a program would stand still.
    """
    built = [coupled(_built(plan, phase), policy) for phase in phases]
    programs = with_common_channels([lower(schedule) for schedule in built])
    return tuple(
        Prepared(phase, schedule, program, verify(program))
        for phase, schedule, program in zip(phases, built, programs, strict=True)
    )


def evaluation_of(schedule: Schedule) -> Program:
    """Returns the program of forwards alone for a method's stages, proved."""
    program = lower(schedules.evaluation(schedule.plan, schedule.placement))
    verify(program)
    return program


def check_phases_fit(plan: Plan, phases: Sequence[Phase], profile: Profile | None) -> None:
    """Checks that a plan, which was made for one phase of a run or comes from a file, has memory for each of them, and
    for what compensations keep.

    Args:
        profile: of the model; None: the plan's bytes are taken as they are.

    Raises:
        PlanError: it has not; names the phase and the stage.
        ScheduleError: a method does not work with this plan.
    """
    for phase in phases:
        try:
            check_memory(plan, _built(plan, phase), None if isinstance(phase.schedule, Schedule) else profile)
        except PlanError as error:
            raise PlanError(f"in phase {phase} the plan {plan.config} does not hold: {error}") from None


def planned_for(phases: Sequence[Phase]) -> Phase:
    """Returns the phase that a run's plan is made for: the first whose gradients are late, the last where all flush.

    What the others hold is not known before there is a plan; see `check_phases_fit`.
    """

    def flushes(phase: Phase) -> bool:
        if isinstance(phase.schedule, Schedule):
            return phase.schedule.flushes
        return schedules.properties_of(phase.schedule).flushes

    return next((phase for phase in phases if not flushes(phase)), phases[-1])


def _built(plan: Plan, phase: Phase) -> Schedule:
    built = phase.schedule
    if not isinstance(built, Schedule):
        name, parts = asked_of(plan, built, phase.microbatches)
        built = schedules.build(name, plan, parts)
    return built if phase.compensation is None else built.compensated(phase.compensation)
