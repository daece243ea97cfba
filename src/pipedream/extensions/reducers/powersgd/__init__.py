"""powersgd:RANK: two thin factors of each matrix's gradient (Vogels, Karimireddy and Jaggi, NeurIPS 2019)."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from pipedream.core.errors import PlanError
from pipedream.core.model.weight_shapes import Matrices
from pipedream.core.plan.choice import Shapes
from pipedream.core.plan.cost import SumCosts
from pipedream.core.plan.sum_method import SumMethod

_FACTORS_S = 1.0e-9
"""Seconds of one core for each byte of float32 weights, of rank 4 (16: up to twice as many): medians over shapes from
256 x 256 to 4096 x 1024, torch 2.13, an x86 server."""


@dataclass(frozen=True, repr=False)
class PowerSGD(SumMethod):
    """The sum has this rank; what it lacks is added to later gradients."""

    name = "powersgd"
    text = "powersgd:RANK"
    number = "rank"
    needs_shapes = True
    rank: int

    def compresses(self, shape: Sequence[int]) -> bool:
        """Returns whether factors of a gradient are sent: less than half of its numbers, as in torch's hook.

        A tensor is a matrix of its first dimension and all others.
        """
        return self.rank <= greatest_rank(shape)

    def costs(self, parameter_bytes: float, matrices: Iterable[Matrices], value_bytes: float = 4.0) -> SumCosts:
        """Weights of unknown shapes count as one square matrix."""
        side = round((parameter_bytes / value_bytes) ** 0.5)
        shapes = list(matrices) or [Matrices(side, side, 1, round(side * side * value_bytes))]
        compressed = [m for m in shapes if self.compresses((m.rows, m.columns))]
        compressed_bytes = sum(m.size_bytes for m in compressed)
        factor_bytes = max(value_bytes, 4) * sum(m.tensors * self.rank * (m.rows + m.columns) for m in compressed)
        share = (parameter_bytes - compressed_bytes + factor_bytes) / max(parameter_bytes, 1)
        return SumCosts(share, 3.0, 1.0, _FACTORS_S * compressed_bytes / max(parameter_bytes, 1), 1)

    def check(self, plan: Any, programs: Sequence[Any], options: Any, shapes: Shapes) -> None:
        if any(stage.mesh for stage in plan.stages if stage.replicas > 1):
            raise PlanError(
                f"sums={self!r} was asked for, but ranks of a mesh have parts of a matrix, whose factors are not "
                "those of the whole; use sums='bfloat16', or replicas without a mesh"
            )
        trained = shapes()
        if any(map(self.compresses, trained)):
            return
        largest = max(trained, key=greatest_rank, default=())
        rank = greatest_rank(largest)
        hint = f"the largest, of shape {largest}, allows a rank up to {rank}" if rank else "there is none"
        raise PlanError(
            f"sums={self!r} was asked for, but no weight of the stages with replicas is a matrix of which it "
            f"would send less than half of the numbers ({hint}); choose a smaller rank, or sums='bfloat16'"
        )

    def make_reducer(self, replica: Any) -> Any:
        from pipedream.extensions.reducers.powersgd.low_rank import LowRankGradientSum, LowRankSum

        low_rank = LowRankSum(replica.handles, self.list_compressed(replica), self.rank, replica.group)
        return LowRankGradientSum(replica.all_reduce(excluded=low_rank.names_by_index), low_rank)

    def list_compressed(self, replica: Any) -> list[str]:
        """Returns the names of the weights whose gradients are compressed."""
        return [
            name
            for name, handle in replica.handles.items()
            if name not in replica.tied and handle.is_floating_point() and self.compresses(handle.shape)
        ]


def greatest_rank(shape: Sequence[int]) -> int:
    """Returns the greatest rank at which factors of a gradient are sent; 0 if there is none."""
    rows, columns = (shape[0], prod(shape[1:])) if len(shape) > 1 else (0, 0)
    return (rows * columns - 1) // (2 * (rows + columns)) if rows * columns else 0


SUMS = (PowerSGD,)
