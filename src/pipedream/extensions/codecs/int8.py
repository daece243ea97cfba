"""int8: blocks of 64 values share a scale, their greatest size / 127 (as SWARM, arXiv 2301.11913)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipedream.core.late import LateModule
from pipedream.core.plan.codec import Codec

if TYPE_CHECKING:
    import torch

    from pipedream.runtime.comm import blocks
else:
    blocks = LateModule("pipedream.runtime.comm.blocks")


class Int8(Codec):
    """8.5 bits a value."""

    name, bits = "int8", 8 + 32 / 64

    def encode(self, tensor: torch.Tensor) -> torch.Tensor:
        return blocks.encode(tensor, 64, _write_codes)

    def decode(self, code: torch.Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
        return blocks.join(blocks.decode(code, 64, dtype, shape), shape)


def _write_codes(rows: torch.Tensor, scales: torch.Tensor, codes: torch.Tensor) -> None:
    codes.copy_(blocks.scale(rows, scales, 127).round_())


CODECS = (Int8(),)
