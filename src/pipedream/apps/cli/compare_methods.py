"""Compares methods on equal stages, side by side."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace

from pipedream import metrics, schedules
from pipedream.apps.report.method_comparison import MethodComparison, MethodFigures
from pipedream.core.errors import ScheduleError
from pipedream.core.plan.placement import Carries
from pipedream.core.plan.plan import Plan
from pipedream.core.schedule.lowering import lower
from pipedream.core.schedule.moves import SEND, Transfer
from pipedream.core.schedule.timeline import Timeline

_WORKER_BYTES = 1_000_000
_DEFAULT_MICROBATCHES = 16


def share_model(plan: Plan) -> Plan:
    """Returns equal stages of one model, of the same total size however many stages a worker has.

    A worker has 1 MB of weights, and 1 MB of activations for each microbatch. A message has 1 MB if it takes time.
    """
    share = plan.workers / len(plan.stages)
    size = round(_WORKER_BYTES * share)
    level = plan.cluster.levels[0]
    takes_time = level.bandwidth_bytes_per_s < Plan.uniform(1).cluster.levels[0].bandwidth_bytes_per_s
    stages = (
        replace(
            stage,
            forward_s=stage.forward_s * share,
            backward_s=stage.backward_s * share,
            output_bytes=_WORKER_BYTES if takes_time else 0,
            activation_bytes=size,
            parameter_bytes=size,
        )
        for stage in plan.stages
    )
    level = replace(level, bandwidth_bytes_per_s=level.bandwidth_bytes_per_s * _WORKER_BYTES)
    return replace(plan, stages=tuple(stages), cluster=replace(plan.cluster, levels=(level,)))


def compare_methods(
    names: Sequence[str],
    make_plan: Callable[[str], Plan],
    microbatches: int | None,
    minibatches: int | None,
    simulate_run: Callable[..., Timeline],
) -> MethodComparison:
    """Simulates methods on equal stages, side by side; a method that does not work on them gets no figures.

    Args:
        make_plan: name -> its plan, for one model (`share_model`).
        microbatches: m; a method that does not split a minibatch runs this many minibatches.
        minibatches: for methods that split them.

    Raises:
        ScheduleError: there is no such method.
    """
    figures, workers = [], 0
    for name in names:
        method = schedules.canonical(name)
        try:
            plan = make_plan(method)
            run = _make_comparable_run(method, plan, microbatches, minibatches)
            timeline = simulate_run(plan, schedule=run.schedule, minibatches=run.minibatches)
        except ScheduleError as error:
            figures.append(MethodFigures(name, why=str(error).split(";")[0]))
            continue
        workers = plan.workers
        figures.append(_measure_method(run, timeline))
    return MethodComparison(workers, tuple(figures))


def _make_comparable_run(name: str, plan: Plan, microbatches: int | None, minibatches: int | None) -> schedules.Run:
    """Returns a run with the given number of microbatches, if the method allows it."""
    parts = microbatches or (_DEFAULT_MICROBATCHES if minibatches else None)
    if schedules.build(name, plan).updates.mean_of_rounds:
        return schedules.run_of(name, plan, minibatches=parts and parts * (minibatches or 1))
    if microbatches is None:
        with suppress(ScheduleError):
            return schedules.run_of(name, plan, parts, minibatches)
    return schedules.run_of(name, plan, microbatches, minibatches)


def _measure_method(run: schedules.Run, timeline: Timeline) -> MethodFigures:
    plan, figures = run.schedule.plan, metrics.run_metrics(timeline)
    units = [schedules.first_stage_units(plan, row.peak_in_flight, row.peak_versions or 0) for row in figures.per_rank]
    program = lower(run.schedule)
    sends = sum(
        isinstance(step, Transfer) and step.kind is SEND and program.channels[step.channel].carries is not Carries.INPUT
        for rank in range(plan.workers)
        for step in program.instructions(rank, run.microbatches)
    )
    return MethodFigures(
        schedule=run.schedule.name,
        microbatches=run.microbatches,
        makespan_s=figures.makespan_s,
        bubble=figures.bubble,
        activations=max(activations for activations, _ in units),
        weights=max(weights for _, weights in units),
        messages=sends / run.microbatches,
        staleness=max((row.staleness for row in figures.per_rank if row.staleness is not None), default=None),
    )
