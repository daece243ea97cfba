"""bfloat16, float16: gradients are sent and summed in 16 bits; all else keeps its precision."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from pipedream.core.model.weight_shapes import Matrices
from pipedream.core.plan.cost import SumCosts
from pipedream.core.plan.sum_method import SumMethod

_ROUNDING_S = 0.2e-9
"""Seconds of one core, both conversions, for each byte of float32: medians over shapes from 256 x 256 to 4096 x 1024,
torch 2.13, an x86 server."""


@dataclass(frozen=True, repr=False)
class _SixteenBits(SumMethod):
    def costs(self, parameter_bytes: float, matrices: Iterable[Matrices], value_bytes: float = 4.0) -> SumCosts:
        share = min(1.0, 2 / value_bytes)
        return SumCosts(share, work_s_per_byte=_ROUNDING_S * (share < 1))

    def make_reducer(self, replica: Any) -> Any:
        return replica.reduce_gradients(encode=self._encode)

    def _encode(self, flat: Any) -> Any:
        return getattr(flat, self._convert)() if flat.is_floating_point() and flat.itemsize > 2 else flat

    _convert = ""


@dataclass(frozen=True, repr=False)
class BFloat16(_SixteenBits):
    """The range of float32."""

    name = text = "bfloat16"
    _convert = "bfloat16"


@dataclass(frozen=True, repr=False)
class Float16(_SixteenBits):
    """Finer; a sum above 65,504 is infinite."""

    name = text = "float16"
    _convert = "half"


SUMS = (BFloat16, Float16)
