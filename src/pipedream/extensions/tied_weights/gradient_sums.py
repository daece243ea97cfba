"""Sums over the holders of tied weights (`core.plan.stage`).

At an update the holders sum their gradients, so that the copies stay equal to the bit. All these stages must make the
same updates (`core.schedule.update_policy`).
"""

from collections.abc import Mapping, Sequence

import torch

from pipedream.core.plan.stage import TiedWeights
from pipedream.runtime.comm.channel import Group, Waiting
from pipedream.runtime.update.all_reduce import all_reduce_many


class TiedGradientSum:
    """One rank's part in the gradient sums over all holders of the same weights.

    Args:
        handles: stage of this rank that holds the weights -> its handles by name.
        replicas: of each stage; each replica contributes its share of the stage's sum.
    """

    def __init__(
        self,
        tied: TiedWeights,
        handles: Mapping[int, Mapping[str, torch.Tensor]],
        replicas: Sequence[int],
        group: Group,
    ) -> None:
        self._indices = {stage: [list(names).index(name) for name in tied.names] for stage, names in handles.items()}
        handles_of_one = next(iter(handles.values()))
        self._like = [handles_of_one[name] for name in tied.names]
        self._replicas = replicas
        self._group = group

    def all_reduce(self, gradients: Mapping[int, list[torch.Tensor | None]]) -> Waiting[None]:
        """Replaces this rank's sums, by stage, with those over all holders; yields where it would wait.

        A weight for which no holder has a gradient gets None, as in one process.
        """
        local_sums = [torch.zeros_like(handle) for handle in self._like]
        holder_counts = torch.zeros(len(local_sums), dtype=torch.float64)
        for stage, indices in self._indices.items():
            share = self._replicas[stage]
            for n, index in enumerate(indices):
                if (gradient := gradients[stage][index]) is not None:
                    local_sums[n] += gradient / share if share > 1 else gradient
                    holder_counts[n] += 1
        *totals, counts = yield from all_reduce_many(self._group, [*local_sums, holder_counts])
        for stage, indices in self._indices.items():
            for index, total, count in zip(indices, totals, counts.tolist(), strict=True):
                gradients[stage][index] = total.clone() if count else None  # each is divided and clipped in place
