"""What planning must know of the methods, read off their own schedules and programs: what they hold, how fast they are.

A new method in the registry needs no line here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from pipedream import metrics, planner, schedules
from pipedream import simulator as clock
from pipedream.core.errors import PipelineError, PlanError, ScheduleError
from pipedream.core.hardware.cluster import Cluster
from pipedream.core.model.profile import Profile
from pipedream.core.plan.plan import Plan
from pipedream.core.schedule.lowering import lower
from pipedream.core.schedule.occupancy import StageOccupancy, occupancy
from pipedream.core.schedule.schedule import Schedule
from pipedream.core.units import format_bytes

__all__ = [
    "asked_of",
    "for_method",
    "methods_of",
    "occupancy_of",
    "plan_of_file",
    "refuse_overfull",
    "refuse_visitors",
    "score",
    "simulated_period_s",
    "versions_of",
]

_MOST_SIMULATED = 128  # workers, or microbatches until replicas come round: more take seconds


def methods_of(names: Sequence[str] = (), *, allow_asynchronous: bool = False) -> list[planner.PlannerMethod]:
    """Returns the methods of these names, or all of the registry: those that flush, and, if allowed, the others.

    Those whose backward reads other weights than its forward, or weights that are predicted, are taken by name alone:
    whether a model and its optimizer bear that is not a matter of seconds and bytes.

    Of ways to train that are equal the first method's is taken: 1F1B before GPipe, what is late last.

    Raises:
        ScheduleError: no such method.
    """
    if names:
        return [_method(name) for name in names]
    # Plans have one stage a worker, but for those that are made by hand.
    found = [_method(name) for name in schedules.SCHEDULES if name not in schedules.LAYOUTS and _is_stored(name)]
    found = [method for method in found if not method.splits_backward]  # a profile does not tell their seconds
    flushing = [method for method in found if method.flushes]
    return [*reversed(flushing), *(method for method in found if allow_asynchronous and not method.flushes)]


def score(plan: Plan) -> planner.Score:
    """Simulates a plan by its method, without a proof, until it repeats itself, and measures whole periods.

    Raises:
        ScheduleError: the method does not work with it.
    """
    program = lower(schedules.build(plan.schedule, plan, plan.microbatches))
    m, cycle, per_update = program.microbatches, program.cycle, program.updates.per_update[0]
    admitted = 0 if program.flushes else max(c * r for c, r in zip(plan.in_flight, plan.replicas, strict=True))
    settled = -(-(4 * admitted) // cycle) * cycle + cycle
    end = settled + max(2 * cycle, -(-(4 * admitted) // cycle) * cycle)
    total = end + (0 if program.flushes else -(-2 * admitted // cycle) * cycle)
    timeline = clock.simulate(program, clock.costs(plan, split=m), total)
    found = metrics.between_updates(timeline, settled // per_update, end // per_update, per_update=per_update)
    return planner.Score(m / found.throughput_per_s, found.bubble)


def simulated_period_s(plan: Plan) -> float | None:
    """Returns the seconds per minibatch that a plan's own method comes to; None where simulating it takes long."""
    if max(plan.workers, plan.placement.cycle) > _MOST_SIMULATED:
        return None
    with suppress(PipelineError):
        return score(plan).period_s
    return None


