"""t1: smaller learning rates for the first updates."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from pipedream.core.schedule.delay_compensation import Compensation, expect


@dataclass(frozen=True)
class LearningRateRescheduling(Compensation):
    """PipeMare's T1: the rate of update k is divided by D^p, p = 1 - min(k / K, 1), D the stage's mean staleness.

    Yang et al., MLSys 2021; D is the mean over the microbatches of an update, as for its T2
    (`schedules.asynchronous.pipemare`). Stale gradients are only stable at rates of the order of 1 / D
    (docs/lessons.md, Facts). The paper's K is the length of its first phase. PipeMare's delays below 1 would raise the
    rate, and are ignored. k counts rounds of the input stage, as learning-rate schedules do.

    Attributes:
        updates: K.
    """

    name: ClassVar[str] = "t1"
    updates: int

    def __post_init__(self) -> None:
        expect(self.updates >= 1, f"T1 ends after at least 1 update, found {self.updates}")

    def rate_factor(self, staleness: float, k: int) -> float:
        return math.pow(max(staleness, 1.0), min(k / self.updates, 1.0) - 1.0)


COMPENSATIONS = (LearningRateRescheduling,)
