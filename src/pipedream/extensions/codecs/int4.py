"""int4: blocks of 64 values are rotated, then share a scale, their greatest size / 7 (as TAH-Quant, arXiv 2506.01352).

The rotation, by an orthonormal Hadamard matrix, spreads outliers over a block.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

from pipedream.core.late import LateModule
from pipedream.core.plan.codec import Codec

if TYPE_CHECKING:
    import torch

    from pipedream.runtime.comm import blocks
else:
    torch, blocks = LateModule("torch"), LateModule("pipedream.runtime.comm.blocks")


class Int4(Codec):
    """4.5 bits a value."""

    name, bits = "int4", 4 + 32 / 64

    def encode(self, tensor: torch.Tensor) -> torch.Tensor:
        return blocks.encode(tensor, 32, _write_codes)

    def decode(self, code: torch.Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
        rows = blocks.decode(code, 32, dtype, shape, _split_codes)
        return blocks.join(torch.matmul(rows, _make_hadamard(rows.dtype, code.device)), shape)


def _write_codes(rows: torch.Tensor, scales: torch.Tensor, codes: torch.Tensor) -> None:
    rounded = blocks.round_to_scale(rows @ _make_hadamard(rows.dtype, rows.device), scales, 7)
    first, second = rounded.to(torch.int8).chunk(2, 1)
    torch.bitwise_or(first & 0xF, second << 4, out=codes)


def _split_codes(codes: torch.Tensor) -> torch.Tensor:
    return torch.cat([codes << 4 >> 4, codes >> 4], 1)


@cache
def _make_hadamard(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Returns Sylvester's matrix over the root of its size, its own inverse."""
    matrix = torch.ones(1, 1, dtype=torch.float64)
    while len(matrix) < 64:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return matrix.div(64**0.5).to(device, dtype)


CODECS = (Int4(),)
