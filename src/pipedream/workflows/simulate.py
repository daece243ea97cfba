"""Predicts what runs when, from a plan and a method."""

from collections.abc import Mapping

from pipedream import schedules, simulator as clock
from pipedream.core.errors import PlanError
from pipedream.core.plan.plan import Plan
from pipedream.core.schedule.lowering import lower
from pipedream.core.schedule.program import Program
from pipedream.core.schedule.schedule import Schedule
from pipedream.core.schedule.timeline import Timeline
from pipedream.verifier import verify
from pipedream.workflows.methods import resolve_method


def simulate(
    plan: Plan,
    *,
    schedule: str | Schedule | None = None,
    microbatches: int | None = None,
    minibatches: int | None = None,
    weight_s: float | None = None,
    jitter: float | Mapping[str, float] = 0.0,
    slow: Mapping[int, float] | None = None,
    seed: int = 0,
    overlap: bool = True,
) -> Timeline:
    """Predicts what runs when, from an empty pipeline to an empty one.

    Args:
        schedule: a method's name, a CSV file in PyTorch's notation, or a schedule; by default the plan's, or PipeDream.
        microbatches: m, the microbatches of a minibatch; by default the plan's.
        minibatches: the length of the run; see `schedules.run_of` for the default.
        weight_s: seconds of the weight gradient, where the backward is split.
        jitter: coefficient of variation of an op's lognormal seconds, for all ops or for each kind: {"F": 0.1, "B":
            0.2}.
        slow: rank -> factor on the seconds of its ops.
        seed: of the jitter.
        overlap: all-reduces start during the backward, bucket by bucket, as in the runtime; otherwise they are charged
            before their update.

    Raises:
        ScheduleError: the method does not work with this plan, or with this number of microbatches.
        PlanError: a negative jitter, a factor that is not positive, or a slow rank that does not exist.
    """
    Plan.check_is(plan)
    name, split = (schedule, None) if isinstance(schedule, Schedule) else resolve_method(plan, schedule)
    run = schedules.run_of(name, plan, microbatches, minibatches, split=split)
    try:
        stragglers = clock.Stragglers(jitter, slow or {}, seed)
        stragglers.check_ranks(run.schedule.placement.workers)
    except ValueError as error:
        raise PlanError(str(error)) from None
    program = lower(run.schedule)
    verify(program)
    return simulate_program(program, run.microbatches, weight_s=weight_s, stragglers=stragglers, overlap=overlap)


def simulate_program(
    program: Program,
    total: int,
    *,
    weight_s: float | None = None,
    stragglers: clock.Stragglers | None = None,
    overlap: bool = True,
    in_turns: bool = False,
) -> Timeline:
    """Predicts a run of `total` microbatches of a program; see `simulate`.

    `in_turns`: all ranks share a thread, as in a single process.
    """
    try:
        seconds = clock.costs(program.plan, split=program.microbatches, weight_s=weight_s, overlap=overlap)
    except ValueError as error:
        raise PlanError(f"the seconds of the ops are not valid: {error}") from None
    return clock.simulate(program, seconds, total, stragglers, in_turns=in_turns)
