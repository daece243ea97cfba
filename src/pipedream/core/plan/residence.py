"""Choices of what is kept where, or computed again: activations, the state of optimizers, recomputation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Self

from pipedream.core.errors import PlanError
from pipedream.core.plan.choice import WordChoice
from pipedream.core.plan.cost import Terms
from pipedream.core.plan.stage import Stage
from pipedream.core.units import format_bytes

ALWAYS, AUTOMATIC, NEVER = "always", "auto", "never"
RECOMPUTING = {NEVER: (False,), AUTOMATIC: (False, True), ALWAYS: (True,)}
"""Whether a stage may recompute, the faster way first. Automatic: only where it does not fit otherwise."""
DEVICE, HOST, NONE = "device", "host", "none"


class Activations(WordChoice):
    """'host' if those of the stages with `Stage.offload` wait in the memory of the machine, else ''."""

    option = "activations"
    is_searched = True
    texts = NONE, HOST
    exclusions = """
recompute=always | activations
    a stage that recomputes keeps nothing but its input
    leave one of them out
activations | mesh
    the ranks of a mesh keep parts of tensors
"""

    @classmethod
    def read(cls, text: Any) -> Self:
        if isinstance(text, str) and text.startswith("disk"):
            raise PlanError(
                f"activations={text!r} was asked for, and disks are no longer used; take schedule='roundpipe', "
                "recompute='auto' or more microbatches"
            )
        return cls("") if text in ("", NONE) else super().read(text)

    def suggest_smaller(self, choices: Any, *, on_gpus: bool) -> str:
        return HOST if on_gpus and not self and choices.recompute != ALWAYS else ""

    def check_machine(
        self, stages: Sequence[Stage], free_bytes: int, versions: Sequence[int] | None, gradient_sets: int
    ) -> int:
        need_bytes = sum(stage.memory.moved_bytes for stage in stages) if self else 0
        if need_bytes > free_bytes:
            raise PlanError(
                f"activations were to be offloaded to the memory of one machine and need {format_bytes(need_bytes)}, "
                f"{format_bytes(free_bytes)} are free: {format_bytes(need_bytes - free_bytes)} are missing; use more "
                "microbatches, or recompute"
            )
        return free_bytes - need_bytes

    def describe(self, plan: Any) -> Iterator[str]:
        if self:
            yield describe_offloads(plan.stages)


class OptimizerState(WordChoice):
    """'host' if optimizers and their state are in the memory of the machine, else 'device'."""

    option = "optimizer_state"
    texts = DEVICE, HOST

    def add_terms(self, terms: Terms, weights: Any, value_bytes: float) -> Terms:
        return terms._replace(memory=terms.memory._replace(optimizer_on_host=self == HOST))

    def suggest_smaller(self, choices: Any, *, on_gpus: bool) -> str:
        return HOST if on_gpus and self != HOST else ""

    def check_machine(
        self, stages: Sequence[Stage], free_bytes: int, versions: Sequence[int] | None, gradient_sets: int
    ) -> int:
        if versions is not None or self == HOST:
            check_host_memory(stages, versions, free_bytes, gradient_sets)
        return free_bytes

    def describe(self, plan: Any) -> Iterator[str]:
        if self == HOST:
            size = sum(stage.memory.host_bytes or stage.trained_bytes + stage.optimizer_bytes for stage in plan.stages)
            what = "weights and gradients" if plan.costs.on_gpus else "copies of the weights"
            yield f"optimizers: in the memory of the machine, {format_bytes(size)} with {what}"


class Recomputation(WordChoice):
    """Which stages a search lets repeat their forward. In a plan its stages say it, and this is 'never'."""

    option = "recompute"
    is_searched = True
    texts = NEVER, AUTOMATIC, ALWAYS

    @classmethod
    def read(cls, text: Any) -> Self:
        return super().read(ALWAYS if text is True else text)

    def suggest_smaller(self, choices: Any, *, on_gpus: bool) -> str:
        return AUTOMATIC if self == NEVER else ""


def describe_offloads(stages: Sequence[Stage]) -> str:
    """Says which stages' activations are offloaded."""
    sizes = [f"stage {s} {format_bytes(row.memory.moved_bytes)}" for s, row in enumerate(stages) if row.offload]
    return f"activations in the memory of the machine: {', '.join(sizes)}"


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
