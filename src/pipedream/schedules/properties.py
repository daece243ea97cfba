"""The properties of a method: as its file declares them, or read off small schedules."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace

from pipedream.core.errors import ScheduleError
from pipedream.core.plan.plan import Plan
from pipedream.core.schedule.coupling import makes_same_updates
from pipedream.core.schedule.method_text import name_and_options
from pipedream.core.schedule.occupancy import occupancy
from pipedream.core.schedule.properties import MethodProperties
from pipedream.core.schedule.schedule import Schedule
from pipedream.schedules.pytorch_csv import is_torch_csv
from pipedream.schedules.registry import build, method_of
from pipedream.schedules.runs import uniform


def properties_of(name: str) -> MethodProperties:
    """Returns the properties of a method, or of a file: declared, or derived if options differ from their defaults.

    Raises:
        ScheduleError: there is no such method, or it does not work on equal stages of 1 to 8 workers.
    """
    if not is_torch_csv(name):
        declared = method_of(name).properties
        if declared is not None and not name_and_options(name)[1]:
            return declared
    return derive_properties(name)


def derive_properties(name: str) -> MethodProperties:
    """Returns the properties that a method's schedules for two to five stages show."""
    schedule = _build_on_fewest_workers(name)
    weights = schedule.weights
    facts = MethodProperties(
        flushes=schedule.flushes,
        splits_minibatch=_can_split(name, schedule.plan),
        splits_backward=schedule.splits_backward,
        reads_stored_weights=weights.backward_rule == "stash" and weights.forward_prediction is None,
        replicates_stages=False,
        recomputes=schedule.plan.stages[0].recompute,
        same_updates=schedule.flushes or (len(schedule.plan.stages) > 1 and makes_same_updates(schedule)),
    )
    if is_torch_csv(name):
        return facts
    with suppress(ScheduleError):
        last = [occupancy(build(name, Plan.uniform(stages)))[-1].versions for stages in (3, 5)]
        facts = replace(facts, versions_grow_with_stages=last[1] > last[0])
    replicated = Plan.uniform(2, replicas=(2, 1))
    try:
        shallow, deep = (occupancy(build(name, replace(replicated, in_flight=(count, 1)))) for count in (2, 3))
    except ScheduleError:
        return facts
    same_updates = schedule.flushes or all(
        makes_same_updates(build(name, plan)) for plan in (Plan.uniform(3), replicated)
    )
    delayed = shallow
    with suppress(ScheduleError):
        delayed = occupancy(build(name, replace(replicated, update_delay=(1, 0))))
    return replace(
        facts,
        splits_minibatch=_can_split(name, replicated),
        replicates_stages=True,
        uses_depth=deep != shallow,
        delays_updates=delayed != shallow,
        same_updates=same_updates,
    )


def _build_on_fewest_workers(name: str) -> Schedule:
    if is_torch_csv(name):
        return build(name, uniform(name, None))
    for workers in range(1, 8):
        with suppress(ScheduleError):
            return build(name, uniform(name, workers))
    return build(name, uniform(name, 8))


def _can_split(name: str, plan: Plan) -> bool:
    with suppress(ScheduleError):
        return build(name, plan, 4).microbatches == 4
    return False
