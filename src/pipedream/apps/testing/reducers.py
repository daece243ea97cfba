"""How the replicas of a stage agree: on the sum of their gradients, unless a paper says otherwise."""

from collections.abc import Sequence

import torch
from torch import Tensor

from pipedream.apps.testing.rules import Values


class Reducer:
    """How the replicas of one stage agree; each stage with replicas has its own.

    Attributes:
        averages: each replica updates by its own gradients, and weights are averaged now and then.
    """

    averages = False

    def begin(self, weights: Values) -> None:
        """Gets the weights before the first update."""

    def sum_up(self, name: str, gradients: Sequence[Tensor], weight: float, unit: float) -> Tensor:
        """Returns the mean gradient that all replicas apply.

        Args:
            weight: of all gradients together.
            unit: in which they are sent (docs/couplings.md), which decides what is too small for 16 bits.
        """
        return sum(gradients[1:], gradients[0]) / weight

    def average(self, copies: Sequence[Values]) -> bool:
        """Ends an update of all replicas; returns whether it has averaged their weights, in place."""
        return False

    def common(self, copies: Sequence[Values]) -> Values:
        """Returns the weights that are evaluated."""
        if len(copies) == 1:
            return {name: tensor.clone() for name, tensor in copies[0].items()}
        return {name: torch.stack([weights[name] for weights in copies]).mean(0) for name in copies[0]}
