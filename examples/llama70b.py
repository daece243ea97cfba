"""A Llama of 70 billion parameters: profiled and planned on any machine, because it is built on the meta device.

Plan it: pipedream profile examples/llama70b.py --device meta --as H100 -o llama.json
         pipedream plan llama.json --workers 8 8 --bandwidth 450e9 50e9 --memory 80GB
"""

from functools import partial

import torch
from torch import nn
from torch.nn import functional as F

import pipedream

LAYERS, WIDTH, HEADS, KEY_HEADS, HIDDEN, WORDS, LENGTH = 80, 8192, 64, 8, 28672, 128256, 4096


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        linear, keys = partial(nn.Linear, bias=False), WIDTH // HEADS * KEY_HEADS
        self.first, self.second = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.q, self.k, self.v, self.out = (linear(WIDTH, n) for n in (WIDTH, keys, keys, WIDTH))
        self.gate, self.up, self.down = linear(WIDTH, HIDDEN), linear(WIDTH, HIDDEN), linear(HIDDEN, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x)
        q, k, v = (f(y).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for f in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(rotated(q), rotated(k), v, is_causal=True, enable_gqa=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        y = self.second(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


def rotated(x: torch.Tensor) -> torch.Tensor:
    angle = torch.arange(x.shape[-2])[:, None] * 500000.0 ** -torch.linspace(0, 1, x.shape[-1] // 2)
    (a, b), cos, sin = x.chunk(2, -1), angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


class AdamW(torch.optim.Optimizer):  # torch's own keeps both moments in the weights' bfloat16, this one in float32
    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for p in (p for p in self.param_groups[0]["params"] if p.grad is not None):
            m, v = self.state[p].setdefault("moments", [torch.zeros_like(p, dtype=torch.float32) for _ in range(2)])
            m.lerp_(p.grad.float(), 0.1)
            v.lerp_(p.grad.float().square(), 0.05)
            p.mul_(1 - self.defaults["lr"] * 0.1).sub_(self.defaults["lr"] * m / v.sqrt().add_(1e-8))


def recipe() -> pipedream.Recipe:
    def loss(output: torch.Tensor, batch: list[torch.Tensor]) -> torch.Tensor:
        return F.cross_entropy(output.flatten(0, 1), batch[1].flatten())

    with torch.device("meta"):
        head = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)
        model = nn.Sequential(nn.Embedding(WORDS, WIDTH), *(Block() for _ in range(LAYERS)), *head).bfloat16()
    data = [[torch.zeros(1, LENGTH, dtype=torch.long)] * 2]  # zeros in the place of text
    return pipedream.Recipe(model, loss, partial(AdamW, defaults={"lr": 1e-4}), data)
