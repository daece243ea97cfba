"""The parts of a stage: the engine's, and those that extensions offer (`pipedream.core.extensions`)."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from pipedream.core.errors import PlanError
from pipedream.core.extensions import find_offer, list_offers
from pipedream.core.schedule.op import Kind
from pipedream.core.schedule.program import Program
from pipedream.runtime.comm.message import Message
from pipedream.runtime.stage.part import PassFacts, StageFacts, StagePart, Task
from pipedream.runtime.stage.replicas import EqualReplicas
from pipedream.runtime.update.compensator import check_optimizer

_NEEDS: Mapping[Task, Callable[[Program, int], object]] = {
    Task.PREDICT: lambda program, stage: program.weights.predictions(stage),
    Task.USE_NEWER: lambda program, stage: program.weights.backward_rule == "graph",
    Task.OFFLOAD: lambda program, stage: program.plan.stages[stage].offload,
    Task.REPEAT: lambda program, stage: (
        program.plan.stages[stage].recompute or program.placement.runs_backward_elsewhere(stage)
    ),
}


def _list_parts() -> Iterator[type[StagePart]]:
    """Yields the kinds of parts in the order of their calls: those of extensions in the order of their names."""
    yield EqualReplicas
    for module in list_offers("parts"):
        yield from module.PARTS


def check_parts(facts: StageFacts) -> None:
    """Raises an error before a run if an extension is missing, or the optimizer or a part does not fit a method."""
    tasks = {part.task for part in _list_parts()}
    for program in facts.programs:
        for task, is_needed in _NEEDS.items():
            if task not in tasks and is_needed(program, facts.stage):
                raise PlanError(
                    f"{program.name!r} with this plan {task}, for which no extension here has a part; add one that "
                    "does, or choose another method or plan"
                )
        find_split(program)
        for part in _list_parts():
            part.check(facts, program)
        check_optimizer(program.updates.compensation, facts.optimizer.optimizer)


def explain_difference(program: Program, inputs: Sequence[Message]) -> str:
    """Returns a part's reason; see `StagePart.explain_difference`."""
    return next(filter(None, (part.explain_difference(program, inputs) for part in _list_parts())), "")


def find_split(program: Program) -> Any:
    """Returns what runs the halves of backwards; None if a program splits none."""
    return find_offer("split", "the method splits backwards") if Kind.INPUT_GRADIENT in program.kinds else None


def make_parts(facts: PassFacts, program: Program) -> Iterator[StagePart]:
    """Yields the parts that a stage has with a program."""
    yield from facts.module.division.make_parts(facts)
    for part in _list_parts():
        stage_part = part.make(facts, program)
        if stage_part is not None:
            yield stage_part
