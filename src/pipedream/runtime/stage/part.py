"""The interface of what a stage has besides its layers, the versions of its weights and its optimizer."""

from collections.abc import Mapping

import torch

from pipedream.core.schedule.program import Program
from pipedream.runtime.comm.channel import Waiting


class StagePart:
    """Takes part in a stage's streams, updates and checkpoints. By default it does nothing.

    Attributes:
        allows_overlap: a thread may make an update while passes run.
    """

    allows_overlap = True

    def check(self, program: Program, stage: int, optimizer: torch.optim.Optimizer, *, averages_weights: bool) -> None:
        """Raises a `ScheduleError` before a run if a method or an optimizer does not fit.

        Args:
            averages_weights: the replicas average weights instead of summing gradients.
        """

    def begin(self) -> None:
        """Begins a stream."""

    def before_update(self) -> None:
        """Called before the storage of an update's weights is chosen."""

    def before_step(self) -> None:
        """Called when the handles are where the update writes."""

    def after_step(self) -> None:
        """Called when the update has its number."""

    def end(self) -> Waiting[None]:
        """Ends a stream, at a drain; yields where it would wait."""
        yield from ()

    def tensors(self) -> dict[str, torch.Tensor]:
        """Returns its state in a checkpoint, by KIND/NAME."""
        return {}

    def restore(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Sets its state, of which a checkpoint may lack tensors."""
