"""int4: blocks of 64 values are rotated, then share a scale, their greatest size / 7 (as TAH-Quant, arXiv 2506.01352).

The rotation, by an orthonormal Hadamard matrix, spreads outliers over a block. `int4_stochastic` rounds up with a
probability equal to the fraction, so that the mean of many roundings is the value itself.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import TYPE_CHECKING

from pipedream.core.late import LateModule
from pipedream.core.plan.codec import Codec

if TYPE_CHECKING:
    import torch

    from pipedream.runtime.comm import blocks
else:
    torch, blocks = LateModule("torch"), LateModule("pipedream.runtime.comm.blocks")


_DRAWS = 1021  # a prime: neighbouring scales, of one octave or the next, have different draws


class Int4(Codec):
    """4.5 bits a value."""

    name, bits = "int4", 4 + 32 / 64

    def encode(self, tensor: torch.Tensor) -> torch.Tensor:
        return blocks.encode(tensor, 32, partial(_write_codes, round_rows=_round_to_nearest))

    def decode(self, code: torch.Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
        rows = blocks.decode(code, 32, dtype, shape, _split_codes)
        return blocks.join(torch.matmul(rows, _make_hadamard(rows.dtype, code.device)), shape)


class StochasticInt4(Int4):
    """Int4 with stochastic rounding, which depends on the tensor alone: a resumed run rounds as before."""

    name = "int4_stochastic"

    def encode(self, tensor: torch.Tensor) -> torch.Tensor:
        return blocks.encode(tensor, 32, partial(_write_codes, round_rows=_round_stochastically))


def _write_codes(
    rows: torch.Tensor,
    scales: torch.Tensor,
    codes: torch.Tensor,
    round_rows: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
) -> None:
    scaled = blocks.scale(rows @ _make_hadamard(rows.dtype, rows.device), scales, 7)
    first, second = round_rows(scaled, scales).to(torch.int8).chunk(2, 1)
    torch.bitwise_or(first & 0xF, second << 4, out=codes)


def _round_to_nearest(scaled: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    return scaled.round_()


def _round_stochastically(scaled: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    # The upper half of a scale's bits chooses the draws: it differs from minibatch to minibatch, but not between
    # computations that differ in the last bits.
    chosen = (scales.view(torch.int32).view(-1) >> 16) % _DRAWS
    return scaled.add_(_make_draws(scaled.device)[chosen]).floor_()


@cache
def _make_draws(device: torch.device) -> torch.Tensor:
    """Returns uniform numbers from 0 to below 1, a row of 64 for each choice."""
    return torch.rand(_DRAWS, 64, generator=torch.Generator().manual_seed(0)).to(device)


def _split_codes(codes: torch.Tensor) -> torch.Tensor:
    return torch.cat([codes << 4 >> 4, codes >> 4], 1)


@cache
def _make_hadamard(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Returns Sylvester's matrix over the root of its size, its own inverse."""
    matrix = torch.ones(1, 1, dtype=torch.float64)
    while len(matrix) < 64:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return matrix.div(64**0.5).to(device, dtype)


CODECS = Int4(), StochasticInt4()
