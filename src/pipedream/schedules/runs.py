"""Runs of a method: plans for it, the length of a run, its claims and its properties."""

from contextlib import suppress
from dataclasses import dataclass, replace

from pipedream.core.errors import ScheduleError
from pipedream.core.plan.plan import Plan
from pipedream.core.schedule.method_text import name_and_options
from pipedream.core.schedule.occupancy import MethodProperties, occupancy
from pipedream.core.schedule.schedule import Schedule
from pipedream.schedules.files import is_schedule_file, load_schedule
from pipedream.schedules.kit.idioms import max_in_flight
from pipedream.schedules.registry import build, check_chunks, method_of, stage_order_of

_DEFAULT_WORKERS = 4
_LONGEST = 1_000_000
"""Microbatches of a run that is simulated or drawn; so many take minutes."""


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
        workers: None for those of a CSV file, or 4.
        forward_s, backward_s: seconds of one microbatch at one stage.
        chunks: stages per worker, for methods that leave this choice.

    Raises:
        ScheduleError: there is no such method, the file is for other workers, or `chunks` cannot be chosen.
    """
    check_chunks(name, chunks)
    if is_schedule_file(name):
        file_plan = load_schedule(name).plan
        if workers not in (None, file_plan.workers):
            raise ScheduleError(f"schedule {name!r} is for {file_plan.workers} workers, and {workers} were asked for")
        return Plan.uniform(len(file_plan.stages), forward_s, backward_s, transfer_s, order=file_plan.worker_order)
    workers, stage_order = workers or _DEFAULT_WORKERS, stage_order_of(name)
    if stage_order is None:
        return Plan.uniform(workers, forward_s, backward_s, transfer_s)
    order, stages = stage_order.order(workers, chunks or stage_order.chunks or 1), stage_order.stages(workers, chunks)
    replicas = (stage_order.replicas,) * stages
    return Plan.uniform(stages, forward_s, backward_s, transfer_s, replicas=replicas, order=order)


def first_stage_units(plan: Plan, in_flight: int, versions: int) -> tuple[float, float]:
    """Returns a worker's activations and weights in units of those of 1F1B's first stage, for equal stages.

    That stage holds one microbatch in flight per worker, and one set of weights, of a worker's share of the model.

    Args:
        in_flight, versions: those of the worker, over its stages.
    """
    stages = len(plan.stages)
    return in_flight / stages, versions * plan.workers / stages


def claims_at(schedule: Schedule, stages: int, run: int) -> dict[str, object]:
    """Returns a method's claims for p = `stages` workers as JSON values: for one minibatch if it flushes, else for the
    run. Activations and weights are in units of 1F1B's first stage (`first_stage_units`).
    """
    claims, m = schedule.claims, schedule.microbatches
    counted_microbatches = m if schedule.flushes else run
    lists = {
        name: claim and [claim(stages, counted_microbatches, s) for s in range(stages)]
        for name in ("in_flight", "staleness", "versions")
        for claim in [getattr(claims, name)]
    }
    activations, weights = (
        None if counts is None else [first_stage_units(schedule.plan, count, count)[kind] for count in counts]
        for kind, counts in enumerate((lists["in_flight"], lists["versions"]))
    )
    return {
        "flushes": schedule.flushes,
        "microbatches": m,
        "assumption": claims.assumption,
        "bubble": claims.bubble(stages, m) if claims.bubble is not None and m >= claims.least(stages) else None,
        **lists,
        "activations": activations,
        "weights": weights,
    }


@dataclass(frozen=True)
class Run:
    """A schedule, and its minibatches from an empty pipeline to an empty one."""

    schedule: Schedule
    minibatches: int

    @property
    def microbatches(self) -> int:
        return self.minibatches * self.schedule.microbatches

    def __str__(self) -> str:
        count, m = self.minibatches, self.schedule.microbatches
        text = f"a run of {count} minibatch{'es' if count > 1 else ''}"
        return text if self.schedule.updates.mean_of_rounds else f"{text} of m = {m} microbatch{'es' if m > 1 else ''}"


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
        ScheduleError: the method does not work with the plan or with m, or the run is too long.
    """
    if (count := (microbatches or split or 1) * (minibatches or 1)) > _LONGEST:
        raise ScheduleError(
            f"a run of {count:,} microbatches was asked for; at most {_LONGEST:,} can be simulated or drawn; give fewer"
        )
    built = _build(schedule, plan, microbatches, split, usual) if isinstance(schedule, str) else schedule
    if microbatches not in (None, built.microbatches):
        if built.updates.mean_of_rounds:
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
    if is_schedule_file(name):
        return build(name, plan, microbatches or split)
    if microbatches is not None:
        try:
            return build(name, plan, microbatches)
        except ScheduleError:
            built = build(name, plan)
            if not built.updates.mean_of_rounds:
                raise
            return built
    built = build(name, plan, split)
    if split is None and built.flushes:
        with suppress(ScheduleError):
            return build(name, plan, usual)
    return built


