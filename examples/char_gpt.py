"""A small GPT over characters of the source of Python's standard library.

Run it: pipedream train examples/char_gpt.py --workers 2
"""

from functools import partial
from pathlib import Path
from sysconfig import get_path

import torch
from torch import nn
from torch.utils.data import DataLoader

import pipedream

MODULES = "argparse ast calendar configparser copy csv dataclasses datetime difflib doctest enum fractions ftplib"
CONTEXT, WIDTH, EPOCHS = 64, 64, 3


class Positions(nn.Embedding):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.weight[: x.shape[1]]


class Block(nn.TransformerEncoderLayer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x, nn.Transformer.generate_square_subsequent_mask(x.shape[1], x.device), is_causal=True)


def loss(output: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(output.flatten(0, 1), text.flatten())


def recipe(seed: int = 0) -> pipedream.Recipe:
    """Windows of the text, of which every tenth is kept for the test."""
    torch.manual_seed(seed)
    text = "".join(Path(get_path("stdlib"), f"{name}.py").read_text(encoding="utf-8") for name in MODULES.split())
    windows = torch.tensor(list(text.encode("ascii", "replace"))).unfold(0, CONTEXT + 1, CONTEXT)
    order, is_test = torch.Generator().manual_seed(seed), torch.arange(len(windows)) % 10 == 0
    train = DataLoader(windows[~is_test], batch_size=16, shuffle=True, generator=order)
    embed = nn.Embedding(128, WIDTH), Positions(CONTEXT, WIDTH), nn.Dropout(0.1)
    blocks = [Block(WIDTH, 4, 4 * WIDTH, 0.0, "gelu", batch_first=True, norm_first=True) for _ in range(4)]
    return pipedream.Recipe(
        model=nn.Sequential(*embed, *blocks, nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 128)),
        loss=loss,
        optimizer=partial(torch.optim.AdamW, lr=3e-3),
        scheduler=partial(torch.optim.lr_scheduler.CosineAnnealingLR, T_max=EPOCHS * len(train)),  # one step an update
        train=train,
        test=DataLoader(windows[is_test], batch_size=64),
        inputs=lambda text: text[:, :-1],
        targets=lambda text: text[:, 1:],
        metrics={"bits_per_character": lambda output, text: loss(output, text) / torch.tensor(2.0).log()},
        epochs=EPOCHS,
        target=("loss", 1.6),
    )


if __name__ == "__main__":
    pipedream.run(recipe)
