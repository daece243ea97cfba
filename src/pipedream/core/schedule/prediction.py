"""Weight predictions: weights that are not stored but computed, some updates before or after a version.

A prediction from version t is w_t + T d_t: T its horizon in updates, d_t what one update is assumed to add.

- *velocity*: d_t = -lr v_t, where v_t is the direction in which the optimizer steps: SGD's momentum buffer (Kosson et
  al., MLSys 2021, LWP^v; SpecTrain, 2018), Adam's and AdamW's m / (sqrt(v) + eps), both with bias correction
  (PipeOptim, 2023; XPipe, 2019), without decoupled decay. lr is the rate of the next update.
- *difference*: d_t = w_t - w_{t-1}, the last update itself, of any optimizer (Kosson et al., LWP^w).
- *average*: d_t = gamma d_{t-1} + (1 - gamma)(w_t - w_{t-1}), gamma = decay^(1/|T|) (PipeMare, MLSys 2021, T2).

T < 0 goes back towards weights that are gone. Before the first update d = 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import exp, isfinite

VELOCITY, DIFFERENCE, AVERAGE = "velocity", "difference", "average"


@dataclass(frozen=True)
class WeightPrediction:
    """A way to compute a prediction from a version.

    Attributes:
        decay: the part that is left of an average after |T| updates; exp(-2) is PipeMare's, which makes its correction
            exact to first order.
    """

    by: str
    horizons: tuple[float, ...]
    decay: float = exp(-2)

    def __post_init__(self) -> None:
        if self.by not in (VELOCITY, DIFFERENCE, AVERAGE):
            raise ValueError(f"a prediction is by {VELOCITY}, {DIFFERENCE} or {AVERAGE}, found {self.by!r}")
        if not self.horizons or not all(isfinite(horizon) for horizon in self.horizons):
            raise ValueError(f"a prediction needs a finite horizon for each stage, found {self.horizons}")
        if not 0 < self.decay < 1:
            raise ValueError(f"an average's decay lies between 0 and 1, found {self.decay}")
        # So that 1 and 1.0 are the same in a file.
        object.__setattr__(self, "horizons", tuple(map(float, self.horizons)))

    def gamma(self, stage: int) -> float:
        return float(self.decay ** (1 / abs(self.horizons[stage])))
