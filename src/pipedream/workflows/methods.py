"""Chooses the methods that the planner compares, and estimates their memory and rate."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache
from typing import Any

from pipedream import planner, schedules, simulator
from pipedream.core.errors import PlanError, ScheduleError, ShortageError
from pipedream.core.extensions import find_offer
from pipedream.core.garbage import pause_collection
from pipedream.core.hardware.cluster import Cluster
from pipedream.core.model.profile import Profile
from pipedream.core.plan.choices import Choices
from pipedream.core.plan.plan import Plan
from pipedream.core.schedule.lowering import lower
from pipedream.core.schedule.occupancy import MethodProperties, StageOccupancy, occupancy
from pipedream.core.schedule.op import Kind, Op
from pipedream.core.schedule.schedule import Schedule
from pipedream.core.units import format_bytes
from pipedream.planner.tables.search_space import list_savings

MAX_SIMULATED = 128  # workers, or microbatches until all replicas have had a turn: more take seconds


def select_methods(names: Sequence[str] = (), *, allow_asynchronous: bool = False) -> dict[str, MethodProperties]:
    """Returns the methods to compare, by their canonical names, in the order in which ties are broken.

    By default those that flush, the newest first (1F1B before GPipe); with `allow_asynchronous` also those whose
    gradients are stale. Methods that place stages themselves, and those that split the backward, are left out. Methods
    whose backward reads other weights than its forward, or predicted ones, are compared only if named: seconds and
    bytes do not show whether a model tolerates them.

    Raises:
        ScheduleError: there is no such method, or it cannot be compared.
    """
    if names:
        return {schedules.canonical(name): _check_comparable(name) for name in names}
    methods = {
        name: method
        for name in schedules.SCHEDULES
        if name not in schedules.STAGE_ORDERS
        and (method := schedules.properties_of(name)).reads_stored_weights
        and not method.splits_backward  # of the halves a profile does not have the seconds
    }
    flushing = [name for name, method in methods.items() if method.flushes]
    delayed = [name for name, method in methods.items() if allow_asynchronous and not method.flushes]
    return {name: methods[name] for name in (*reversed(flushing), *delayed)}


_FLUSHES_TO_SETTLE = 32


@pause_collection()
def score(plan: Plan) -> planner.Score:
    """Simulates a plan under its method, without a proof, until it is periodic, and measures whole periods."""
    program = lower(schedules.build(plan.schedule, plan, plan.microbatches))
    m, cycle, per_update = program.microbatches, program.cycle, program.updates.per_update[0]
    max_in_flight = 0 if program.flushes else max(c * r for c, r in zip(plan.in_flight, plan.replicas, strict=True))
    # An input stage without weights does not wait for the others' updates: it runs ahead for several minibatches. A
    # run that repeats itself ends early.
    begin = -(-(4 * max_in_flight) // cycle) * cycle + (_FLUSHES_TO_SETTLE if program.flushes else 1) * cycle
    end = begin + max(2 * cycle, -(-(4 * max_in_flight) // cycle) * cycle)
    total = end + (0 if program.flushes else -(-2 * max_in_flight // cycle) * cycle)
    costs = simulator.costs(plan, split=m).with_compensation(program)
    seconds, updates = simulator.time_updates(program, costs, total, begin // per_update, end // per_update)
    microbatch_s = seconds / (updates * per_update)
    ops = [(rank, op) for rank, row in enumerate(program.ranks) for op in row.period if isinstance(op, Op)]
    if costs.runtime.overlap_device:  # some updates are made at the same time as the passes
        ops = [(rank, op) for rank, op in ops if op.kind is not Kind.UPDATE or not program.overlaps_update(op.stage)]
    op_s, speed = cache(costs.op_s), cache(costs.speed)
    busy_s = sum(op_s(op.kind, op.stage) / speed(rank) for rank, op in ops) / cycle
    samples = round(plan.batch * max(program.updates.per_update) / m)
    return planner.Score(m * microbatch_s, 1 - busy_s / (len(program.ranks) * microbatch_s), samples)


def takes_long(plan: Plan) -> bool:
    """Returns whether a plan has too many workers, or too long a replica cycle, to be simulated among others."""
    return max(plan.workers, plan.placement.cycle) > MAX_SIMULATED


def score_if_quick(plan: Plan) -> planner.Score:
    """Scores a plan. Raises PlanError if that would take long."""
    if takes_long(plan):
        raise PlanError(f"the replicas of {plan.config} repeat themselves too seldom to be simulated")
    return score(plan)


def occupancy_of(schedule: str, microbatches: int | None = None, compensation: Any = None) -> planner.MethodOccupancy:
    """Returns what a plan's stages hold under a method; a lower bound for a plan without the method's layout.

    Args:
        microbatches: m, raised to what the plan's replicas need; None for the method's own.
        compensation: of delay, in place of the method's own.
    """
    stage_order = schedules.stage_order_of(schedule)
    if schedules.is_schedule_file(schedule):
        rows = occupancy(schedules.load_schedule(schedule))
        minimum = StageOccupancy(1, 1, flushes=True)
        return planner.MethodOccupancy(
            lambda plan: rows if len(plan.stages) == len(rows) else (minimum,) * len(plan.stages)
        )

    def build(plan: Plan, parts: int | None = None) -> Schedule:
        built = schedules.build(schedule, plan, parts)
        return built if compensation is None else built.with_compensation(compensation)

    def find_usages(plan: Plan) -> tuple[StageOccupancy, ...]:
        for parts in () if microbatches is None else (microbatches, max(microbatches, *plan.replicas)):
            with suppress(ScheduleError):
                return occupancy(build(plan, parts))
        try:
            built = build(plan)
        except ScheduleError:
            if stage_order is None or plan.worker_order:
                raise
            return (StageOccupancy(1, 1, flushes=True),) * len(plan.stages)
        if microbatches is None:
            return occupancy(built)
        # The method does not work with so few microbatches: a stage then holds all that it admits.
        return tuple(
            replace(stage, in_flight=count) for stage, count in zip(occupancy(built), plan.in_flight, strict=True)
        )

    versions_grow = False
    with suppress(ScheduleError):
        versions_grow = schedules.properties_of(schedule).versions_grow_with_stages
    return planner.MethodOccupancy(find_usages, versions_grow)


def space_of(
    profile: Profile, cluster: Cluster, choices: Choices, schedule: str, microbatches: int, **more: Any
) -> planner.SearchSpace:
    """Returns the space of plans for a method; `more` are further arguments of `SearchSpace.of`."""
    more |= {"occupancy": occupancy_of(schedule, microbatches), "microbatches": microbatches}
    return planner.SearchSpace.of(profile, cluster, choices=choices, **more)


def _check_comparable(name: str) -> MethodProperties:
    if schedules.stage_order_of(name) is not None:
        raise ScheduleError(
            f"schedule {name!r} puts several stages on a worker, unlike the plans that are compared; plan for it alone"
        )
    properties = schedules.properties_of(name)
    if not properties.replicates_stages:
        raise ScheduleError(
            f"schedule {name!r} does not work with replicated stages, which the search compares; plan by hand, with "
            "cuts of your choice and without replicas"
        )
    return properties


def resolve_method(plan: Plan, schedule: str | None, microbatches: int | None = None) -> tuple[str, int | None]:
    """Returns the method to use and its m (`Plan.method`).

    Raises:
        ScheduleError: there is no such method, or the plan alone names a file of code (`schedules.refuse_code`).
    """
    if not schedule:
        schedules.refuse_code(plan.schedule, f"the plan {plan.config}")
    return plan.method(schedules.canonical(schedule) if schedule else None, microbatches)


def adapt_plan_to_method(
    profile: Profile, choices: Choices, schedule: str, plan: Plan, microbatches: int | None
) -> Plan:
    """Returns a plan that names its method and its m, by default the method's own."""
    built = schedules.build(schedule, plan, microbatches)
    if built.microbatches == 1:
        return replace(plan, schedule=built.name)
    if microbatches is None:
        plan = space_of(profile, plan.cluster, choices, schedule, built.microbatches).with_bytes(plan)
    # The search's seconds have an update per round of the replicas; this method updates once per minibatch.
    note = f"{plan.note}; the table assumes a full pipeline; only a simulation counts {built.name}'s own updates"
    return replace(plan, schedule=built.name, microbatches=built.microbatches, bound_s=0.0, note=note)


