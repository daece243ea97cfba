"""What stages keep in a machine's memory beside that of their workers: weights on loan to GPUs, and snapshots."""

from __future__ import annotations

from collections.abc import Sequence

from pipedream.core.errors import PlanError
from pipedream.core.plan.plan import Plan
from pipedream.core.plan.stage import Stage
from pipedream.core.units import format_bytes


def check_host_memory(
    stages: Sequence[Stage], versions: Sequence[int], free_bytes: int | None, frozen_bytes: Sequence[int] = ()
) -> None:
    """Raises a PlanError if the stages of a machine need more of its memory than is free (None: unknown).

    Args:
        versions: sets of weights of each stage.
        frozen_bytes: of each stage's weights; (): all are trained.
    """
    rows = zip(stages, frozen_bytes or [0] * len(stages), strict=True)
    trained = [max(0, stage.parameter_bytes - frozen) for stage, frozen in rows]
    weights, frozen = sum(trained), sum(frozen_bytes)
    sets = frozen + sum(size * count for size, count in zip(trained, versions, strict=True))
    state = sum(stage.optimizer_bytes for stage in stages)
    need = weights + sets + state  # one set of gradients
    if free_bytes is None or need <= free_bytes:
        return
    smaller = {
        "one version of the weights (a method without delay) needs": 2 * weights + frozen + state,
        "an optimizer without state needs": weights + sets,
    }
    fits = {words: size for words, size in smaller.items() if size <= free_bytes}
    if not fits and 2 * weights + frozen <= free_bytes:
        fits = {"with one version of the weights an optimizer without state needs": 2 * weights + frozen}
    advice = ", ".join(f"{words} {format_bytes(size)}" for words, size in fits.items())
    raise PlanError(
        f"weights, gradients and optimizer state of {len(stages)} stages were to be kept in the memory of one machine "
        f"and need {format_bytes(need)}, {format_bytes(need - free_bytes)} more than the {format_bytes(free_bytes)} "
        f"that are free; {advice or 'nothing smaller fits: use a smaller model'}"
    )


def count_saved_bytes(plan: Plan) -> list[int]:
    """Returns what each rank saves of weights and optimizer state, at most: those of its stages' first replicas."""
    saved_bytes = [0] * plan.workers
    for stage, workers in zip(plan.stages, plan.placement.ranks, strict=True):
        saved_bytes[workers[0]] += stage.parameter_bytes + stage.optimizer_bytes
    meshes = plan.placement.meshes(plan.meshes)
    return [size for size, mesh in zip(saved_bytes, meshes, strict=True) for _ in range(mesh.size)]
