"""Checks that a plan's method of sums works for a model, a method and its options."""

from collections.abc import Sequence
from typing import Any

from pipedream.core.errors import PlanError, ScheduleError
from pipedream.core.model.graph import LayerGraph
from pipedream.core.plan.plan import Plan
from pipedream.core.plan.sums import greatest_rank
from pipedream.core.schedule.compensation import ErrorFeedback, OfVelocity
from pipedream.core.schedule.coupling import Policy
from pipedream.core.schedule.program import Program
from pipedream.runtime.checkpoint.parameters import list_stage_names, select_trained


def check_sums(plan: Plan, model: Any, graph: LayerGraph, programs: Sequence[Program], policy: Policy) -> None:
    """Raises a `PlanError` or a `ScheduleError` if the plan's method of sums does not work."""
    sums = plan.choices.sums
    if sums.is_low_rank:
        _check_matrices(plan, model, graph)
    if sums.averages_weights:
        _check_policy(plan, policy)
        for program in programs:
            _check_updates(program)


def _check_matrices(plan: Plan, model: Any, graph: LayerGraph) -> None:
    sums, stages = plan.choices.sums, [stage for stage in plan.stages if stage.replicas > 1]
    if any(stage.mesh for stage in stages):
        raise PlanError(
            f"sums={sums!r} was asked for, but ranks of a mesh have parts of a matrix, whose factors are not "
            "those of the whole; use sums='bfloat16', or replicas without a mesh"
        )
    names = [name for stage in stages for name in list_stage_names(graph, stage.first, stage.last)]
    shapes = [tuple(parameter.shape) for parameter in select_trained(model, names).values()]
    if not any(map(sums.compresses, shapes)):
        largest = max(shapes, key=greatest_rank, default=())
        rank = greatest_rank(largest)
        hint = f"the largest, of shape {largest}, allows a rank up to {rank}" if rank else "there is none"
        raise PlanError(
            f"sums={sums!r} was asked for, but no weight of the stages with replicas is a matrix of which it "
            f"would send less than half of the numbers ({hint}); choose a smaller rank, or sums='bfloat16'"
        )


def _check_policy(plan: Plan, policy: Policy) -> None:
    sums = plan.choices.sums
    if policy.clip_grad_norm is not None and policy.clip != "local" and len(plan.stages) > 1:
        raise ScheduleError(
            f"clip_grad_norm with clip={policy.clip!r} was asked for with sums={sums!r}: each replica of a stage "
            "has gradients of its own, so there is no norm over all stages. Use clip='local' (each replica of each "
            "stage by its own norm)"
        )
    for tied in plan.tied_weights:
        if any(plan.replicas[stage] > 1 for stage in tied.stages):
            raise PlanError(
                f"sums={sums!r} was asked for, but the stages share {tied}, whose gradients all holders sum at "
                "each update, while replicas update by themselves; keep its layers in one stage, or use sums='bfloat16'"
            )


def _check_updates(program: Program) -> None:
    sums, replicas = program.plan.choices.sums, program.placement.replicas
    for stage in (stage for stage, count in enumerate(replicas) if count > 1):
        predicts = bool(program.weights.predictions(stage))
        rules = [c for c in program.updates.compensation if isinstance(c, OfVelocity | ErrorFeedback)]
        if predicts or rules:
            cause = f"the compensation {rules[0]} moves" if rules else f"{program.name!r} predicts"
            raise ScheduleError(
                f"sums={sums!r} was asked for, but {cause} weights by what one replica's updates have done, which an "
                "average with other replicas changes; leave it out, or use sums='bfloat16' or 'powersgd:RANK'"
            )
