"""One replica of a stage, as the reducer that a plan has chosen needs it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import NamedTuple

import torch

from pipedream.runtime.comm.channel import Group
from pipedream.runtime.update.all_reduce import GradientAllReduce, GradientSum
from pipedream.runtime.update.reducer import NamedTensors


class Replica(NamedTuple):
    """One replica of a stage.

    Attributes:
        handles: the stage's weights, by name.
        ema: the averages over time that the replica keeps of its own weights.
        group: of the stage's replicas.
        replicas: how many they are.
        tied: names of weights that other stages hold, too.
    """

    handles: Mapping[str, torch.nn.Parameter]
    ema: NamedTensors
    group: Group
    replicas: int
    tied: Collection[str] = ()

    def all_reduce(
        self,
        *,
        encode: Callable[[torch.Tensor], torch.Tensor] | None = None,
        decode: Callable[[torch.Tensor], torch.Tensor] | None = None,
        excluded: Collection[int] = (),
    ) -> GradientAllReduce:
        """Returns the all-reduce of gradients, see there."""
        return GradientAllReduce(
            list(self.handles.values()), self.group, encode=encode, decode=decode, excluded=excluded
        )

    def reduce_gradients(
        self,
        encode: Callable[[torch.Tensor], torch.Tensor] | None = None,
        decode: Callable[[torch.Tensor], torch.Tensor] | None = None,
    ) -> GradientSum:
        """Returns the sum of all gradients, see `GradientAllReduce`."""
        return GradientSum(self.all_reduce(encode=encode, decode=decode))
