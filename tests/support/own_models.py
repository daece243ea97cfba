"""Small models of all kinds, written as their users write them: none is made for a pipeline.

Each trains in a plain loop in float64 and takes a few milliseconds per step. `models` has those of transformers too.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm, weight_norm
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils.checkpoint import checkpoint

WIDTH = 16
WORDS = 23
CLASSES = 5
PAD = 0
IGNORED = -100


def samples_of(batch: Any) -> int:
    """Returns the number of samples of a batch."""
    while not isinstance(batch, Tensor):
        batch = next(iter(batch.values())) if isinstance(batch, Mapping) else batch[0]
    return len(batch)


def targets_of(batch: Any) -> int:
    """Returns the number of targets of a batch, or of samples if its targets are not one tensor."""
    is_pair = isinstance(batch, tuple) and isinstance(batch[1], Tensor)
    return batch[1].numel() if is_pair else samples_of(batch)


@dataclass(frozen=True)
class Case:
    """A model, its batches and its loss.

    Attributes:
        make: returns a new model; `build` gives it the same weights each time.
        batch: (seed, samples, length) -> what a loader yields: (inputs, targets) if there is a loss, otherwise the
            inputs; these are a tensor, a tuple of positional or a dict of keyword arguments.
        loss: as a user gives it to a pipeline; None: the model's output has a ``.loss``.
        amount: batch -> what the loss is a mean over, written independently of the loss.
        varies_length: takes batches of different lengths.
        needs_hf: the model is one of transformers.
        float32_inside: computes in float32 in some places, whatever its weights are.
        amplifies: makes rounding errors of float64 large, also in the plain loop: many norms over few values.
        dtype: of the weights and batches.
        autocast: dtype of the forwards; None computes in the dtype of the weights.
    """

    name: str
    make: Callable[[], nn.Module]
    batch: Callable[[int, int, int], Any]
    loss: Callable[..., Any] | None = None
    amount: Callable[[Any], float] = targets_of
    varies_length: bool = True
    needs_hf: bool = False
    float32_inside: bool = False
    amplifies: bool = False
    dtype: torch.dtype = torch.float64
    autocast: torch.dtype | None = None

    def __str__(self) -> str:
        return self.name

    @property
    def tolerance(self) -> float:
        """How far two runs may differ, relative to the size of a tensor."""
        return 1e-5 if self.float32_inside or self.amplifies else 1e-9

    def casting(self) -> torch.autocast:
        """Returns the context of the forwards."""
        return torch.autocast("cpu", self.autocast, enabled=self.autocast is not None)

    def build(self) -> nn.Module:
        """Returns the model in training mode; the global generator is left alone."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(11)
            return self.make().train()

    def inputs(self, batch: Any) -> Any:
        """Returns the model's inputs from a batch."""
        return batch if self.loss is None else batch[0]


# -- batches ----------------------------------------------------------------------------------------------------------


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def images(seed: int, samples: int, length: int) -> tuple[Tensor, Tensor]:
    """Square images, whose side follows from the length, and their classes."""
    g = _generator(seed)
    side = 8 + 4 * (length % 4)
    return torch.randn(samples, 3, side, side, generator=g), torch.randint(CLASSES, (samples,), generator=g)


def masks(seed: int, samples: int, length: int) -> tuple[Tensor, Tensor]:
    """Images and a mask over their pixels."""
    side = 16 + 8 * (length % 2)
    x = torch.randn(samples, 3, side, side, generator=_generator(seed))
    return x, (x.sum(1, keepdim=True) > 0).to(x.dtype)


def points(seed: int, samples: int, length: int) -> tuple[Tensor, Tensor]:
    """Vectors and classes."""
    g = _generator(seed)
    return torch.randn(samples, WIDTH, generator=g), torch.randint(CLASSES, (samples,), generator=g)


def tokens(seed: int, samples: int, length: int) -> tuple[Tensor, Tensor]:
    """Sequences of words without padding, and classes."""
    g = _generator(seed)
    x = torch.randint(1, WORDS, (samples, length), generator=g)
    return x, torch.randint(CLASSES, (samples,), generator=g)


def next_tokens(seed: int, samples: int, length: int) -> tuple[Tensor, Tensor]:
    """Sequences of words, and the next word at each position."""
    x = torch.randint(1, WORDS, (samples, length + 1), generator=_generator(seed))
    return x[:, :-1], x[:, 1:]