def occupancy_of(schedule: str, microbatches: int | None = None, compensation: Any = None) -> planner.PlanOccupancy:
    """Returns a method's rule from a plan to what each of its stages holds, read off the method's own schedule.

    Args:
        schedule: the method's name.
        microbatches: m; a plan with more replicas than m is taken with as many as it needs. None: the method's own.
        compensation: of delay, in the place of the method's own; see `Schedule.compensated`.

    A file in PyTorch's notation holds what it holds on its own stages alone, and a method whose workers have several
    what it holds where they are laid out; of other plans they tell the least.

    Raises:
        ScheduleError: no such method.
    """
    layout = schedules.layout_of(schedule)
    if schedules.is_torch_csv(schedule):
        rows = occupancy(schedules.load_torch_csv(schedule))
        return lambda plan: rows if len(plan.stages) == len(rows) else (StageOccupancy(1, 1),) * len(plan.stages)

    def build(plan: Plan, parts: int | None = None) -> Schedule:
        built = schedules.build(schedule, plan, parts)
        return built if compensation is None else built.compensated(compensation)

    def holds(plan: Plan) -> tuple[StageOccupancy, ...]:
        for parts in () if microbatches is None else (microbatches, max(microbatches, *plan.replicas)):
            with suppress(ScheduleError):
                return occupancy(build(plan, parts))
        try:
            built = build(plan)
        except ScheduleError:
            if layout is None or plan.order:
                raise
            return (StageOccupancy(1, 1),) * len(plan.stages)
        if microbatches is None:
            return occupancy(built)
        # It does not work with so few: then all that is admitted.
        return tuple(replace(one, in_flight=count) for one, count in zip(occupancy(built), plan.in_flight, strict=True))

    return holds


def versions_of(schedule: str) -> Callable[[int, int], int]:
    """Returns a method's rule from a stage's in-flight count and its update delay to its versions of the weights, read
    off the method's own weight rule on a small plan.

    Raises:
        ScheduleError: no such method.
    """

    def versions(in_flight: int, update_delay: int) -> int:
        small = Plan.uniform(in_flight)
        if update_delay:
            small = replace(Plan.uniform(2, replicas=(2, 1)), in_flight=(in_flight, 1), update_delay=(update_delay, 0))
        return occupancy(schedules.build(schedule, small))[0].versions

    versions(1, 0)
    return versions


def _is_stored(name: str) -> bool:
    """Whether each gradient is the true one at weights that its stage has had."""
    weights = schedules.build(name, Plan.uniform(2)).weights
    return weights.backward_rule == "stash" and weights.forward_prediction is None


def _method(name: str) -> planner.PlannerMethod:
    """Returns what planning must know of a method, as small plans show it."""
    if schedules.layout_of(name) is not None:
        raise ScheduleError(
            f"schedule {name!r} puts several stages on a worker, unlike plans that are compared; plan for it alone"
        )
    small = Plan.uniform(2, replicas=(2, 1))
    try:
        built, deep = (schedules.build(name, replace(small, in_flight=(count, 1))) for count in (2, 3))
    except ScheduleError:
        raise ScheduleError(
            f"schedule {name!r} does not work with replicated stages, among which the search looks; make a plan by "
            "hand: stages of your choice, without replicas"
        ) from None
    try:
        splits = schedules.build(name, small, 4).microbatches == 4
    except ScheduleError:
        splits = False
    try:
        delays_updates = occupancy(schedules.build(name, replace(small, update_delay=(1, 0)))) != occupancy(built)
    except ScheduleError:
        delays_updates = False
    return planner.PlannerMethod(
        name=built.name,
        flushes=built.flushes,
        splits=splits,
        delays_updates=delays_updates,
        deepens=occupancy(deep) != occupancy(built),
        holds=lambda microbatches: occupancy_of(name, microbatches),
        splits_backward=built.splits_backward,
    )


def asked_of(plan: Plan, schedule: str | None, microbatches: int | None = None) -> tuple[str, int | None]:
    """Returns the method to use and its split, see `Plan.method`; what names the plan's own otherwise is that one.

    Raises:
        ScheduleError: no such method.
    """
    return plan.method(schedules.canonical(schedule) if schedule else None, microbatches)


def for_method(plan: Plan, profile: Profile, schedule: str, microbatches: int | None) -> Plan:
    """Returns a plan that names its method and its split, the method's own one where none is given.

    Raises:
        ScheduleError: the method does not work with this plan, or with so many microbatches.
    """
    built = schedules.build(schedule, plan, microbatches)
    if built.microbatches == 1:
        return replace(plan, schedule=built.name)
    if microbatches is None:
        space = planner.Space.of(
            profile, plan.cluster, holds=occupancy_of(schedule, built.microbatches), microbatches=built.microbatches
        )
        plan = space.with_bytes(plan)
    # The search's seconds have an update each round of the replicas; these update once a minibatch.
    note = f"{plan.note}; by its fullest pipeline, without {built.name}'s own updates, see schedule auto"
    return replace(plan, schedule=built.name, microbatches=built.microbatches, bound_s=0.0, note=note)


