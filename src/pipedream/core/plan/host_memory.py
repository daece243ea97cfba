"""Memory of machines that stages need besides their workers': weights and activations of GPUs."""

from collections.abc import Sequence

from pipedream.core.errors import PlanError
from pipedream.core.plan.stage import Stage
from pipedream.core.units import format_bytes


def check_host_memory(
    stages: Sequence[Stage], versions: Sequence[int] | None, free_bytes: int, gradient_sets: int
) -> None:
    """Raises a PlanError if the weights of a machine's stages, or without versions their optimizers, need more memory
    than is free.
    """
    otherwise = "use a smaller model" if versions else "keep the optimizers with the weights"
    trained = [stage.trained_bytes for stage in stages]
    weights, frozen = sum(trained), 0 if versions is None else sum(stage.frozen_bytes for stage in stages)
    versions = versions or [1] * len(stages)
    version_bytes = frozen + sum(size * count for size, count in zip(trained, versions, strict=True))
    state_bytes = sum(stage.optimizer_bytes for stage in stages)
    need_bytes = gradient_sets * weights + version_bytes + state_bytes
    if need_bytes <= free_bytes:
        return
    smaller_bytes = {
        "one version of the weights (a method without delay) needs": 2 * weights + frozen + state_bytes,
        "an optimizer without state needs": need_bytes - state_bytes,
    }
    fits = {words: size for words, size in smaller_bytes.items() if size <= free_bytes}
    if not fits and 2 * weights + frozen <= free_bytes:
        fits = {"with one version of the weights an optimizer without state needs": 2 * weights + frozen}
    advice = ", ".join(f"{words} {format_bytes(size)}" for words, size in fits.items())
    raise PlanError(
        f"weights, gradients and optimizer state of {len(stages)} stages were to be kept in the memory of one machine "
        f"and need {format_bytes(need_bytes)}, {format_bytes(need_bytes - free_bytes)} more than the "
        f"{format_bytes(free_bytes)} that are free; {advice or f'nothing smaller fits: {otherwise}'}"
    )


def check_activations_room(need_bytes: int, free_bytes: int) -> int:
    """Returns the bytes of offloaded activations on one machine; raises a PlanError if they exceed the free bytes."""
    if need_bytes > free_bytes:
        raise PlanError(
            f"activations were to be offloaded to the memory of one machine and need {format_bytes(need_bytes)}, "
            f"{format_bytes(free_bytes)} are free: {format_bytes(need_bytes - free_bytes)} are missing; use more "
            "microbatches, or recompute"
        )
    return need_bytes
