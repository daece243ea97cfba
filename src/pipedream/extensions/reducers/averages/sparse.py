"""SparseLoCo: the outer step takes the largest values of what replicas have changed (Sarfi et al., arXiv 2508.15706).

After its H updates, replica m with weights w_m has, for the outer weights w and its error e_m (algorithm 1):

    a_m = decay e_m + (w - w_m)
    d_m = what arrives of the code of a_m     the largest values of each chunk, in 2 bits each (`codes`)
    e_m = a_m - d_m                           is kept for the next periods, and takes the place of an outer momentum
    w   = w - lr sum_m d_m / M                and all replicas continue from w

Replicas gather each other's codes, and add them up in the same order. Weights of less than two dimensions have their
chunks in common, so that each does not send scales of its own.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from pipedream.extensions.reducers.averages.average import OuterOptimizer, load_kind
from pipedream.extensions.reducers.averages.codes import ShareCode
from pipedream.extensions.reducers.averages.late import Slices
from pipedream.runtime.comm.channel import Group, Waiting
from pipedream.runtime.update.reducer import NamedTensors
from pipedream.runtime.update.replica import Replica


class Coded(NamedTuple):
    """A tensor for each weight, in float32 or more.

    Attributes:
        rows: as they are coded: each matrix, and all else in one.
        named: by name, in the shapes of the weights; they share memory with `rows`.
    """

    rows: list[torch.Tensor]
    named: NamedTensors

    @classmethod
    def zeros_like(cls, weights: NamedTensors) -> "Coded":
        named = {}
        for name, weight in weights.items():
            dtype = torch.promote_types(weight.dtype, torch.float32)
            named[name] = torch.zeros_like(weight, dtype=dtype, memory_format=torch.contiguous_format)
        rows = [tensor for tensor in named.values() if tensor.dim() > 1]
        vectors = {name: tensor for name, tensor in named.items() if tensor.dim() < 2}
        if vectors:
            rows.append(torch.cat([vector.view(-1) for vector in vectors.values()]))
            pieces = torch.split(rows[-1], [vector.numel() for vector in vectors.values()])
            for (name, vector), piece in zip(vectors.items(), pieces, strict=True):
                named[name] = piece.view(vector.shape)
        return cls(rows, named)


class SparseAverage(OuterOptimizer):
    """One replica's part in the sparse averages of its stage.

    Attributes:
        errors: e_m by name, in float32 or more.
    """

    def __init__(
        self, replica: Replica, period: int, share: float, rate: float, decay: float, *, overlaps: bool = False
    ) -> None:
        super().__init__(replica, period, rate, momentum=0.0, overlaps=overlaps)
        self._decay = decay
        self._errors = Coded.zeros_like(self.outer)
        self.errors = self._errors.named
        self._code = ShareCode([row.numel() for row in self._errors.rows], share)

    def local_tensors(self) -> NamedTensors:
        return super().local_tensors() | {f"error/{name}": error for name, error in self.errors.items()}

    def load(self, local: Mapping[str, torch.Tensor], common: Mapping[str, torch.Tensor], updates: int) -> None:
        super().load(local, common, updates)
        load_kind("error", self.errors, local)

    def _find_gradient(self) -> Waiting[NamedTensors]:
        totals = yield from self._begin_sum().take()
        rows = zip(self.outer.items(), totals, strict=True)
        return {name: (total / self._replicas).to(outer.dtype) for (name, outer), total in rows}

    def _begin_sum(self) -> "CodeSums":
        sent = self._encode() if self.outer else torch.empty(0, dtype=torch.uint8)
        return CodeSums(self._group, sent, self._code, self.outer, self._period if self._overlaps else 1)

    def _encode(self) -> torch.Tensor:
        """Returns the code of this period, and leaves in the errors what it lacks."""
        for name, error in self.errors.items():
            change = self.outer[name].to(error.dtype) - self._handles[name].detach()
            error.mul_(self._decay).add_(change)
        code = self._code.encode(self._errors.rows)
        self._code.add(code, self._errors.rows, -1.0)
        return code


class CodeSums:
    """Sums of what arrives of the codes of a group, which are gathered in slices.

    Args:
        sent: this member's code; empty if there are no weights.
        count: of slices.
    """

    def __init__(self, group: Group, sent: torch.Tensor, code: ShareCode, weights: NamedTensors, count: int) -> None:
        self._sent, self._code, self._weights = sent, code, weights
        self._slices = Slices(group.all_gather, sent, count)

    @property
    def parts(self) -> list[torch.Tensor]:
        return self._add_up([self._sent])

    def begin_next(self) -> None:
        self._slices.begin_next()

    def take(self) -> Waiting[list[torch.Tensor]]:
        slices = yield from self._slices.take()
        return self._add_up([torch.cat(pieces) for pieces in zip(*slices, strict=True)])

    def _add_up(self, codes: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        total = Coded.zeros_like(self._weights)
        for code in codes if self._weights else ():
            self._code.add(code, total.rows, 1.0)
        return list(total.named.values())
