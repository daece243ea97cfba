"""PowerSGD: the sum of a matrix's gradients by two thin factors (Vogels, Karimireddy and Jaggi, NeurIPS 2019).

Replica w has S_w, its gradient summed over its microbatches, and an error e_w. All have D, the divisor of this update's
sum: the summed loss weight, or the minibatches of a round, times the loss scale. Q is the last update's factor.

    M_w = S_w + D e_w
    P = orthonormal columns of sum_w M_w orth(Q)      the first message
    Q = sum_w M_w^T P                                  the second
    the sum becomes P Q^T, and e_w = (M_w - P P^T M_w) / D, what it lacks of this replica's share

So an error has the unit of the update's mean gradient: it does not depend on the number of microbatches, on loss
weights that differ between replicas or updates, or on the loss scale. Since P and Q are linear in M_w, the update
depends on the sums of S_w and of e_w only, not on who has what. An update that is skipped leaves errors and factors as
they were.

Where Q does not have full rank (no gradient so far, or one of lower rank), QR completes it with other directions, so no
direction is lost for ever. One number that is not finite makes the whole matrix so.
"""

from collections.abc import Callable, Collection, Mapping
from typing import NamedTuple

import torch

from pipedream.core.seeds import layer_seed
from pipedream.runtime.comm.channel import Group, Waiting
from pipedream.runtime.update.all_reduce import GradientAllReduce, GradientSum, all_reduce_many
from pipedream.runtime.update.gradients import Gradients, ReducedGradients
from pipedream.runtime.update.reducer import NamedTensors, select_kind


class _Round(NamedTuple):
    """An update under way, for one matrix.

    Attributes:
        matrix: M_w.
        left: P.
        right: this replica's part of the new Q.
        factor: the new Q.
    """

    matrix: torch.Tensor
    left: torch.Tensor
    right: torch.Tensor
    factor: torch.Tensor


class LowRankSum:
    """One replica's part in the compressed sums of its stage.

    Args:
        handles: of the stage.
        compressed: names of those that are compressed.

    Attributes:
        names_by_index: index of each compressed handle -> its name.
        errors, factors: e_w and Q, by name; in float32 or more.
    """

    def __init__(
        self, handles: Mapping[str, torch.Tensor], compressed: Collection[str], rank: int, group: Group
    ) -> None:
        self._group = group
        self.names_by_index = {number: name for number, name in enumerate(handles) if name in compressed}
        self.errors: dict[str, torch.Tensor] = {}
        self.factors: dict[str, torch.Tensor] = {}
        for name in self.names_by_index.values():
            matrix = handles[name].detach().flatten(1)
            dtype = torch.promote_types(matrix.dtype, torch.float32)
            self.errors[name] = torch.zeros_like(matrix, dtype=dtype, memory_format=torch.contiguous_format)
            self.factors[name] = self.errors[name].new_empty(matrix.shape[1], rank)
        self.load({}, {})
        self._rounds: dict[str, _Round] = {}
        self._divisor = 1.0

    def sum_up(self, sums: list[torch.Tensor | None], divisor: float) -> Waiting[None]:
        """Replaces this replica's S_w by the approximate sums; yields where it would wait.

        Args:
            sums: in the order of the handles; None where no replica has a gradient.
            divisor: D.
        """
        self._divisor = divisor or 1.0
        present = [(number, name) for number, name in self.names_by_index.items() if sums[number] is not None]
        matrices = {name: self._add_error(name, sums[number]) for number, name in present}
        lefts = [matrix @ _orthonormalise(self.factors[name]) for name, matrix in matrices.items()]
        lefts = [_orthonormalise(left) for left in (yield from all_reduce_many(self._group, lefts))]
        rights = [matrix.T @ left for matrix, left in zip(matrices.values(), lefts, strict=True)]
        factors = yield from all_reduce_many(self._group, rights)
        for (number, name), left, right, factor in zip(present, lefts, rights, factors, strict=True):
            self._rounds[name] = _Round(matrices[name], left, right, factor)
            gradient = sums[number]
            assert gradient is not None
            sums[number] = (left @ factor.T).view(gradient.shape).to(gradient.dtype)

    def _add_error(self, name: str, gradient: torch.Tensor | None) -> torch.Tensor:
        assert gradient is not None
        error = self.errors[name]
        return torch.add(gradient.detach().reshape(error.shape).to(error.dtype), error, alpha=self._divisor)

    def load(self, errors: Mapping[str, torch.Tensor], factors: Mapping[str, torch.Tensor]) -> None:
        """Loads errors and factors; resets those that are missing or of another rank."""
        for name, error in self.errors.items():
            error.copy_(errors[name]) if name in errors else error.zero_()
            factor, saved = self.factors[name], factors.get(name)
            if saved is None or saved.shape != factor.shape:
                saved = torch.randn(factor.shape, generator=torch.Generator().manual_seed(layer_seed(0, 0, name)))
            factor.copy_(saved)

    def finish(self, *, is_made: bool) -> None:
        """Keeps the new errors and factors, if the update is made."""
        for name, new in self._rounds.items() if is_made else ():
            torch.addmm(new.matrix, new.left, new.right.T, alpha=-1.0, out=self.errors[name]).div_(self._divisor)
            self.factors[name] = new.factor
        self._rounds = {}


class LowRankGradientSum(GradientSum):
    """Sums of gradients, of which those of matrices are compressed."""

    def __init__(self, all_reduce: GradientAllReduce, low_rank: LowRankSum) -> None:
        super().__init__(all_reduce)
        self._low_rank = low_rank

    def take(
        self, gradients: Gradients, stop_request: float, find_divisor: Callable[[ReducedGradients], float]
    ) -> Waiting[ReducedGradients]:
        reduced = yield from super().take(gradients, stop_request, find_divisor)
        yield from self._low_rank.sum_up(reduced.gradients, find_divisor(reduced))
        return reduced

    def finish_step(self, *, is_made: bool) -> None:
        self._low_rank.finish(is_made=is_made)

    def local_tensors(self) -> NamedTensors:
        return {f"error/{name}": error for name, error in self._low_rank.errors.items()}

    def common_tensors(self) -> NamedTensors:
        return {f"factor/{name}": factor for name, factor in self._low_rank.factors.items()}

    def load(self, local: Mapping[str, torch.Tensor], common: Mapping[str, torch.Tensor], updates: int) -> None:
        self._low_rank.load(select_kind("error", local), select_kind("factor", common))


def _orthonormalise(columns: torch.Tensor) -> torch.Tensor:
    left: torch.Tensor = torch.linalg.qr(columns).Q
    return left
