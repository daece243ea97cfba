"""Clipping by one norm over all stages: no stage updates before all have their gradients.

The norm is that of the whole model's gradient, as `torch.nn.utils.clip_grad_norm_` takes it in one process. A rank
gives one number for all its stages, so its first update of a minibatch waits for the gradients of all of them; the
schedule has its updates together for this (`Schedule.coupled`).
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from typing import Any

import torch

from .channel import Group
from .seat import Seated

__all__ = ["GlobalNorm"]


class GlobalNorm:
    """What the stages of one rank have of the norm.

    Args:
        limit: greatest norm of a minibatch's gradient.
        group: adds a number up over all ranks.
        seats: stage -> what lives here.
    """

    def __init__(self, limit: float, group: Group, seats: Mapping[int, Seated]) -> None:
        self._limit = limit
        self._group = group
        self._seats = seats
        self._prepared: dict[int, tuple[float, bool]] = {}

    def prepare(self, stage: int, wish: float) -> Generator[Any, None, tuple[float, bool]]:
        """Prepares the update of a stage as `Optimizer.prepare`, clipped; yields where it would wait."""
        if not self._prepared:
            for s, seat in self._seats.items():
                self._prepared[s] = yield from seat.optimizer.prepare(seat.gradients, wish)
            # Replicas hold the same gradients after their sum: each gives its share of the stage's square.
            squares = sum(seat.optimizer.squares / seat.optimizer.replicas for seat in self._seats.values())
            pending = self._group.add_up(torch.tensor([squares], dtype=torch.float64))
            if not pending.ready():
                yield pending
            norm = float(pending.result()) ** 0.5
            for seat in self._seats.values():
                seat.optimizer.clip(self._limit, norm)
        return self._prepared.pop(stage)
