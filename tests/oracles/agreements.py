"""How replicas agree, as docs/less_communication.md and the papers say it, in plain PyTorch.

PowerSGD is written with one error for all replicas, since what its factors approximate is the sum of the gradients and
the sum of the errors.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import ceil
from typing import Any

import torch
from torch import Tensor

from pipedream.core.seeds import layer_seed
from pipedream.testing import Reducer

Values = dict[str, Tensor]


@dataclass
class Published(Reducer):
    """A way to agree; `number`: rank, or updates from one average to the next; rate and momentum: of outer steps."""

    kind: Any = "full"
    number: int = 0
    rate: float = 0.7
    momentum: float = 0.9
    share: float = 0.0
    decay: float = 0.95
    errors: dict[Any, Any] = field(default_factory=dict)  # of SparseLoCo, also by replica
    factors: Values = field(default_factory=dict)
    overlaps: bool = False
    outer: list[Values] = field(default_factory=list)  # of each replica
    before: list[Values] = field(default_factory=list)
    velocity: dict[Any, Tensor] = field(default_factory=dict)
    updates: int = 0

    @property
    def averages(self) -> bool:  # type: ignore[override]
        return self.kind in ("every", "diloco", "sparse")

    def begin(self, weights: Values) -> None:
        self.outer = [{name: tensor.clone() for name, tensor in weights.items()} for _ in range(9)]

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
        changes = [self.find_change(r, weights) for r, weights in enumerate(copies)]
        others, self.before = self.before if self.overlaps else changes, changes
        for name in copies[0]:
            mean = torch.stack([weights[name] for weights in copies]).mean(0)
            for r, weights in enumerate(copies):
                if self.kind != "every":
                    change = changes[r][name] + sum(d[name] for j, d in enumerate(others) if j != r)
                    change, v = change / len(copies), self.velocity.get((r, name), torch.zeros_like(mean))
                    self.velocity[r, name] = self.momentum * v + change
                    mean = self.outer[r][name] - self.rate * (change + self.momentum * self.velocity[r, name])
                    self.outer[r][name] = mean.clone()
                weights[name] = mean.clone()
        return True

    def find_change(self, replica: int, weights: Values) -> Values:
        """Returns what a replica contributes to an outer gradient."""
        changes = {name: outer - weights[name] for name, outer in self.outer[replica].items()}
        vectors = [name for name, change in changes.items() if change.dim() < 2]
        for names in (vectors, *([name] for name in changes if name not in vectors)):
            if names and self.kind == "sparse":
                joined = torch.cat([changes[name].flatten() for name in names])
                joined = joined + self.decay * self.errors.get((replica, names[0]), 0.0)
                arrived = torch.cat([keep_largest(chunk, self.share) for chunk in joined.split(4096)])
                self.errors[replica, names[0]] = joined - arrived
                pieces = arrived.split([changes[name].numel() for name in names])
                changes |= {name: piece.view_as(changes[name]) for name, piece in zip(names, pieces, strict=True)}
        return changes

    def common(self, copies: Sequence[Values]) -> Values:
        if self.kind in ("diloco", "sparse"):
            return super().common(self.outer[: len(copies)])
        return super().common(copies)


def keep_largest(chunk: Tensor, share: float) -> Tensor:
    """Returns what arrives of a chunk: of its largest values, the mean size of the larger, or of the smaller ones."""
    arrived, sizes = torch.zeros_like(chunk), chunk.abs()
    kept = (sizes >= sizes.sort().values[-ceil(share * len(chunk))]) & (chunk != 0)
    large = kept & (sizes > sizes[kept].mean())
    for some in (large, kept & ~large):
        arrived[some] = chunk[some].sign() * sizes[some].mean().float()
    return arrived


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
    "sparse:2,0.1": Published("sparse", 2, 1.0, 0.0, 0.1),
    "sparse:1,0.02,lr=0.7,decay=0.9": Published("sparse", 1, 0.7, 0.0, 0.02, 0.9),
    "sparse:2,0.1,overlap=1": Published("sparse", 2, 1.0, 0.0, 0.1, overlaps=True),
    "diloco:2,overlap=1": Published("diloco", 2, overlaps=True),
}
"""``sums=`` -> how replicas agree."""
