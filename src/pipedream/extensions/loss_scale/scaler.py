"""Loss scaling: a factor on the loss that keeps small low-precision gradients from vanishing.

The rule is that of `torch.amp.GradScaler`, whose initial state is copied: an update whose gradients are not all finite
is skipped and multiplies the scale by the backoff factor; a number of good updates in a row multiply it by the growth
factor. Every stage keeps its own scale and sees the same updates, so that all are equal: the last stage multiplies,
each stage divides at its update.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from math import inf
from typing import Any

import torch

from pipedream.core.errors import ScheduleError
from pipedream.runtime.update.stepped import LossFactor

_WARN_AFTER_SKIPPED = 8
"""Consecutive skipped updates after which a constant scale causes a warning."""


@dataclass(frozen=True)
class LossScaleOptions:
    """How a loss is scaled.

    Attributes:
        growth, backoff: factors; 1 for a constant scale.
        interval: good updates in a row until the scale grows.
        good: good updates in a row so far.
    """

    scale: float
    growth: float = 1.0
    backoff: float = 1.0
    interval: int = 1
    good: int = 0

    def make(self) -> LossScale:
        return LossScale(self)

    @property
    def kind(self) -> str:
        return "constant" if self.growth == self.backoff == 1.0 else "dynamic"

    @classmethod
    def of(cls, scaler: Any) -> LossScaleOptions | None:
        """Takes a number (a constant scale), a torch.amp.GradScaler or None; else raises a `ScheduleError`."""
        if scaler is None or (isinstance(scaler, torch.amp.GradScaler) and not scaler.is_enabled()):
            return None
        if isinstance(scaler, torch.amp.GradScaler):
            factors = scaler.get_growth_factor(), scaler.get_backoff_factor()
            good = scaler.state_dict()["_growth_tracker"]
            return cls(scaler.get_scale(), *factors, scaler.get_growth_interval(), good)
        if isinstance(scaler, (int, float)) and not isinstance(scaler, bool) and 0 < scaler < inf:
            return cls(float(scaler))
        raise ScheduleError(
            f"grad_scaler={scaler!r} is not supported; give a torch.amp.GradScaler or a positive number"
        )


class LossScale(LossFactor):
    """The loss scale of one stage.

    Warns if many updates in a row were skipped at a constant scale: their gradients will not become finite.
    """

    def __init__(self, scaling: LossScaleOptions) -> None:
        self._scaling = scaling
        self.value = scaling.scale
        self._good = scaling.good
        self._skipped = 0

    def update(self, finite: bool) -> None:
        self._good = self._good + 1 if finite else 0
        self._skipped = 0 if finite else self._skipped + 1
        if self._skipped == _WARN_AFTER_SKIPPED and self._scaling.kind == "constant":
            warnings.warn(
                f"{self._skipped} updates in a row were skipped because their gradients are not finite at the constant "
                f"loss scale {self.value:g}; use a smaller one (grad_scaler=...), a torch.amp.GradScaler with a method "
                "that flushes (1f1b, gpipe), or a lower learning rate if the scale is not the cause",
                stacklevel=2,
            )
        if not finite:
            self.value *= self._scaling.backoff
        elif self._good == self._scaling.interval:
            grown, self._good = self.value * self._scaling.growth, 0
            if grown <= torch.finfo(torch.float32).max:  # torch keeps its scale as float32
                self.value = grown

    @property
    def saved(self) -> tuple[float, int]:
        return self.value, self._good

    def restore(self, saved: tuple[float, int] | None) -> None:
        if self._scaling.kind == "dynamic" and saved is not None:
            self.value, self._good = saved
