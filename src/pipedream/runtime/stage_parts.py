"""The table of the parts of a stage."""

from collections.abc import Iterator

from pipedream.core.schedule.program import Program
from pipedream.runtime.stage.copied_weights import CopiesInModules
from pipedream.runtime.stage.cpu_optimizer import CpuOptimizerWeights
from pipedream.runtime.stage.part import PassFacts, StageFacts, StagePart
from pipedream.runtime.stage.predictions import WeightPredictions
from pipedream.runtime.stage.recompute import Recomputation
from pipedream.runtime.stage.replicas import EqualReplicas
from pipedream.runtime.stage.saved_tensors import SavedTensorHooks

PARTS: tuple[type[StagePart], ...] = (
    CpuOptimizerWeights,
    EqualReplicas,
    SavedTensorHooks,
    Recomputation,
    CopiesInModules,
    WeightPredictions,
)
"""In the order in which they are called."""


def check_parts(facts: StageFacts) -> None:
    """Raises a `ScheduleError` before a run if the optimizer of a stage, or one of its parts, does not fit a method."""
    for program in facts.programs:
        for part in PARTS:
            part.check(facts, program)
        facts.optimizer.check(program.updates)


def make_parts(facts: PassFacts, program: Program) -> Iterator[StagePart]:
    """Yields the parts that a stage has with a program."""
    yield from facts.module.division.make_parts(facts)
    for part in PARTS:
        stage_part = part.make(facts, program)
        if stage_part is not None:
            yield stage_part