def padded_tokens(seed: int, samples: int, length: int) -> tuple[Tensor, Tensor]:
    """Sequences of words with padding at the end, and classes."""
    x, y = tokens(seed, samples, length)
    for row in range(samples):
        x[row, max(1, length - row % 3) :] = PAD
    return x, y


def tokens_and_lengths(seed: int, samples: int, length: int) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """Padded sequences with their lengths, and classes."""
    x, y = padded_tokens(seed, samples, length)
    return (x, (x != PAD).sum(1)), y


def translations(seed: int, samples: int, length: int) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """Padded source, shifted target, and the target itself, of which padding does not count."""
    source, _ = padded_tokens(seed, samples, length)
    target, _ = padded_tokens(seed + 1, samples, length + 2)
    return (source, target[:, :-1]), target[:, 1:]


def labelled_tokens(seed: int, samples: int, length: int) -> dict[str, Tensor]:
    """Words and labels by name; some labels do not count."""
    x, y = next_tokens(seed, samples, length)
    labels = y.clone()
    labels[1:, : length // 3] = IGNORED
    return {"tokens": x, "labels": labels}


def tasks(seed: int, samples: int, length: int) -> tuple[Tensor, dict[str, Tensor]]:
    """Vectors with a class and a value."""
    x, y = points(seed, samples, length)
    return x, {"class": y, "value": x.sum(1)}


# -- losses -----------------------------------------------------------------------------------------------------------

cross_entropy = F.cross_entropy
sequence_loss = partial(F.cross_entropy, ignore_index=PAD)


def words_counted(batch: Any) -> float:
    """Returns the number of target words that count."""
    return float((batch[1] != PAD).sum())


def labels_counted(batch: Any) -> float:
    """Returns the number of labels that count."""
    return float((batch["labels"] != IGNORED).sum())


def sum_of_tasks(output: dict[str, Tensor], batch: Any) -> Tensor:
    targets = batch[1]
    return F.cross_entropy(output["class"], targets["class"]) + 0.5 * F.mse_loss(output["value"], targets["value"])


def sum_of_exits(output: list[Tensor], batch: Any) -> Tensor:
    return torch.stack([F.cross_entropy(logits, batch[1]) for logits in output]).sum()


# -- convolutions -----------------------------------------------------------------------------------------------------


class BasicBlock(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.downsample = None
        if stride != 1 or inputs != outputs:
            self.downsample = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        identity = x if self.downsample is None else self.downsample(x)
        out = F.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        out += identity
        return F.relu(out)


class ResNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 8, 3, 1, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(8)
        self.relu = nn.ReLU(inplace=True)
        self.layer1 = nn.Sequential(BasicBlock(8, 8), BasicBlock(8, 8))
        self.layer2 = nn.Sequential(BasicBlock(8, 16, 2), BasicBlock(16, 16))
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(16, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu(self.bn1(self.conv1(x)))
        x = self.layer2(self.layer1(x))
        return self.fc(torch.flatten(self.avgpool(x), 1))


class DoubleConv(nn.Sequential):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(
            nn.Conv2d(inputs, outputs, 3, padding=1, bias=False),
            nn.BatchNorm2d(outputs),
            nn.ReLU(inplace=True),
            nn.Conv2d(outputs, outputs, 3, padding=1, bias=False),
            nn.BatchNorm2d(outputs),
            nn.ReLU(inplace=True),
        )


class UNet(nn.Module):
    """With skip connections over most of the model: the last stages read what the first ones made."""

    def __init__(self) -> None:
        super().__init__()
        widths = (4, 8, 16)
        self.downs = nn.ModuleList(DoubleConv(a, b) for a, b in zip((3, *widths), widths, strict=False))
        self.middle = DoubleConv(16, 16)
        self.ups = nn.ModuleList(nn.ConvTranspose2d(a, b, 2, 2) for a, b in ((16, 16), (16, 8), (8, 4)))
        self.convs = nn.ModuleList(DoubleConv(2 * b, b) for b in (16, 8, 4))
        self.out = nn.Conv2d(4, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        skips = []
        for down in self.downs:
            x = down(x)
            skips.append(x)
            x = F.max_pool2d(x, 2)
        x = self.middle(x)
        for up, conv, skip in zip(self.ups, self.convs, reversed(skips), strict=True):
            x = up(x)
            if x.shape != skip.shape:
                x = F.interpolate(x, size=skip.shape[2:])
            x = conv(torch.cat([skip, x], dim=1))
        return self.out(x)


class Discriminator(nn.Module):
    """With weights that are computed before each call, one of them from a buffer that moves."""

    def __init__(self) -> None:
        super().__init__()
        self.first = spectral_norm(nn.Conv2d(3, 8, 3, 2, 1))
        self.second = weight_norm(nn.Conv2d(8, 8, 3, 2, 1))
        self.third = spectral_norm(nn.Linear(8, WIDTH))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = F.leaky_relu(self.first(x), 0.2)
        x = F.leaky_relu(self.second(x), 0.2)
        return self.head(torch.tanh(self.third(x.mean((2, 3)))))


# -- recurrent networks -----------------------------------------------------------------------------------------------


class AttentionLSTM(nn.Module):
    """Translation with attention: the decoder is taught by the target, one word after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.source = nn.Embedding(WORDS, WIDTH, padding_idx=PAD)
        self.encoder = nn.LSTM(WIDTH, WIDTH, batch_first=True, bidirectional=True)
        self.bridge = nn.Linear(2 * WIDTH, WIDTH)
        self.target = nn.Embedding(WORDS, WIDTH, padding_idx=PAD)
        self.cell = nn.LSTMCell(2 * WIDTH, WIDTH)
        self.query = nn.Linear(WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.1)
        self.out = nn.Linear(2 * WIDTH, WORDS)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        memory, (h, c) = self.encoder(self.dropout(self.source(source)))
        memory = self.bridge(memory)
        h, c = h.mean(0), c.mean(0)
        hidden = source == PAD
        context = torch.zeros_like(h)
        logits = []
        for t in range(target.shape[1]):
            word = self.target(target[:, t])
            h, c = self.cell(torch.cat([word, context], 1), (h, c))
            scores = torch.bmm(memory, self.query(h).unsqueeze(2)).squeeze(2)
            weights = scores.masked_fill(hidden, float("-inf")).softmax(1)
            context = torch.bmm(weights.unsqueeze(1), memory).squeeze(1)
            logits.append(self.out(torch.cat([self.dropout(h), context], 1)))
        return torch.stack(logits, 2)


class PackedLSTM(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH, padding_idx=PAD)
        self.first = nn.LSTM(WIDTH, WIDTH, batch_first=True, bidirectional=True)
        self.second = nn.GRU(2 * WIDTH, WIDTH, batch_first=True)
        self.head = nn.Linear(2 * WIDTH, CLASSES)

    def forward(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        packed = pack_padded_sequence(self.embed(tokens), lengths.cpu(), batch_first=True, enforce_sorted=False)
        packed, _ = self.first(packed)
        packed, hidden = self.second(packed)
        out, _ = pad_packed_sequence(packed, batch_first=True)
        mean = out.sum(1) / lengths.to(out.dtype).unsqueeze(1)
        return self.head(torch.cat([hidden[-1], mean], 1))


# -- transformers -----------------------------------------------------------------------------------------------------


class Attention(nn.Module):
    def __init__(self, width: int, heads: int = 2, dropout: float = 0.1) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)
        self.dropout = dropout

    def forward(self, x: Tensor, causal: bool = True) -> Tensor:
        b, t, c = x.shape
        q, k, v = (y.view(b, t, self.heads, -1).transpose(1, 2) for y in self.qkv(x).split(c, dim=2))
        p = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=p, is_causal=causal)
        return self.proj(y.transpose(1, 2).reshape(b, t, c))


class GPTBlock(nn.Module):
    def __init__(self, width: int, causal: bool = True) -> None:
        super().__init__()
        self.causal = causal
        self.ln_1 = nn.LayerNorm(width)
        self.attn = Attention(width)
        self.ln_2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width), nn.Dropout(0.1))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x), causal=self.causal)
        return x + self.mlp(self.ln_2(x))


@dataclass
class LanguageOutput:
    logits: Tensor
    loss: Tensor | None = None


class GPT(nn.Module):
    """Tied weights, positions from `arange`, and a loss of its own, whose ignored labels do not count."""

    def __init__(self) -> None:
        super().__init__()
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(WORDS, WIDTH),
                "wpe": nn.Embedding(64, WIDTH),
                "drop": nn.Dropout(0.1),
                "h": nn.ModuleList(GPTBlock(WIDTH) for _ in range(3)),
                "ln_f": nn.LayerNorm(WIDTH),
            }
        )
        self.lm_head = nn.Linear(WIDTH, WORDS, bias=False)
        self.lm_head.weight = self.transformer["wte"].weight

    def forward(self, tokens: Tensor, labels: Tensor | None = None) -> LanguageOutput:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.transformer["drop"](self.transformer["wte"](tokens) + self.transformer["wpe"](positions))
        for block in self.transformer["h"]:
            x = block(x)
        logits = self.lm_head(self.transformer["ln_f"](x))
        loss = None
        if labels is not None:
            loss = F.cross_entropy(logits.view(-1, logits.size(-1)), labels.reshape(-1), ignore_index=IGNORED)
        return LanguageOutput(logits, loss)


class FunctionalBlock(nn.Module):
    """Parameters and functions alone: no module is called."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norms = nn.ParameterList([torch.ones(width), torch.ones(width)])
        shapes = {
            "qkv": (3 * width, width),
            "out": (width, width),
            "up": (2 * width, width),
            "down": (width, 2 * width),
        }
        self.weights = nn.ParameterDict({name: torch.randn(shape) / shape[1] ** 0.5 for name, shape in shapes.items()})

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = F.linear(F.layer_norm(x, x.shape[-1:], self.norms[0]), self.weights["qkv"]).chunk(3, -1)
        x = x + F.linear(F.scaled_dot_product_attention(q, k, v, is_causal=True), self.weights["out"])
        h = F.gelu(F.linear(F.layer_norm(x, x.shape[-1:], self.norms[1]), self.weights["up"]))
        return x + F.linear(h, self.weights["down"])


class FunctionalTransformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(WORDS, WIDTH) / 4)
        self.places = nn.Parameter(torch.randn(64, WIDTH) / 4)
        self.blocks = nn.ModuleList(FunctionalBlock(WIDTH) for _ in range(3))
        self.head = nn.Parameter(torch.randn(WORDS, WIDTH) / 4)

    def forward(self, tokens: Tensor) -> Tensor:
        x = F.embedding(tokens, self.table) + self.places[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return F.linear(x, self.head).transpose(1, 2)


class Translator(nn.Module):
    """torch's own encoder and decoder, with all masks."""

    def __init__(self) -> None:
        super().__init__()
        self.source = nn.Embedding(WORDS, WIDTH, padding_idx=PAD)
        self.target = nn.Embedding(WORDS, WIDTH, padding_idx=PAD)
        self.transformer = nn.Transformer(WIDTH, 2, 2, 2, 2 * WIDTH, batch_first=True)
        self.out = nn.Linear(WIDTH, WORDS)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        causal = torch.ones(target.shape[1], target.shape[1], dtype=torch.bool, device=target.device).triu(1)
        x = self.transformer(
            self.source(source),
            self.target(target),
            tgt_mask=causal,
            src_key_padding_mask=source == PAD,
            tgt_key_padding_mask=target == PAD,
            memory_key_padding_mask=source == PAD,
            tgt_is_causal=True,
        )
        return self.out(x).transpose(1, 2)


class AttentionPooling(nn.Module):
    """nn.MultiheadAttention with a mask; its weights are part of the output."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.attentions = nn.ModuleList(
            nn.MultiheadAttention(WIDTH, 2, dropout=0.1, batch_first=True) for _ in range(3)
        )
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(3))
        self.query = nn.Parameter(torch.randn(1, 1, WIDTH))
        self.pool = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        mask = tokens.eq(PAD)
        x = self.embed(tokens)
        for attention, norm in zip(self.attentions, self.norms, strict=True):
            x = norm(x + attention(x, x, x, key_padding_mask=mask, need_weights=False)[0])
        query = self.query.expand(len(x), -1, -1)
        pooled, weights = self.pool(query, x, x, key_padding_mask=mask)
        return self.head(pooled.squeeze(1)), weights


class Experts(nn.Module):
    """Each token goes to the best two of four experts; an expert may get none."""

    def __init__(self, width: int, count: int = 4) -> None:
        super().__init__()
        self.router = nn.Linear(width, count)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 24), nn.SiLU(), nn.Linear(24, width)) for _ in range(count)
        )

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, x.shape[-1])
        weights, chosen = self.router(flat).softmax(-1).topk(2, dim=-1)
        weights = weights / weights.sum(-1, keepdim=True)
        out = torch.zeros_like(flat)
        for i, expert in enumerate(self.experts):
            rows, slots = torch.where(chosen == i)
            if rows.numel() == 0:
                continue
            output = expert(flat.index_select(0, rows)) * weights[rows, slots].unsqueeze(1)
            out.index_add_(0, rows, output)
        return out.view_as(x)


class MixtureOfExperts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(3))
        self.layers = nn.ModuleList(Experts(WIDTH) for _ in range(3))
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for norm, layer in zip(self.norms, self.layers, strict=True):
            x = x + layer(norm(x))
        return self.head(x).transpose(1, 2)


class CheckpointedGPT(nn.Module):
    """Blocks that are computed again in the backward, by either kind of checkpointing."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(GPTBlock(WIDTH) for _ in range(3))
        self.head = nn.Linear(WIDTH, WORDS)
        self.reentrant = reentrant

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant) if self.training else block(x)
        return self.head(x).transpose(1, 2)


# -- frozen, shared and borrowed weights ------------------------------------------------------------------------------


class LoraLinear(nn.Module):
    def __init__(self, base: nn.Linear, rank: int = 2) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.lora_a = nn.Parameter(torch.randn(rank, base.in_features) / rank)
        self.lora_b = nn.Parameter(torch.randn(base.out_features, rank) / 8)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.dropout(x) @ self.lora_a.T @ self.lora_b.T


def lora() -> nn.Module:
    """A frozen GPT with adapters in its attention."""
    model = GPT().requires_grad_(False)
    for block in model.transformer["h"]:
        block.attn.qkv = LoraLinear(block.attn.qkv)
        block.attn.proj = LoraLinear(block.attn.proj)
    return model


class FineTuned(nn.Module):
    """A frozen backbone, run without a graph, and a head that learns."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(WIDTH, 24), nn.ReLU(), nn.Linear(24, 24)).requires_grad_(False)
        self.adapter = nn.Linear(24, 24)
        self.head = nn.Linear(24, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            features = self.backbone(x)
        return self.head(F.relu(features + self.adapter(features)))


class SharedLayers(nn.Module):
    """The same weights in two modules, and one module called for two purposes."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.last.weight = self.first.weight
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(F.relu(self.first(x)))
        x = x + self.norm(F.relu(self.middle(x)))
        return self.head(self.norm(self.last(x)))


# -- what a forward does besides calling modules ----------------------------------------------------------------------


class ValueBranch(nn.Module):
    """Looks at numbers: another formula where the mean is positive."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
            x = torch.tanh(x) if x.mean() > 0 else F.relu(x) + 0.1 * x
        return self.head(x)


class NumberCarried(nn.Module):
    """Takes a Python number from a tensor early, and uses it late."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        scale = None
        for layer in self.layers:
            x = torch.tanh(layer(x))
            if scale is None:
                scale = x.detach().abs().max().item()
        return self.head(x / scale)


class RoundSTE(torch.autograd.Function):
    """Rounds; the gradient passes as if it had not."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, step: float) -> Tensor:
        return torch.round(x / step) * step

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class ReverseGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return -0.3 * grad


class Quantised(nn.Module):
    """Autograd functions of the user's own in the glue: their gradient is not that of the numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.label = nn.Linear(WIDTH, CLASSES)
        self.domain = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        for layer in self.layers:
            x = torch.tanh(layer(RoundSTE.apply(x, 0.25)))
        return {"class": self.label(x), "value": self.domain(ReverseGradient.apply(x)).squeeze(1)}


class Recomputed(torch.autograd.Function):
    """Runs a module without a graph, and again in the backward."""

    @staticmethod
    def forward(ctx: Any, module: nn.Module, x: Tensor, *weights: Tensor) -> Tensor:
        ctx.module = module
        ctx.save_for_backward(x)
        return module(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (x,) = ctx.saved_tensors
        weights = tuple(ctx.module.parameters())
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            grads = torch.autograd.grad(ctx.module(x), (x, *weights), grad)
        return (None, *grads)


class OwnBackward(nn.Module):
    """Modules called inside an autograd function of the user's own, as reversible networks do."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + Recomputed.apply(block, x, *block.parameters())
        return self.head(x)


class InPlace(nn.Module):
    """Writes into tensors that others have made, also through views."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.first = nn.Parameter(torch.randn(WIDTH))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        x[:, 0] = self.first
        x.masked_fill_((tokens == PAD).unsqueeze(2), 0.0)
        for layer in self.layers:
            y = layer(x)
            y += x
            y[..., 1:] *= 0.9
            x = y.relu_()
        return self.head(x.mean(1))


class GlueDropout(nn.Module):
    """Draws random numbers outside of modules: dropout, and noise."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.dropout, self.noise_dropout = 0.2, 0.1
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, tokens: Tensor) -> Tensor:
        x = F.dropout(self.embed(tokens), self.dropout, self.training)
        for layer in self.layers:
            x = x + F.dropout(F.relu(layer(x)), p=self.dropout, training=self.training)
            if self.training:
                x = x + self.noise_dropout * torch.randn_like(x)
        return self.head(x.mean(1))


class MultiTask(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.label, self.value = nn.Linear(WIDTH, CLASSES), nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        for layer in self.trunk:
            x = x + F.gelu(layer(x))
        return {"class": self.label(x), "value": self.value(x).squeeze(-1)}


class EarlyExits(nn.Module):
    """A list of outputs, one from each depth."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.exits = nn.ModuleList(nn.Linear(WIDTH, CLASSES) for _ in range(3))

    def forward(self, x: Tensor) -> list[Tensor]:
        outputs = []
        for layer, out in zip(self.layers, self.exits, strict=True):
            x = F.relu(layer(x))
            outputs.append(out(x))
        return outputs


def hooked() -> nn.Module:
    """A residual network whose hooks change inputs and outputs."""
    model = MultiTask()
    model.trunk[0].register_forward_hook(lambda module, inputs, output: output * 1.5)
    model.trunk[1].register_forward_pre_hook(lambda module, inputs: (inputs[0] + 0.1,))
    return model


def first_of(output: tuple[Tensor, ...], batch: Any) -> Tensor:
    return F.cross_entropy(output[0], batch[1])


OWN: dict[str, Case] = {
    case.name: case
    for case in (
        Case("resnet", ResNet, images, cross_entropy),
        Case("unet", UNet, masks, F.binary_cross_entropy_with_logits),
        Case("attention_lstm", AttentionLSTM, translations, sequence_loss, words_counted),
        Case("packed_lstm", PackedLSTM, tokens_and_lengths, cross_entropy),
        Case("tied_gpt", GPT, labelled_tokens, None, labels_counted),
        Case("lora", lora, labelled_tokens, None, labels_counted),
        Case("value_branch", ValueBranch, points, cross_entropy),
        Case("number_carried", NumberCarried, points, cross_entropy),
        Case("functional_transformer", FunctionalTransformer, next_tokens, cross_entropy),
        Case("early_exits", EarlyExits, points, sum_of_exits),
        Case("translator", Translator, translations, sequence_loss, words_counted),
        Case("attention_pooling", AttentionPooling, padded_tokens, first_of),
        Case("experts", MixtureOfExperts, next_tokens, cross_entropy),
        Case("checkpointed", partial(CheckpointedGPT, False), next_tokens, cross_entropy),
        Case("checkpointed_reentrant", partial(CheckpointedGPT, True), next_tokens, cross_entropy),
        Case("quantised", Quantised, tasks, sum_of_tasks),
        Case("own_backward", OwnBackward, points, cross_entropy),
        Case("in_place", InPlace, padded_tokens, cross_entropy),
        Case("shared_layers", SharedLayers, points, cross_entropy),
        Case("glue_dropout", GlueDropout, tokens, cross_entropy),
        Case("discriminator", Discriminator, images, cross_entropy),
        Case("fine_tuned", FineTuned, points, cross_entropy),
        Case("hooked", hooked, tasks, sum_of_tasks),
    )
}