def _choose_length(schedule: Schedule, usual: int) -> int:
    if schedule.flushes:
        return 1
    m, in_flight = schedule.microbatches, max_in_flight(schedule.plan)
    return max(-(-usual // m), -(-in_flight // m) + 1)


def properties_of(name: str) -> MethodProperties:
    """Returns the properties of a method, or of a file: declared, or derived if options differ from their defaults.

    Raises:
        ScheduleError: there is no such method, or it does not work on equal stages of 1 to 8 workers.
    """
    if not is_schedule_file(name):
        declared = method_of(name).properties
        if declared is not None and not name_and_options(name)[1]:
            return declared
    return derive_properties(name)


def derive_properties(name: str) -> MethodProperties:
    """Derives the properties of a method from its schedules for two to five stages."""
    schedule = _build_on_fewest_workers(name)
    weights = schedule.weights
    properties = MethodProperties(
        flushes=schedule.flushes,
        splits_minibatch=_can_split(name, schedule.plan),
        splits_backward=schedule.splits_backward,
        reads_stored_weights=weights.backward_rule == "stash" and weights.forward_prediction is None,
        replicates_stages=False,
        recomputes=schedule.plan.stages[0].recompute,
        same_updates=schedule.flushes or (len(schedule.plan.stages) > 1 and schedule.makes_same_updates),
    )
    if is_schedule_file(name):
        return properties
    with suppress(ScheduleError):
        last_versions = [occupancy(build(name, Plan.uniform(stages)))[-1].versions for stages in (3, 5)]
        properties = replace(properties, versions_grow_with_stages=last_versions[1] > last_versions[0])
    replicated = Plan.uniform(2, replicas=(2, 1))
    try:
        at_depth_2, at_depth_3 = (occupancy(build(name, replace(replicated, in_flight=(count, 1)))) for count in (2, 3))
    except ScheduleError:
        return properties
    same_updates = schedule.flushes or all(
        build(name, plan).makes_same_updates for plan in (Plan.uniform(3), replicated)
    )
    with_delay = at_depth_2
    with suppress(ScheduleError):
        with_delay = occupancy(build(name, replace(replicated, update_delay=(1, 0))))
    return replace(
        properties,
        splits_minibatch=_can_split(name, replicated),
        replicates_stages=True,
        uses_depth=at_depth_3 != at_depth_2,
        delays_updates=with_delay != at_depth_2,
        same_updates=same_updates,
    )


def _build_on_fewest_workers(name: str) -> Schedule:
    if is_schedule_file(name):
        return build(name, uniform(name, None))
    for workers in range(1, 8):
        with suppress(ScheduleError):
            return build(name, uniform(name, workers))
    return build(name, uniform(name, 8))


def _can_split(name: str, plan: Plan) -> bool:
    with suppress(ScheduleError):
        return build(name, plan, 4).microbatches == 4
    return False
