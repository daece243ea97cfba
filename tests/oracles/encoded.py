"""Encoded messages in plain PyTorch: blocks one after the other, as docs/less_communication.md describes them."""

import copy
from collections.abc import Sequence
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn


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


class _Sent(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, encodings: tuple[str, str], divisor: int) -> Tensor:
        ctx.encoding, ctx.divisor = encodings[1], divisor
        return rounded(tensor, encodings[0])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return rounded(gradients[0] / ctx.divisor, ctx.encoding) * ctx.divisor, None, None


def sent_after(model: nn.Module, layers: Sequence[str], messages: str | tuple[str, str], of_mean: bool) -> nn.Module:
    """Returns a copy of a model in which the outputs of some layers arrive as their messages say.

    Args:
        of_mean: the gradients that are sent are those of the mean over samples, of a loss that is a sum.
    """
    model = copy.deepcopy(model)
    encodings = (messages, messages) if isinstance(messages, str) else messages
    for name in layers:
        model.get_submodule(name).register_forward_hook(partial(_send, encodings, of_mean))
    return model


def _send(encodings: tuple[str, str], of_mean: bool, module: nn.Module, arguments: Any, output: Any) -> Any:
    if isinstance(output, tuple):
        return tuple(_send(encodings, of_mean, module, arguments, part) for part in output)
    if not (isinstance(output, Tensor) and output.requires_grad):
        return output
    return _Sent.apply(output, encodings, len(output) if of_mean else 1)
