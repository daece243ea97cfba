"""The rules of a method, as the serial rule needs them: a schedule says them, or its paper, by hand.

Letters: s a stage, r a replica of it, n a minibatch, m microbatches of a minibatch, k a microbatch since the last
drain, v an update since the last drain.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import exp
from typing import Any

import torch
from torch import Tensor, nn

Values = dict[str, Tensor]


@dataclass(frozen=True)
class Reads:
    """Which weights the passes of a method read.

    Attributes:
        forward, backward: (s, k) -> v, before any prediction. A `backward` of None is the rule 'stash'.
        rule: 'stash', 'recompute' or 'graph'.
        ahead, back: s -> updates by which the weights of a forward, a backward are predicted; negative: earlier ones.
        by: what one update is taken to add: 'velocity', 'difference' or 'average' of differences.
        decay: of the average, over the horizon.
        share: of the weights one update old in those of a backward, which approach the newest exponentially with the
            updates between them; None reads the newest alone.
    """

    forward: Callable[[int, int], int]
    backward: Callable[[int, int], int] | None = None
    rule: str = "graph"
    ahead: Callable[[int], float] = lambda s: 0.0
    back: Callable[[int], float] = lambda s: 0.0
    by: str = "velocity"
    decay: float = exp(-2)
    share: float | None = None

    def gamma(self, s: int) -> float:
        """Returns the weight of the average so far, in one update."""
        horizon = abs(self.back(s) or self.ahead(s))
        return float(self.decay ** (1 / horizon)) if horizon else 0.0


class CompensationRule:
    """What a paper changes of the updates against stale gradients; this one changes nothing.

    w is what the optimizer of a stage steps, y what forwards read: name -> tensor.
    """

    def rate(self, s: int, k: int) -> float:
        """Returns the factor on the learning rate; k counts updates of the input stage since the start of training."""
        return 1.0

    def gradient(self, s: int, name: str, g: Tensor, y: Tensor, read: Tensor) -> Tensor:
        """Returns what the optimizer gets for the gradient of a parameter at `read`, where forwards now read y."""
        return g

    def step(self, s: int, optimizer: Any, w: Mapping[str, nn.Parameter], y: Values) -> None:
        """Makes the update."""
        optimizer.step()

    def predict(self, s: int, optimizer: Any, w: Mapping[str, nn.Parameter]) -> Values:
        """Returns what forwards read from now on."""
        return copy_values(w)


class Reducer:
    """How the replicas of one stage agree: on the sum of their gradients, unless a paper says otherwise.

    Each stage with replicas has its own.

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


@dataclass(frozen=True)
class MethodRules:
    """All that the serial rule needs of a method.

    Attributes:
        microbatches: m.
        per_update: for each stage the microbatches of an update; () for m at each.
        rounds: each microbatch is a minibatch, normalised by itself, and an update is the mean of the replicas'.
        norm_delay: updates by which the global norm that clips is late; None clips each stage by its own norm alone.
    """

    reads: Reads
    microbatches: int = 1
    per_update: tuple[int, ...] = ()
    rounds: bool = False
    norm_delay: int | None = None
    compensation: CompensationRule = field(default_factory=CompensationRule)


def copy_values(named: Mapping[str, Tensor]) -> Values:
    """Returns copies of tensors, without their graphs."""
    return {name: tensor.detach().clone() for name, tensor in named.items()}
