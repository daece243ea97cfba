"""Encoded messages in plain PyTorch: blocks one after the other, as docs/less_communication.md describes them."""

from functools import cache, partial

import torch
from torch import Tensor


def rounded(tensor: Tensor, encoding: str) -> Tensor:
    """Returns what arrives of a tensor that is sent."""
    if encoding == "full" or not tensor.is_floating_point() or tensor.numel() * tensor.element_size() < 1024:
        return tensor.clone()
    if encoding in ("bfloat16", "float16"):
        return tensor.to(getattr(torch, encoding)).to(tensor.dtype)
    blocks = tensor.contiguous().reshape(-1).to(torch.promote_types(tensor.dtype, torch.float32)).split(64)
    block_of = {"int8": _block_of_int8, "int4": _block_of_int4, "int4_stochastic": _block_of_stochastic_int4}
    block_of |= {f"int{bits}": partial(_block_of_few_bits, bits) for bits in (2, 3)}
    return torch.cat([block_of[encoding](block) for block in blocks]).to(tensor.dtype).reshape(tensor.shape)


def _block_of_few_bits(bits: int, block: Tensor) -> Tensor:
    half = 2 ** (bits - 1)
    scale = float((block.abs().max() / (half - 0.5)).float())
    return ((block / scale).floor().clamp(-half, half - 1) + 0.5) * scale if scale else block


def _block_of_int8(block: Tensor) -> Tensor:
    scale = max(float((block.abs().max() / 127).float()), torch.finfo(torch.float32).tiny)
    return (block / scale).round() * scale


@cache
def _hadamard() -> Tensor:
    signs = [[(-1) ** (row & column).bit_count() for column in range(64)] for row in range(64)]
    return torch.tensor(signs, dtype=torch.float64) / 8


def _block_of_int4(block: Tensor) -> Tensor:
    turned, scale = _turn(block)
    return ((turned / scale).round() * scale @ _hadamard().to(block.dtype))[: len(block)]


def _block_of_stochastic_int4(block: Tensor) -> Tensor:
    turned, scale = _turn(block)
    upper_half = torch.tensor(scale).view(torch.int32).item() >> 16
    draws = torch.rand(1021, 64, generator=torch.Generator().manual_seed(0))[upper_half % 1021]
    return ((turned / scale + draws).floor() * scale @ _hadamard().to(block.dtype))[: len(block)]


def _turn(block: Tensor) -> tuple[Tensor, float]:
    turned = torch.cat([block, block.new_zeros(64 - len(block))]) @ _hadamard().to(block.dtype)
    return turned, max(float((turned.abs().max() / 7).float()), torch.finfo(torch.float32).tiny)
