"""What an optimizer steps, the averages of it over time, and the factor on the loss of its gradients."""

from collections.abc import Mapping

import torch


class SteppedWeights:
    """The weights that a stage's optimizer steps. Of this base class they are the handles.

    Attributes:
        handles: by name.
        weights: by the same names.
    """

    def __init__(
        self, handles: Mapping[str, torch.nn.Parameter], weights: Mapping[str, torch.nn.Parameter] | None = None
    ) -> None:
        self.handles = dict(handles)
        self.weights = self.handles if weights is None else dict(weights)

    def take_gradients(self) -> None:
        """Takes the gradients of the handles."""

    def write(self) -> None:
        """Writes the weights into the handles."""


class MovingAverages:
    """Exponential averages over the updates of a stage's weights; none are kept without a `decay`.

    Attributes:
        tensors: by name.
    """

    def __init__(self, handles: Mapping[str, torch.Tensor], decay: float | None = None) -> None:
        self._handles = list(handles.values())
        self._decay = decay or 0.0
        self.tensors = {} if decay is None else {name: handle.detach().clone() for name, handle in handles.items()}

    def follow(self) -> None:
        """Takes the weights into the averages, after an update."""
        if self.tensors:
            weights = [handle.detach() for handle in self._handles]
            torch._foreach_lerp_(list(self.tensors.values()), weights, 1.0 - self._decay)


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
