"""activations: where activations wait for their backward."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, Self

from pipedream.core.errors import PlanError
from pipedream.core.plan.choice import Shapes, WordChoice
from pipedream.core.plan.stage import Stage
from pipedream.core.units import format_bytes

HOST, NONE = "host", "none"


class Activations(WordChoice):
    """'host' if activations of stages with `Stage.offload` wait in the memory of the machine, else ''."""

    option = "activations"
    help = (
        "Where activations wait between forward and backward: host, the memory of a GPU's machine, for each stage that "
        "does not fit otherwise; none keeps them."
    )
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
        need_bytes = sum(stage.memory.moved_bytes for stage in stages if stage.offload) if self else 0
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


def _describe_offloads(stages: Sequence[Stage]) -> str:
    """Says which stages' activations are offloaded."""
    sizes = [f"stage {s} {format_bytes(row.memory.moved_bytes)}" for s, row in enumerate(stages) if row.offload]
    return f"activations in the memory of the machine: {', '.join(sizes)}"


CHOICES = (Activations(""),)
