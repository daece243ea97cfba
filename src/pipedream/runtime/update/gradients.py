"""The gradients of a stage's next update: of one replica, and summed over all."""

from __future__ import annotations

from typing import NamedTuple

import torch


class Gradients:
    """The gradients of the next update, in the order of the handles.

    Autograd itself adds to the sums (`accumulators`), tensor by tensor while they are in the cache: adding afterwards
    took 2 to 4 ms of a 35 ms backward.
    """

    def __init__(self, handles: int) -> None:
        self._gradients: list[torch.Tensor | None] = [None] * handles
        self.loss_weight = 0.0
        self.count = 0
        self._ready: torch.cuda.Event | None = None

    def make_next(self) -> Gradients:
        """Returns the empty gradients of the update after this one."""
        return Gradients(len(self._gradients))

    @property
    def accumulators(self) -> list[torch.Tensor | None]:
        return list(self._gradients)

    def add(self, gradients: list[torch.Tensor | None], loss_weight: float) -> None:
        """Adds one microbatch's gradients (see `UpdateRule`) and loss weight, and takes over their storage.

        A gradient that is the accumulator itself is skipped: autograd has already added to it.
        """
        self.loss_weight += loss_weight
        self.count += 1
        for i, gradient in enumerate(gradients):
            total = self._gradients[i]
            if total is None:
                self._gradients[i] = (
                    gradient if gradient is None else gradient.resolve_conj()
                )  # some kernels refuse others
            elif gradient is not None and gradient is not total:
                total.add_(gradient)

    def complete(self, index: int, gradient: torch.Tensor) -> torch.Tensor:
        """Removes a handle's sum, and returns it with the last microbatch's gradient added.

        If `gradient` is the accumulator itself, autograd has already added to it.
        """
        total, self._gradients[index] = self._gradients[index], None
        if total is None or gradient is total:
            return gradient.resolve_conj()
        return total.add_(gradient)

    def fill(self, gradients: list[torch.Tensor | None], loss_weight: float, count: int) -> None:
        """Takes over all gradients of an update, as `take` returns them."""
        self._gradients, self.loss_weight, self.count = gradients, loss_weight, count

    def replace(self, gradients: list[torch.Tensor | None], ready: torch.cuda.Event | None) -> None:
        """Replaces the sums by copies, which may be read after the event `ready`."""
        self._gradients, self._ready = gradients, ready

    def take(self) -> tuple[list[torch.Tensor | None], float, int]:
        """Returns the sums, the summed loss weight and the number of microbatches; empties itself."""
        if self._ready is not None:
            self._ready.synchronize()
            self._ready = None
        result = (self._gradients, self.loss_weight, self.count)
        self._gradients = [None] * len(self._gradients)
        self.loss_weight = 0.0
        self.count = 0
        return result


class ReducedGradients(NamedTuple):
    """An update's gradients summed over all replicas, in the order of the handles, not yet divided.

    `stop_request` is not 0 if a replica was asked to stop. Where replicas average weights instead, sums, weight and
    microbatches are this replica's own, and `present` counts the microbatches of all.
    """

    gradients: list[torch.Tensor | None]
    loss_weight: float
    microbatches: int
    stop_request: float
    present: int | None = None

    def divisor(self, mean_of_rounds: bool) -> float:
        """Returns the divisor of the sums, without the loss scale."""
        return float(self.microbatches) if mean_of_rounds else self.loss_weight
