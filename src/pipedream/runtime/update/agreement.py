"""By what the replicas of one stage agree: sums of gradients, or averages of weights."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import NamedTuple

import torch

from pipedream.core.plan.sums import SumMethod
from pipedream.runtime.comm.channel import Group
from pipedream.runtime.update.all_reduce import GradientAllReduce
from pipedream.runtime.update.average import OuterOptimizer, WeightAverage
from pipedream.runtime.update.low_rank import LowRankSum


class Agreement(NamedTuple):
    """An `all_reduce`, perhaps with `low_rank` for some gradients, or an `average`; nothing for a lone replica."""

    all_reduce: GradientAllReduce | None = None
    low_rank: LowRankSum | None = None
    average: WeightAverage | None = None

    @classmethod
    def by(
        cls,
        method: SumMethod,
        handles: Mapping[str, torch.nn.Parameter],
        ema: dict[str, torch.Tensor],
        group: Group | None,
        replicas: int,
        tied: Collection[str] = (),
    ) -> Agreement:
        """Returns that of a replica; `tied` weights are not compressed."""
        if group is None:
            return cls()
        if method.averages_weights:
            kind = OuterOptimizer if method.has_outer_steps else WeightAverage
            return cls(average=kind(handles, ema, method, group, replicas))
        low_rank = LowRankSum(handles, method, group, tied) if method.is_low_rank else None
        apart = () if low_rank is None else low_rank.numbers
        sent_dtype = getattr(torch, method.sent_dtype) if method.sent_dtype else None
        all_reduce = GradientAllReduce(list(handles.values()), group, sent_dtype=sent_dtype, apart=apart)
        return cls(all_reduce, low_rank)
