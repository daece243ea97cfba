"""The parts of a stage: the engine's, and those that extensions offer (`pipedream.core.extensions`)."""

from collections.abc import Callable, Iterator, Mapping

from pipedream.core.errors import PlanError
from pipedream.core.extensions import list_offers
from pipedream.core.schedule.program import Program
from pipedream.runtime.stage.part import PassFacts, StageFacts, StagePart
from pipedream.runtime.stage.replicas import EqualReplicas
from pipedream.runtime.update.compensator import check_optimizer

_NEEDED: Mapping[str, Callable[[Program, int], object]] = {
    "delays": lambda program, stage: program.weights.predictions(stage) or program.weights.backward_rule == "graph",
    "offload": lambda program, stage: program.plan.choices.activations and program.plan.stages[stage].offload,
    "recompute": lambda program, stage: (
        program.plan.stages[stage].recompute or program.placement.runs_backward_elsewhere(stage)
    ),
}
"""Extension -> whether a stage computes something else without it, or needs more memory."""


def _list_parts() -> Iterator[type[StagePart]]:
    """Yields the kinds of parts in the order of their calls: those of extensions in the order of their names."""
    yield EqualReplicas
    for module in list_offers("parts"):
        yield from module.PARTS


def check_parts(facts: StageFacts) -> None:
    """Raises an error before a run if an extension is missing, or the optimizer or a part does not fit a method."""
    names = {module.__name__.split(".")[-2] for module in list_offers("parts")}
    for program in facts.programs:
        for name, is_needed in _NEEDED.items():
            if name not in names and is_needed(program, facts.stage):
                raise PlanError(
                    f"{program.name!r} with this plan needs the extension {name!r}, which is not here; add it, or "
                    "choose another method or plan"
                )
        for part in _list_parts():
            part.check(facts, program)
        check_optimizer(program.updates.compensation, facts.optimizer.optimizer)


def make_parts(facts: PassFacts, program: Program) -> Iterator[StagePart]:
    """Yields the parts that a stage has with a program."""
    yield from facts.module.division.make_parts(facts)
    for part in _list_parts():
        stage_part = part.make(facts, program)
        if stage_part is not None:
            yield stage_part
