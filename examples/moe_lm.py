"""A small GPT over characters of Python's standard library, with a mixture of experts in every other block.

Run it: pipedream train examples/moe_lm.py --workers 2
"""

from pathlib import Path
from sysconfig import get_path

import torch
from torch import nn

import pipedream

MODULES = "argparse ast calendar configparser copy csv dataclasses datetime difflib doctest enum fractions ftplib"
CONTEXT, WIDTH = 64, 64


class Positions(nn.Embedding):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.weight[: x.shape[1]]


class Block(nn.Module):
    def __init__(self, feed_forward: nn.Module) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 4, batch_first=True)
        self.feed_forward, self.norms = feed_forward, nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y, mask = self.norms[0](x), nn.Transformer.generate_square_subsequent_mask(x.shape[1], x.device)
        x = x + self.attention(y, y, y, attn_mask=mask, need_weights=False)[0]
        return x + self.feed_forward(self.norms[1](x))


def recipe(seed: int = 0) -> pipedream.Recipe:
    """Windows of the text, of which every tenth is kept for the test."""
    torch.manual_seed(seed)
    text = "".join(Path(get_path("stdlib"), f"{name}.py").read_text(encoding="utf-8") for name in MODULES.split())
    windows = torch.tensor(list(text.encode("ascii", "replace"))).unfold(0, CONTEXT + 1, CONTEXT)
    order, is_test = torch.Generator().manual_seed(seed), torch.arange(len(windows)) % 10 == 0
    layers: list[nn.Module] = [nn.Embedding(128, WIDTH), Positions(CONTEXT, WIDTH)]
    for _ in range(2):
        dense = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.ReLU(), nn.Linear(4 * WIDTH, WIDTH))
        layers += [Block(dense), Block(pipedream.experts.MixtureOfExperts(WIDTH, 4 * WIDTH, experts=8, groups=4))]
    return pipedream.Recipe(
        model=nn.Sequential(*layers, nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 128)),
        loss=lambda output, text: nn.functional.cross_entropy(output.flatten(0, 1), text.flatten()),
        optimizer=lambda named: torch.optim.AdamW(named, lr=3e-3),
        train=torch.utils.data.DataLoader(windows[~is_test], batch_size=16, shuffle=True, generator=order),
        test=torch.utils.data.DataLoader(windows[is_test], batch_size=64),
        inputs=lambda text: text[:, :-1],
        targets=lambda text: text[:, 1:],
        epochs=2,
        target=("loss", 1.6),
    )


if __name__ == "__main__":
    pipedream.run(recipe)
