"""Prepares a run's phases: each method lowered and proved, all over one set of channels."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from pipedream import schedules
from pipedream.core.errors import PlanError, ScheduleError
from pipedream.core.model.profile import Profile
from pipedream.core.plan.plan import Plan
from pipedream.core.schedule.delay_compensation import compensations
from pipedream.core.schedule.lowering import lower, with_common_channels
from pipedream.core.schedule.program import Program
from pipedream.core.schedule.schedule import Schedule
from pipedream.core.schedule.update_policy import Policy
from pipedream.runtime.session.phase_order import PhaseEnd
from pipedream.services.phases.phases import Phase, check_phases, read_phases
from pipedream.verifier import Proof, verify
from pipedream.workflows.check import check_plan_memory, count_moved_state
from pipedream.workflows.exclusions import check_options
from pipedream.workflows.methods import resolve_method


@dataclass(frozen=True)
class Prepared:
    """A phase ready to run; its program has the channels of all phases."""

    phase: Phase
    schedule: Schedule
    program: Program
    proof: Proof

    @property
    def end(self) -> PhaseEnd:
        return PhaseEnd(str(self.phase), self.phase.until, self.phase.until_epoch)


def read_run_phases(
    schedule: str | Schedule | None, microbatches: int | None, phases: str | Sequence[Phase] | None
) -> tuple[Phase, ...]:
    """Returns the phases of a run; one if its method does not change.

    Raises:
        ScheduleError: phases that cannot follow each other, or are given with a schedule or microbatches.
    """
    if not phases:
        return (Phase(schedule if schedule is not None else "", microbatches=microbatches),)
    options = {"phases": phases, "schedule": schedule, "microbatches": microbatches}
    check_options(options, error=ScheduleError)
    return read_phases(phases) if isinstance(phases, str) else check_phases(phases)


def is_synchronous(plan: Plan, phases: Sequence[Phase]) -> bool:
    """Returns whether no phase has stale gradients."""
    return all(build_phase(plan, phase).flushes for phase in phases)


def add_compensation(plan: Plan, phases: Sequence[Phase], compensation: Any) -> tuple[Phase, ...]:
    """Gives a compensation to the phases that do not flush and name none.

    If all flush, all get it, and `prepare` refuses it with the reason.

    Args:
        compensation: () for no compensation; None leaves the phases as they are.

    Raises:
        ScheduleError: the compensation is unknown, or a method does not work with this plan.
    """
    if compensation is None:
        return tuple(phases)
    rules, all_flush = compensations(compensation), is_synchronous(plan, phases)
    return tuple(
        replace(phase, compensation=rules)
        if phase.compensation is None and (all_flush or not build_phase(plan, phase).flushes)
        else phase
        for phase in phases
    )


def prepare(plan: Plan, phases: Sequence[Phase], policy: Policy) -> tuple[Prepared, ...]:
    """Returns the phases of a run, lowered and proved.

    Raises:
        ScheduleError: a method does not work with this plan or policy, or the placements differ.
        DeadlockError: a program would deadlock.
        PlanError: what a compensation keeps does not fit the memory.
    """
    if plan.cluster.is_limited:
        check_phases_fit(plan, [phase for phase in phases if phase.compensation], None)
    built = [policy.couple(build_phase(plan, phase)) for phase in phases]
    programs = with_common_channels([lower(schedule) for schedule in built])
    return tuple(
        Prepared(phase, schedule, program, verify(program))
        for phase, schedule, program in zip(phases, built, programs, strict=True)
    )


def build_evaluation(schedule: Schedule) -> Program:
    """Returns a method's evaluation program: forwards only, proved."""
    program = lower(schedules.evaluation(schedule.plan, schedule.placement))
    verify(program)
    return program


def check_phases_fit(plan: Plan, phases: Sequence[Phase], profile: Profile | None) -> None:
    """Checks that a plan has memory for each phase and its compensation.

    Args:
        profile: None uses the plan's bytes.

    Raises:
        PlanError: memory is short; names the phase and the stage.
    """
    for phase in phases:
        try:
            check_plan_memory(plan, build_phase(plan, phase), None if isinstance(phase.schedule, Schedule) else profile)
        except PlanError as error:
            full_phase = replace(phase, schedule=phase.schedule or plan.schedule)
            raise PlanError(f"in phase {full_phase} the plan {plan.config} does not fit: {error}") from None


def follow_moves(plan: Plan, before: Plan, phases: Sequence[Phase]) -> Plan:
    """Returns a plan with the peaks and seconds of what it keeps otherwise than `before`, in its fullest phase.

    Raises a PlanError if it does not fit.
    """
    kept, kept_before = (
        [(terms.memory, terms.sums.kept_tensors) for terms in which.costs.terms] for which in (plan, before)
    )
    moves = (plan.stages, kept) != (before.stages, kept_before)
    if not moves or not any(stage.peak_bytes for stage in before.stages):
        return plan
    moved = (count_moved_state(plan, before, build_phase(plan, phase)) for phase in phases)
    return max(moved, key=lambda plan: max(plan.worker_bytes.values()))


def choose_phase_to_plan(phases: Sequence[Phase]) -> Phase:
    """Returns the phase to plan for: the first with stale gradients, else the last. See `check_phases_fit`."""

    def flushes(phase: Phase) -> bool:
        if isinstance(phase.schedule, Schedule):
            return phase.schedule.flushes
        return schedules.properties_of(phase.schedule).flushes

    return next((phase for phase in phases if not flushes(phase)), phases[-1])


def build_phase(plan: Plan, phase: Phase) -> Schedule:
    """Returns the schedule of a phase, with its compensation. Raises a `ScheduleError` if one of them does not fit."""
    built = phase.schedule
    if not isinstance(built, Schedule):
        name, parts = resolve_method(plan, built, phase.microbatches)
        built = schedules.build(name, plan, parts)
    else:
        of_plan = replace(built.plan, tied_weights=plan.tied_weights, choices=plan.choices)
        built = built if of_plan == built.plan else replace(built, plan=of_plan)
    return built if phase.compensation is None else built.with_compensation(phase.compensation)
