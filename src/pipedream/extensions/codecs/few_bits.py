"""int2, int3: blocks of 64 values share a scale; levels are odd multiples of half a step, as many above zero as below.

Meant for differences (`extensions/deltas/`): activations themselves need more bits.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from pipedream.core.late import LateModule
from pipedream.core.plan.codec import Codec

if TYPE_CHECKING:
    import torch

    from pipedream.runtime.comm import blocks
else:
    torch, blocks = LateModule("torch"), LateModule("pipedream.runtime.comm.blocks")


class Int3(Codec):
    """3.5 bits a value: eight values are packed into as many bytes as one has bits."""

    name, bits, value_bits = "int3", 3 + 32 / 64, 3
    costs_like = "int4"

    def encode(self, tensor: torch.Tensor) -> torch.Tensor:
        return blocks.encode(tensor, 8 * self.value_bits, partial(_write_codes, bits=self.value_bits))

    def decode(self, code: torch.Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
        split = partial(_split_codes, bits=self.value_bits)
        return blocks.join(blocks.decode(code, 8 * self.value_bits, dtype, shape, split), shape)


class Int2(Int3):
    """2.5 bits a value."""

    name, bits, value_bits = "int2", 2 + 32 / 64, 2


def _write_codes(rows: torch.Tensor, scales: torch.Tensor, codes: torch.Tensor, bits: int) -> None:
    half = 1 << bits - 1
    levels = blocks.scale(rows, scales, half - 0.5).floor_().add_(half).clamp_(0, 2 * half - 1).to(torch.int32)
    # A block of zeros is decoded to zeros, not to half a step of the least scale, with which arithmetic is slow.
    scales.masked_fill_(rows.abs().amax(1, keepdim=True) == 0, 0)
    first, *others = levels.chunk(8, 1)
    packed = first.clone()
    for place, column in enumerate(others, 1):
        packed |= column << bits * place
    # Of four bytes of eight values, as many are used as a value has bits.
    codes.view(-1, 8, bits).copy_(packed.view(torch.int8).view(-1, 8, 4)[..., :bits])


def _split_codes(codes: torch.Tensor, bits: int) -> torch.Tensor:
    packed = torch.zeros(len(codes), 8, 4, dtype=torch.int8, device=codes.device)
    packed[..., :bits] = codes.reshape(-1, 8, bits)
    eights, mask = packed.view(torch.int32).view(-1, 8), (1 << bits) - 1
    levels = torch.cat([eights >> bits * place & mask for place in range(8)], 1)
    return levels - ((1 << bits - 1) - 0.5)


CODECS = Int3(), Int2()