def plan_of_file(
    profile: Profile,
    cluster: Cluster,
    name: str,
    microbatches: int | None = None,
    cuts: tuple[int | str, ...] | None = None,
    *,
    depth: str | tuple[int, ...] = "noam",
    recompute: str = "never",
) -> Plan:
    """Returns a plan with the stages of a file in PyTorch's notation, on the workers that the file gives them.

    They are cut so that the slowest stage is as fast as it can be, as those of a straight pipeline are. Where a worker
    runs several, that is no search for the fastest worker, and the sum of what its stages need, which is never less
    than what it needs, must fit its memory.

    Args:
        name: of the file.
        microbatches: if given, as many as the file has.
        cuts: by hand, see `pipedream.planner.by_hand`.
        depth: of the plan, by which receives are posted ahead; the order is the file's.
        recompute: see `pipedream.plan`.

    Raises:
        ScheduleError: the file is none, or has another number of microbatches.
        PlanError: the cluster has another number of workers, or nothing fits.
    """
    read = schedules.load_torch_csv(name)
    read = schedules.build(name, read.plan, microbatches)
    stages, workers = len(read.plan.stages), read.plan.workers
    if cluster.workers != workers:
        raise PlanError(
            f"schedule {name!r} has {workers} ranks, and a plan for {cluster.workers} workers was asked for; ask for "
            f"{workers}"
        )
    parts = read.microbatches
    line = Cluster.flat(stages, cluster.bandwidth_bytes_per_s) if read.plan.order else cluster
    rule = occupancy_of(name)
    if cuts is None:
        found = planner.plan(
            profile, line, holds=rule, microbatches=parts, depth=depth, shape="straight", recompute=recompute
        )
    else:
        found = planner.by_hand(profile, line, cuts, holds=rule, microbatches=parts, depth=depth, recompute=recompute)
    if len(found.stages) != stages:
        raise PlanError(
            f"schedule {name!r} has {stages} stages, the cuts make {len(found.stages)}; give one cut between each two"
        )
    if read.plan.order:
        found = replace(found, cluster=cluster, order=read.plan.order, bound_s=0.0, note="cut as a straight pipeline")
        refuse_overfull(found)
    return for_method(found, profile, name, parts)


def refuse_overfull(plan: Plan) -> None:
    """Checks that what all stages of a worker hold together fits its memory.

    Raises:
        PlanError: it does not.
    """
    if (s := plan.overfull) is None:
        return
    worker = max(plan.workers_of(s), key=plan.worker_bytes.__getitem__)
    held = [str(stage) for stage in range(len(plan.stages)) if worker in plan.workers_of(stage)]
    raise PlanError(
        f"stages {', '.join(held)} of worker {worker} need up to {format_bytes(plan.worker_bytes[worker])} together, "
        f"it has {format_bytes(plan.cluster.memories[worker] or 0)}; use recomputation, smaller microbatches, more "
        "workers or another method"
    )


def refuse_visitors(built: Schedule) -> None:
    """Checks that what a minibatch holds on a worker fits its memory, stages that visit it included.

    Args:
        built: for a plan whose stages have their bytes.

    Raises:
        PlanError: it does not.
    """
    plan, m, memories = built.plan, built.microbatches, built.plan.cluster.memories
    if not any(built.placement.visits(rank) for rank in range(plan.workers)):
        return
    peaks = clock.simulate(lower(built), clock.costs(plan, split=m), m).peak_bytes
    for rank, (worker, peak) in enumerate(zip(sorted(set(plan.order)), peaks, strict=True)):
        limit = memories[worker]
        if limit is not None and peak > limit:
            visiting = ", ".join(str(stage) for stage, _ in built.placement.visits(rank))
            raise PlanError(
                f"worker {worker} needs up to {format_bytes(peak)} with its own stages and the forwards of stages "
                f"{visiting}, whose weights it fetches, and has {format_bytes(limit)}; use smaller microbatches, more "
                "workers or another method"
            )
