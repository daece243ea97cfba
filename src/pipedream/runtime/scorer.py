"""What the last stage computes from the model's output and the targets; whoever builds a session gives it."""

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch

from pipedream.runtime.comm.message import Message
from pipedream.runtime.results import ReadSums


class Targets(NamedTuple):
    """The loss's argument besides the output.

    Attributes:
        received: on the CPU; the weight of the loss is found here, so that no worker waits for its GPU.
        value: the same on the stage's device.
    """

    received: Any
    value: Any


class Scorer(ABC):
    """Computes the losses of one rank of the last stage under one program, and sums them by minibatches.

    Minibatches are counted in their stream; an evaluation is one.
    """

    @abstractmethod
    def begin(self, *, trains: bool) -> None:
        """Begins a stream."""

    @abstractmethod
    def watching(self, inputs: Any, samples: int) -> AbstractContextManager[Any]:
        """Context of the last stage's forward, whose model may compute its own loss."""

    @abstractmethod
    def score(
        self, minibatch: int, message: Message, output: Any, targets: Targets, recomputes: bool = False
    ) -> tuple[torch.Tensor, float, float]:
        """Returns the loss to differentiate, its weight, and the scale of its gradient, in the minibatch's unit.

        An update's sum is divided by its weights only at the update. Until then gradients must be no larger than those
        of the mean, or low precision could not represent them. So the unit is a power of two near the minibatch's
        weight, by which division is exact. In a round, whose minibatches count equally, and where an update has one
        microbatch, the weight is 1, or 0 if nothing counts, so that gradients are rounded as in a plain loop.

        The loss and the metrics are recorded, except in a recomputation (`recomputes`).
        """

    @abstractmethod
    def skip(self, minibatch: int, message: Message) -> None:
        """Records a microbatch without samples."""

    @abstractmethod
    def close(self, minibatch: int) -> ReadSums:
        """Ends a minibatch after its last microbatch here, if there was one; returns what gives its sums."""
