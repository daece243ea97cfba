"""Weight rules whose backward reads newer weights than its forward, although several versions are kept: TiMePReSt's."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from pipedream.core.schedule.op import Kind
from pipedream.core.schedule.weights import BACKWARD_RULES, WeightRule

__all__ = ["NewerBackward", "Tagged"]


@dataclass(frozen=True)
class NewerBackward(WeightRule):
    """Abstract: W_s r_s microbatches of a stage lie between a forward and the backward at its point of the order.

    Attributes:
        warmup, replicas: of each stage; W_s r_s does not grow from one stage to the next.
        per_update: m, microbatches in one update of every stage, over all replicas.
        backward_rule: 'graph' or 'recompute'.

    Raises:
        ValueError: parts that do not go together.
    """

    warmup: tuple[int, ...]
    replicas: tuple[int, ...]
    per_update: int
    backward_rule: str = field(default="graph", kw_only=True)  # type: ignore[misc]

    def __post_init__(self) -> None:
        if len(self.warmup) != len(self.replicas):
            raise ValueError(
                f"one number a stage is wanted everywhere, found {len(self.warmup)} and {len(self.replicas)}"
            )
        if self.per_update < max(self.replicas):
            raise ValueError(
                f"an update holds a microbatch of each replica, found {self.per_update} of {self.replicas}"
            )
        late = [self._late(stage) for stage in range(len(self.warmup))]
        if sorted(late, reverse=True) != late:
            raise ValueError(f"no stage has more microbatches of warm-up than one before it, found {late}")
        if self.backward_rule not in BACKWARD_RULES[1:]:
            raise ValueError(f"a backward rule is {', '.join(BACKWARD_RULES[1:])}, found {self.backward_rule!r}")

    def backward_version(self, stage: int, microbatch: int) -> int:
        return microbatch // self.per_update

    def _late(self, stage: int) -> int:
        """Returns by how many microbatches a forward is ahead of the backward at its point of the order."""
        return self.warmup[stage] * self.replicas[stage]


@dataclass(frozen=True)
class Tagged(NewerBackward):
    """Vertical sync without a horizontal stash: the version that a microbatch meets at the input stage is its tag,
    which the forward of each stage reads; the backward reads the newest weights that its stage has.

    TiMePReSt, 2024 (arXiv 2410.14312), section 3.1. A stage behind the input stage makes its updates sooner, so it
    keeps ceil((W_0 r_0 - W_s r_s) / m) versions beside the newest, for the forwards still to come: the input stage
    none, the last stage the most, against PipeDream's order. A backward keeps none. All stages are equally late.
    """

    name: ClassVar[str] = "tagged"

    def forward_version(self, stage: int, microbatch: int) -> int:
        return max(0, (microbatch - self._late(0)) // self.per_update)

    def versions(self, stage: int) -> int:
        return -(-(self._late(0) - self._late(stage)) // self.per_update) + 1

    def staleness(self, stage: int) -> int:
        return -(-self._late(0) // self.per_update)

    def mean_staleness(self, stage: int) -> float:
        return self._late(0) / self.per_update

    @property
    def held_until(self) -> Kind:
        return Kind.FORWARD
