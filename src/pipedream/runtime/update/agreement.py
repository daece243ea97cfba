"""Makes the reducer that a plan has chosen for the replicas of a stage."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch

from pipedream.core.plan.sums import SumMethod
from pipedream.runtime.comm.channel import Group
from pipedream.runtime.update.all_reduce import GradientAllReduce, GradientSum
from pipedream.runtime.update.average import OuterOptimizer, WeightAverage
from pipedream.runtime.update.low_rank import LowRankGradientSum, LowRankSum
from pipedream.runtime.update.reducer import Reducer


def make_reducer(
    method: SumMethod,
    handles: Mapping[str, torch.nn.Parameter],
    ema: dict[str, torch.Tensor],
    group: Group | None,
    replicas: int,
    tied: Collection[str] = (),
) -> Reducer:
    """Returns the part of one replica; `group` is None for a single one. `tied` weights are not compressed."""
    if group is None:
        return Reducer()
    if method.averages_weights:
        average_class = OuterOptimizer if method.has_outer_steps else WeightAverage
        return average_class(handles, ema, method, group, replicas)
    low_rank = LowRankSum(handles, method, group, tied) if method.is_low_rank else None
    excluded = () if low_rank is None else low_rank.names_by_index
    sent_dtype = getattr(torch, method.sent_dtype) if method.sent_dtype else None
    all_reduce = GradientAllReduce(list(handles.values()), group, sent_dtype=sent_dtype, excluded=excluded)
    return GradientSum(all_reduce) if low_rank is None else LowRankGradientSum(all_reduce, low_rank)
