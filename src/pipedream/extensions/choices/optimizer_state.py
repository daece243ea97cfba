"""optimizer_state: where optimizers and their state are."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from pipedream.core.errors import PlanError
from pipedream.core.plan.choice import WordChoice
from pipedream.core.plan.cost import Terms
from pipedream.core.plan.stage import Stage
from pipedream.core.units import format_bytes

DEVICE, HOST = "device", "host"


class OptimizerState(WordChoice):
    """'host' if optimizers and their state are in the memory of the machine, else 'device'."""

    option = "optimizer_state"
    help = (
        "Where optimizers and their state are: with the weights, or in the memory of the machine (host), which updates "
        "there."
    )
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
            return free_bytes - _count_host_bytes(stages, versions, free_bytes, gradient_sets)
        return free_bytes

    def describe(self, plan: Any) -> Iterator[str]:
        if self == HOST:
            size = sum(stage.memory.host_bytes or stage.trained_bytes + stage.optimizer_bytes for stage in plan.stages)
            what = "weights and gradients" if plan.costs.on_gpus else "copies of the weights"
            yield f"optimizers: in the memory of the machine, {format_bytes(size)} with {what}"


def _count_host_bytes(
    stages: Sequence[Stage], versions: Sequence[int] | None, free_bytes: int, gradient_sets: int
) -> int:
    """Returns the bytes of the weights of a machine's stages, or without versions of their optimizers.

    Raises a PlanError if fewer are free.
    """
    otherwise = "use a smaller model" if versions else "keep the optimizers with the weights"
    trained = [stage.trained_bytes for stage in stages]
    weights, frozen = sum(trained), 0 if versions is None else sum(stage.frozen_bytes for stage in stages)
    versions = versions or [1] * len(stages)
    version_bytes = frozen + sum(size * count for size, count in zip(trained, versions, strict=True))
    state_bytes = sum(stage.optimizer_bytes for stage in stages)
    need_bytes = gradient_sets * weights + version_bytes + state_bytes
    if need_bytes <= free_bytes:
        return need_bytes
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


CHOICES = (OptimizerState(DEVICE),)
