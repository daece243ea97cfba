"""Choices of what is kept where, or computed again: activations, the state of optimizers, recomputation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, Self

from pipedream.core.errors import PlanError
from pipedream.core.plan.choice import Shapes, WordChoice
from pipedream.core.plan.cost import Terms
from pipedream.core.plan.stage import Stage
from pipedream.core.units import format_bytes

ALWAYS, AUTOMATIC, NEVER = "always", "auto", "never"
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

    @property
    def moves_activations(self) -> bool:
        return bool(self)

    def check_device(self, device: str, plan: Any) -> None:
        if not self:
            return
        by_plan = plan and f"the plan {plan.config} ({_describe_offloads(plan.stages)})"
        request = by_plan or f"activations={self!r}"
        if device == "cpu":
            raise PlanError(f"{request} was asked for, but the workers are CPUs, whose memory is the host's; give none")
        if plan is not None and plan.ranks > plan.workers:
            raise PlanError(f"{request} was asked for, but it has meshes, whose ranks keep parts of tensors; give none")

    def check(self, plan: Any, programs: Sequence[Any], options: Any, shapes: Shapes) -> None:
        if self and options.compile:
            raise PlanError(
                f"compile={options.compile!r} was asked for with activations={self!r}, but compiled modules keep what "
                "they save; leave one of them out"
            )

    def change_stage(self, stage: Stage, before: Any) -> Stage:
        return stage if self == before else replace(stage, offload=bool(self) and not stage.recompute)

    def suggest_smaller(self, choices: Any, *, on_gpus: bool) -> str:
        return HOST if on_gpus and not self and not all(choices.recomputing) else ""

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
            yield _describe_offloads(plan.stages)


class OptimizerState(WordChoice):
    """'host' if optimizers and their state are in the memory of the machine, else 'device'."""

    option = "optimizer_state"
    texts = DEVICE, HOST

    @property
    def hosts_optimizers(self) -> bool:
        return self == HOST

    def add_terms(self, terms: Terms, weights: Any, value_bytes: float) -> Terms:
        return terms._replace(memory=terms.memory._replace(optimizer_on_host=self.hosts_optimizers))

    def suggest_smaller(self, choices: Any, *, on_gpus: bool) -> str:
        return HOST if on_gpus and self != HOST else ""

    def check_machine(
        self, stages: Sequence[Stage], free_bytes: int, versions: Sequence[int] | None, gradient_sets: int
    ) -> int:
        if versions is not None or self == HOST:
            _check_host_memory(stages, versions, free_bytes, gradient_sets)
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
    is_stored = False
    texts = NEVER, AUTOMATIC, ALWAYS

    @classmethod
    def read(cls, text: Any) -> Self:
        return super().read(ALWAYS if text is True else text)

    @property
    def recomputing(self) -> tuple[bool, ...]:
        return {NEVER: (False,), AUTOMATIC: (False, True), ALWAYS: (True,)}[self]

    @property
    def overrides(self) -> tuple[str, ...]:
        return ("activations",) if self == ALWAYS else ()  # only inputs would be left to move

    def change_stage(self, stage: Stage, before: Any) -> Stage:
        return replace(stage, recompute=True, offload=False) if self == ALWAYS else stage

    def suggest_smaller(self, choices: Any, *, on_gpus: bool) -> str:
        return AUTOMATIC if self == NEVER else ""


def _describe_offloads(stages: Sequence[Stage]) -> str:
    """Says which stages' activations are offloaded."""
    sizes = [f"stage {s} {format_bytes(row.memory.moved_bytes)}" for s, row in enumerate(stages) if row.offload]
    return f"activations in the memory of the machine: {', '.join(sizes)}"


def _check_host_memory(
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
