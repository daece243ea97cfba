"""How replicas agree, as docs/less_communication.md and the papers say it, in plain PyTorch.

PowerSGD is written with one error for all replicas, since what its factors approximate is the sum of the gradients and
the sum of the errors.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from pipedream.core.seeds import layer_seed
from pipedream.testing import Reducer

Values = dict[str, Tensor]


@dataclass
class Published(Reducer):
    """A way to agree; `number`: rank, or updates from one average to the next; rate and momentum are DiLoCo's."""

    kind: Any = "full"
    number: int = 0
    rate: float = 0.7
    momentum: float = 0.9
    errors: Values = field(default_factory=dict)
    factors: Values = field(default_factory=dict)
    outer: Values = field(default_factory=dict)
    velocity: Values = field(default_factory=dict)
    updates: int = 0

    @property
    def averages(self) -> bool:  # type: ignore[override]
        return self.kind in ("every", "diloco")

    def begin(self, weights: Values) -> None:
        self.outer = {name: tensor.clone() for name, tensor in weights.items()}

    def sum_up(self, name: str, gradients: Sequence[Tensor], weight: float, unit: float) -> Tensor:
        if isinstance(self.kind, torch.dtype):
            total = (gradients[0] / unit).to(self.kind)
            for gradient in gradients[1:]:
                total = total + (gradient / unit).to(self.kind)
            return total.to(gradients[0].dtype) * unit / weight
        mean = super().sum_up(name, gradients, weight, unit)
        rows, columns = mean.shape[0], mean.numel() // mean.shape[0]
        if self.kind != "powersgd" or 2 * self.number * (rows + columns) >= rows * columns:
            return mean
        matrix = mean.reshape(rows, columns) + self.errors.get(name, 0.0)
        if name not in self.factors:
            generator = torch.Generator().manual_seed(layer_seed(0, 0, name))
            self.factors[name] = torch.randn(columns, self.number, generator=generator).to(mean.dtype)
        basis = orthonormal(matrix @ self.factors[name])
        self.factors[name] = matrix.T @ basis
        approximation = basis @ self.factors[name].T
        self.errors[name] = matrix - approximation
        return approximation.reshape(mean.shape)

    def average(self, copies: Sequence[Values]) -> bool:
        self.updates += 1
        if not self.averages or self.updates % self.number:
            return False
        for name in copies[0]:
            mean = torch.stack([weights[name] for weights in copies]).mean(0)
            if self.kind == "diloco":
                change = self.outer[name] - mean
                self.velocity[name] = self.momentum * self.velocity.get(name, torch.zeros_like(mean)) + change
                mean = self.outer[name] - self.rate * (change + self.momentum * self.velocity[name])
                self.outer[name] = mean.clone()
            for weights in copies:
                weights[name] = mean.clone()
        return True

    def common(self, copies: Sequence[Values]) -> Values:
        if self.kind == "diloco":
            return {name: tensor.clone() for name, tensor in self.outer.items()}
        return super().common(copies)


def orthonormal(columns: Tensor) -> Tensor:
    """Returns the columns orthonormalised one after the other, twice (Gram and Schmidt)."""
    columns = columns.clone()
    for number in range(columns.shape[1]):
        for _ in range(2):
            for other in range(number):
                columns[:, number] -= (columns[:, other] @ columns[:, number]) * columns[:, other]
            columns[:, number] /= columns[:, number].norm()
    return columns


PUBLISHED = {
    "bfloat16": Published(torch.bfloat16),
    "float16": Published(torch.float16),
    "powersgd:1": Published("powersgd", 1),
    "powersgd:2": Published("powersgd", 2),
    "every:1": Published("every", 1),
    "every:3": Published("every", 3),
    "diloco:2": Published("diloco", 2),
    "diloco:3,lr=0.5,momentum=0.8": Published("diloco", 3, 0.5, 0.8),
}
"""``sums=`` -> how replicas agree."""
