"""Encoded messages in plain PyTorch: blocks one after the other, as docs/less_communication.md describes them."""

from functools import cache

import torch
from torch import Tensor


def rounded(tensor: Tensor, encoding: str) -> Tensor:
    """Returns what arrives of a tensor that is sent."""
    if encoding == "full" or not tensor.is_floating_point() or tensor.numel() * tensor.element_size() < 1024:
        return tensor.clone()
    if encoding in ("bfloat16", "float16"):
        return tensor.to(getattr(torch, encoding)).to(tensor.dtype)
    blocks = tensor.contiguous().reshape(-1).to(torch.promote_types(tensor.dtype, torch.float32)).split(64)
    block_of = _block_of_int8 if encoding == "int8" else _block_of_int4
    return torch.cat([block_of(block) for block in blocks]).to(tensor.dtype).reshape(tensor.shape)


def _block_of_int8(block: Tensor) -> Tensor:
    scale = max(float((block.abs().max() / 127).float()), torch.finfo(torch.float32).tiny)
    return (block / scale).round() * scale


@cache
def _hadamard() -> Tensor:
    signs = [[(-1) ** (row & column).bit_count() for column in range(64)] for row in range(64)]
    return torch.tensor(signs, dtype=torch.float64) / 8


def _block_of_int4(block: Tensor) -> Tensor:
    hadamard = _hadamard().to(block.dtype)
    turned = torch.cat([block, block.new_zeros(64 - len(block))]) @ hadamard
    scale = max(float((turned.abs().max() / 7).float()), torch.finfo(torch.float32).tiny)
    return ((turned / scale).round() * scale @ hadamard)[: len(block)]
