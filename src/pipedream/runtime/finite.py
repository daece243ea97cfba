"""Trained weights that are not finite at a drain."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from pipedream.core.errors import WorkerError
from pipedream.core.schedule.program import Program
from pipedream.runtime.results.results import NOT_FINITE_ADVICE
from pipedream.runtime.stage_state import StageState


def find_not_finite(stage_states: Mapping[int, StageState]) -> dict[str, int]:
    """Returns each trained weight that is not finite, with its stage."""
    return {
        name: stage
        for stage, stage_state in stage_states.items()
        for name, handle in stage_state.versions.handles.items()
        if not _is_finite(handle.detach())
    }


def check_finite(
    stage_states: Mapping[int, StageState], not_finite: Mapping[str, int], program: Program, last: int, process: int
) -> None:
    """Raises the error of a weight that no loss has shown: no forward after minibatch `last` has read it.

    Args:
        not_finite: weights that were not finite before.
    """
    newly = [(name, stage) for name, stage in find_not_finite(stage_states).items() if name not in not_finite]
    if not newly:
        return
    name, stage = newly[0]
    minibatches = f"minibatch {last}"
    if any(program.weights.mean_staleness(s) for s in range(program.placement.stages)):
        unread = -(-max(program.plan.in_flight) // program.microbatches) + 1  # the weights after so many, at most
        minibatches = f"one of the minibatches {max(0, last + 1 - unread)} to {last}"
    raise WorkerError(
        process,
        f"stage {stage}, the updates after minibatch {last}",
        f"the weight {name!r} is not finite, because a gradient of {minibatches} was not",
        NOT_FINITE_ADVICE,
    )


def _is_finite(weight: torch.Tensor) -> bool:
    """Tries the sum first, which takes a twentieth of the time; a sum of finite numbers may overflow."""
    return bool(weight.sum().isfinite()) or bool(weight.isfinite().all())
