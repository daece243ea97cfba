"""How the replicas of one stage agree: by sums of gradients, or by averages of weights."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import NamedTuple

import torch

from pipedream.core.plan.sums import SumMethod
from pipedream.runtime.comm.channel import Group
from pipedream.runtime.update.all_reduce import GradientAllReduce
from pipedream.runtime.update.average import OuterOptimizer, WeightAverage
from pipedream.runtime.update.low_rank import LowRankSum


class Reducer(NamedTuple):
    """An `all_reduce`, with `low_rank` for some gradients or without, or an `average`; neither for a single replica."""

    all_reduce: GradientAllReduce | None = None
    low_rank: LowRankSum | None = None
    average: WeightAverage | None = None

    @classmethod
    def make(
        cls,
        method: SumMethod,
        handles: Mapping[str, torch.nn.Parameter],
        ema: dict[str, torch.Tensor],
        group: Group | None,
        replicas: int,
        tied: Collection[str] = (),
    ) -> Reducer:
        """Returns the agreement of a replica; `tied` weights are not compressed."""
        if group is None:
            return cls()
        if method.averages_weights:
            average_class = OuterOptimizer if method.has_outer_steps else WeightAverage
            return cls(average=average_class(handles, ema, method, group, replicas))
        low_rank = LowRankSum(handles, method, group, tied) if method.is_low_rank else None
        excluded = () if low_rank is None else low_rank.names_by_index
        sent_dtype = getattr(torch, method.sent_dtype) if method.sent_dtype else None
        all_reduce = GradientAllReduce(list(handles.values()), group, sent_dtype=sent_dtype, excluded=excluded)
        return cls(all_reduce, low_rank)
