"""The models of the curve and of `sizes`, as chains of layers, and a microbatch of data for each; chains under FSDP."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import functional

_OPTIMIZER = partial(torch.optim.SGD, lr=1e-3, momentum=0.9)
_VOCABULARY = 512


@dataclass(frozen=True)
class Job:
    """A model and what it is trained on.

    Attributes:
        title: in tables.
        make: returns the model, with the same weights at each call.
        batch: returns so many samples and their targets.
        samples: in a microbatch.
        loss: of the model's output and the targets.
        optimizer: of parameters.
    """

    title: str
    make: Callable[[], nn.Sequential]
    batch: Callable[[int], tuple[torch.Tensor, torch.Tensor]]
    samples: int
    loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    optimizer: Callable[[Iterable[Any]], torch.optim.Optimizer] = _OPTIMIZER


class _Convolution(nn.Conv2d):
    """A convolution, and a pool after the last one of a block."""

    def __init__(self, channels: int, width: int, *, ends_block: bool) -> None:
        super().__init__(channels, width, 3, padding=1)
        self.ends_block = ends_block

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        images = functional.relu(super().forward(images))
        return functional.max_pool2d(images, 2) if self.ends_block else images


def _make_vgg(wider: float = 1.0) -> nn.Sequential:
    """Convolutions, then dense layers with most of the weights; takes float32[batch, 3, 32, 32].

    Args:
        wider: factor on the widths of all layers.
    """
    dense = round(1024 * wider)
    layers: list[nn.Module] = []
    channels = 3
    for block in ((60, 60), (64, 64), (192, 192, 192, 192)):
        for number, width in enumerate((round(width * wider) for width in block), 1):
            layers.append(_Convolution(channels, width, ends_block=number == len(block)))
            channels = width
    layers += [nn.Flatten(), nn.Linear(channels * 16, dense), nn.ReLU(), nn.Linear(dense, dense), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(dense, 10))


class _Embedding(nn.Embedding):
    """Tokens and learned positions: int64[batch, length] -> float32[length, batch, width]."""

    def __init__(self, width: int, length: int) -> None:
        super().__init__(_VOCABULARY, width)
        self.positions = nn.Parameter(torch.zeros(length, 1, width))

    def reset_parameters(self) -> None:
        super().reset_parameters()
        if "positions" in self._parameters:  # not while nn.Embedding is made
            nn.init.zeros_(self.positions)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return super().forward(tokens.T) + self.positions


class _Words(nn.Linear):
    """Scores the vocabulary: float32[length, batch, width] -> float32[batch, length, words]."""

    def __init__(self, width: int) -> None:
        super().__init__(width, _VOCABULARY)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return super().forward(values).transpose(0, 1)


class _LSTM(nn.LSTM):
    """Returns the outputs alone."""

    def forward(self, values: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        outputs: torch.Tensor = super().forward(values)[0]
        return outputs


def _make_lstm(width: int = 320, length: int = 32) -> nn.Sequential:
    """A language model of four LSTM layers; takes int64[batch, length]."""
    layers = [_LSTM(width, width) for _ in range(4)]
    return nn.Sequential(_Embedding(width, length), *layers, _Words(width))


class _Block(nn.TransformerEncoderLayer):
    """A block of a decoder-only transformer."""

    def __init__(self, width: int) -> None:
        super().__init__(width, 4, 4 * width, dropout=0.0, norm_first=True)

    def reset_parameters(self) -> None:
        self.self_attn._reset_parameters()  # public in all other modules of torch

    def forward(self, values: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        mask = nn.Transformer.generate_square_subsequent_mask(values.shape[0])
        return super().forward(values, mask, is_causal=True)


def _make_gpt(width: int, length: int, blocks: int) -> nn.Sequential:
    """A small GPT; takes int64[batch, length]."""
    layers = [_Block(width) for _ in range(blocks)]
    return nn.Sequential(_Embedding(width, length), *layers, nn.LayerNorm(width), _Words(width))


class _Both(nn.Module):
    """Embeds source and target: int64[batch, 2, length] -> what encoder and decoder begin with."""

    def __init__(self, width: int, length: int) -> None:
        super().__init__()
        self.source, self.target = _Embedding(width, length), _Embedding(width, length)

    def forward(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.source(tokens[:, 0]), self.target(tokens[:, 1])


class _Encode(nn.TransformerEncoderLayer):
    """An encoder layer; the decoder's input passes by."""

    def forward(self, values: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[override]
        source, target = values
        return super().forward(source), target


class _Decode(nn.TransformerDecoderLayer):
    """A decoder layer; the encoder's output passes by."""

    def forward(self, values: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[override]
        source, target = values
        mask = nn.Transformer.generate_square_subsequent_mask(target.shape[0])
        return source, super().forward(target, source, tgt_mask=mask, tgt_is_causal=True)


class _TargetWords(_Words):
    """Scores the vocabulary for each place of the target."""

    def forward(self, values: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:  # type: ignore[override]
        return super().forward(values[1])


def _make_encoder_decoder(width: int = 160, length: int = 64) -> nn.Sequential:
    """A translation model: six encoder layers and four decoder layers; takes int64[batch, 2, length]."""
    how: dict[str, Any] = {"dropout": 0.0, "norm_first": True}
    encoder = [_Encode(width, 4, 4 * width, **how) for _ in range(6)]
    decoder = [_Decode(width, 4, 4 * width, **how) for _ in range(4)]
    return nn.Sequential(_Both(width, length), *encoder, *decoder, _TargetWords(width))


def _make_seeded(make: Callable[[], nn.Sequential]) -> nn.Sequential:
    torch.manual_seed(0)
    return make()


def _draw_images(samples: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(samples, 3, 32, 32, generator=generator), torch.randint(0, 10, (samples,), generator=generator)


def _draw_tokens(samples: int, *, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, _VOCABULARY, (samples, length + 1), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


def _draw_pairs(samples: int, *, length: int = 64) -> tuple[torch.Tensor, torch.Tensor]:
    (source, _), (target, words) = _draw_tokens(samples, length=length), _draw_tokens(samples, length=length)
    return torch.stack((source, target), 1), words


def _compute_token_loss(scores: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(scores.flatten(0, 1), words.flatten())


def shard_fully(model: nn.Sequential, *, halved: bool = False) -> None:
    """Shards each layer by torch's FSDP; one on the meta device gets memory and weights.

    Args:
        halved: gathers weights once, for forward and backward, and sums gradients in bfloat16. The compute stays in
            float32: in bfloat16 it takes many times as long on a CPU without instructions for it.
    """
    how: dict[str, Any] = {}
    if halved:
        how = {"mp_policy": MixedPrecisionPolicy(reduce_dtype=torch.bfloat16), "reshard_after_forward": False}
    is_meta, mesh = next(model.parameters()).is_meta, init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in (*model, model):
        if any(True for _ in layer.parameters()):
            fully_shard(layer, mesh=mesh, **how)
    if is_meta:
        model.to_empty(device="cpu")
        for module in model.modules():
            if reset := getattr(module, "reset_parameters", None):
                reset()


def make_gpt_job(title: str, *, width: int, length: int, samples: int, blocks: int = 8) -> Job:
    """Returns a GPT of so many blocks, on random tokens."""
    make = partial(_make_seeded, partial(_make_gpt, width, length, blocks))
    return Job(title, make, partial(_draw_tokens, length=length), samples, _compute_token_loss)


MODELS = {
    "vgg": Job("VGG-like", partial(_make_seeded, _make_vgg), _draw_images, 24, functional.cross_entropy),
    "lstm": Job(
        "LSTM language model",
        partial(_make_seeded, _make_lstm),
        partial(_draw_tokens, length=32),
        16,
        _compute_token_loss,
    ),
    "encoder_decoder": Job(
        "encoder-decoder", partial(_make_seeded, _make_encoder_decoder), _draw_pairs, 8, _compute_token_loss
    ),
    "gpt": make_gpt_job("small GPT", width=160, length=128, samples=8),
}
"""Name -> what is trained."""

SIZED = {
    f"gpt_{millions}m": make_gpt_job(f"GPT of width {width}", width=width, length=128, samples=2, blocks=6)
    for millions, width in {1: 112, 3: 192, 10: 384, 30: 640}.items()
} | {
    f"vgg_{millions}m": replace(
        MODELS["vgg"], title=f"VGG-like, {wider} times as wide", make=partial(_make_seeded, partial(_make_vgg, wider))
    )
    for millions, wider in {1: 0.43, 3: 0.74, 10: 1.4, 30: 2.36}.items()
}
"""The same of models of about so many million weights."""

LARGE = make_gpt_job("GPT of 101 million weights", width=1024, length=16, samples=4)
"""With gradients and momentum 1.2 GB."""