def check_machines(plan: Plan, built: Schedule | None = None) -> None:
    """Raises PlanError if a machine of GPUs lacks the host memory for activations, weights and optimizers.

    `built`: of a method that may keep weights there.
    """
    cluster, shares_weights = plan.cluster, built is not None and built.placement.shares_weights
    if not plan.costs.on_gpus:
        return
    starts = cluster.starts(1) if len(cluster.levels) > 1 else (0, cluster.workers)
    for machine in map(range, starts, starts[1:]):
        replicas = [(s, r) for s in range(len(plan.stages)) for r, w in enumerate(plan.workers_of(s)) if w in machine]
        versions = [built.weights.versions(s) for s, _ in replicas] if built and shares_weights else None
        gradient_sets = built.gradient_sets if built else 1
        plan.choices.check_machine([plan.stages[s] for s, _ in replicas], cluster.host_bytes, versions, gradient_sets)


def add_passes_on_copies(built: Schedule) -> Plan:
    """Returns a schedule's plan, whose stages must have their bytes, with those of passes that copy weights.

    Raises PlanError if a worker lacks the memory for them.
    """
    if not built.placement.shares_weights:
        return built.plan
    plan: Plan = find_offer("copied_passes", f"{built.name!r} shares weights between workers").add_passes(built)
    return plan


def check_worker_memory(plan: Plan, space: planner.SearchSpace | None = None) -> None:
    """Raises PlanError if all stages of a worker together do not fit its memory."""
    if (s := plan.first_stage_over_memory) is None:
        return
    worker = max(plan.workers_of(s), key=plan.worker_bytes.__getitem__)
    stages = [str(stage) for stage in range(len(plan.stages)) if worker in plan.workers_of(stage)]
    smaller = "more stages on each worker (--chunks), " if plan.stages[s].slot_bytes else ""

    def count(other: planner.SearchSpace) -> int:
        repeats = all(other.choices.recomputing)
        rows = tuple(replace(stage, recompute=stage.recompute or repeats) for stage in plan.stages)
        return other.with_bytes(replace(plan, stages=rows)).worker_bytes[worker]

    need_bytes, memory_bytes = plan.worker_bytes[worker], plan.cluster.memories[worker] or 0
    raise ShortageError(
        f"stages {', '.join(stages)} of worker {worker} need up to {format_bytes(need_bytes)} together, "
        f"it has {format_bytes(memory_bytes)}; use {smaller}recomputation, smaller microbatches, "
        "more workers or another method",
        need_bytes,
        need_bytes - memory_bytes,
        {} if space is None else list_savings(space, count, recompute="always"),
    )
