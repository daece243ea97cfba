"""What an optimizer steps, and the factor on the loss of its gradients."""

from collections.abc import Mapping

import torch


class SteppedWeights:
    """The weights that a stage's optimizer steps. Of this base class they are the handles.

    Attributes:
        weights: by the names of the handles.
    """

    def __init__(self, handles: Mapping[str, torch.nn.Parameter]) -> None:
        self.weights = dict(handles)

    def take_gradients(self) -> None:
        """Takes the gradients of the handles."""

    def write(self) -> None:
        """Writes the weights into the handles."""


class LossFactor:
    """A factor on a stage's loss, by which its gradients are divided. This base class does not scale.

    Attributes:
        value: now.
    """

    value = 1.0

    def update(self, finite: bool) -> None:
        """Ends an update, which is skipped unless its gradients are `finite`."""

    @property
    def saved(self) -> tuple[float, int] | None:
        """What a checkpoint keeps: the factor, and the updates since it changed; None if nothing."""
        return None

    def restore(self, saved: tuple[float, int] | None) -> None:
        """Sets what a checkpoint kept."""
