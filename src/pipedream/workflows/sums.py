"""Checks that the replicas of a plan can agree as it says, for a model and its options."""

from __future__ import annotations

from typing import Any

from pipedream.core.errors import PlanError
from pipedream.core.model.graph import LayerGraph
from pipedream.core.plan.plan import Plan
from pipedream.core.plan.sums import greatest_rank
from pipedream.runtime.checkpoint.parameters import select_trained, stage_names


def check_matrices(plan: Plan, model: Any, graph: LayerGraph) -> None:
    """Raises a `PlanError` if the plan's method of sums compresses nothing, or part of a matrix."""
    method = plan.sum_method
    if not method.is_low_rank:
        return
    stages = [stage for stage in plan.stages if stage.replicas > 1]
    if any(stage.mesh for stage in stages):
        raise PlanError(
            f"sums={plan.sums!r} was asked for, but ranks of a mesh have parts of a matrix, whose factors are others "
            "than those of the whole; use sums='bfloat16', or replicas without a mesh"
        )
    names = [name for stage in stages for name in stage_names(graph, stage.first, stage.last)]
    shapes = [tuple(parameter.shape) for parameter in select_trained(model, names).values()]
    if not any(map(method.compresses, shapes)):
        largest = max(shapes, key=greatest_rank, default=())
        rank = greatest_rank(largest)
        advice = f"the largest, of shape {largest}, for rank {rank} or less; choose such a rank" if rank else "none"
        raise PlanError(
            f"sums={plan.sums!r} was asked for, but no weight of the stages with replicas is a matrix of which it would "
            f"send half of the numbers or fewer ({advice}); otherwise use sums='bfloat16'"
        )
