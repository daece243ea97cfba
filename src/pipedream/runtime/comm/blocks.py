"""Codes of blocks of values that share a scale, for encodings of few bits.

Blocks are taken row by row. A code is the blocks' scales in float32, followed by the codes of the values, as uint8. If
one value of a block is not finite, none of the decoded ones are.
"""

from collections.abc import Callable
from math import prod

import torch
from torch import nn

BLOCK = 64
"""Values that share a scale."""

_SCALE_BYTES = 4
_MIN_SCALE = torch.finfo(torch.float32).tiny  # keeps a block of zeros from dividing by 0
_BLOCKS_AT_ONCE = 1 << 11
"""Few enough for their temporaries to stay in a CPU's cache."""


def encode(
    tensor: torch.Tensor, code_bytes: int, write: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]
) -> torch.Tensor:
    """Returns scales and codes.

    Args:
        code_bytes: of a block.
        write: (blocks, scales, codes): writes scales and codes of rows of blocks, which have float32 or more.
    """
    values = tensor.contiguous().view(-1)
    blocks = nn.functional.pad(values, (0, -values.numel() % BLOCK)).view(-1, BLOCK)  # zeros change no maximum
    scales = torch.empty(len(blocks), 1, dtype=torch.float32, device=tensor.device)
    codes = torch.empty(len(blocks), code_bytes, dtype=torch.int8, device=tensor.device)
    step = _BLOCKS_AT_ONCE if tensor.is_cpu else max(len(blocks), 1)
    for begin in range(0, len(blocks), step):
        rows = slice(begin, begin + step)
        some = blocks[rows]
        write(some.to(torch.promote_types(some.dtype, torch.float32)), scales[rows], codes[rows])
    return torch.cat([scales.view(torch.uint8).view(-1), codes.view(torch.uint8).view(-1)])


def scale(blocks: torch.Tensor, scales: torch.Tensor, greatest: float) -> torch.Tensor:
    """Writes the scales with which the greatest size in a block becomes `greatest`, and returns the scaled values."""
    scales.copy_(blocks.abs().amax(1, keepdim=True) / greatest).clamp_(_MIN_SCALE)
    return blocks / scales


def decode(
    code: torch.Tensor,
    code_bytes: int,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    split: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> torch.Tensor:
    """Returns blocks in rows, in this dtype or, of fewer bits, in float32.

    Args:
        split: codes of blocks, as int8 -> numbers; by default each code is one.
    """
    count = -(-prod(shape) // BLOCK)
    scales, codes = code[: count * _SCALE_BYTES], code[count * _SCALE_BYTES :]
    rows = codes.view(torch.int8).view(count, code_bytes)
    numbers = (rows if split is None else split(rows)).to(torch.promote_types(dtype, torch.float32))
    return numbers.mul_(scales.view(torch.float32).view(count, 1))


def join(blocks: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """Returns the values of blocks in a tensor."""
    return blocks.view(-1)[: prod(shape)].view(shape)
