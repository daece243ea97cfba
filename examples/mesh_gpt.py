"""A small GPT on the text of char_gpt.py, with the 2-D layout of Mesh-TensorFlow (Shazeer et al. 2018).

As one worker of four ranks, or as a pipeline of two workers with two ranks each:

    pipedream train examples/mesh_gpt.py --workers 4 --config 1 --mesh data:2,model:2
    pipedream train examples/mesh_gpt.py --workers 4 --config 1-1 --mesh model:2
"""

from dataclasses import replace

import char_gpt
import torch
from char_gpt import CONTEXT, WIDTH
from torch import nn

import pipedream

NAMES = {f"*.{name}.weight": "heads d_model" for name in ("query", "key", "value")} | {
    "*.mixed.weight": "d_model heads",
    "*.up.weight": "d_ff d_model",
    "*.down.weight": "d_model d_ff",
    "[05].weight": "vocab d_model",  # of the embedding and of the last layer
}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.query, self.key, self.value, self.mixed = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH, bias=False), nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norms[0](x)
        heads = (split(y).unflatten(2, (4, -1)).transpose(1, 2) for split in (self.query, self.key, self.value))
        y = nn.functional.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.mixed(y.transpose(1, 2).flatten(2))
        return x + self.down(nn.functional.gelu(self.up(self.norms[1](x))))


def recipe(seed: int = 0) -> pipedream.Recipe:
    """The windows of char_gpt.py once, in larger batches, so that the ranks have something to share."""
    plain = char_gpt.recipe(seed)
    train = torch.utils.data.DataLoader(plain.train.dataset, 64, shuffle=True, generator=plain.train.generator)
    embed, last = (nn.Embedding(128, WIDTH), char_gpt.Positions(CONTEXT, WIDTH)), nn.Linear(WIDTH, 128, bias=False)
    return replace(
        plain,
        model=nn.Sequential(*embed, Block(), Block(), nn.LayerNorm(WIDTH), last),
        layout=pipedream.Layout("batch:data, d_ff:model, heads:model, vocab:model", names=NAMES),
        optimizer=lambda named: torch.optim.AdamW(named, lr=1e-2),
        scheduler=None,
        train=train,
        epochs=1,
        target=("loss", 2.4),
    )


if __name__ == "__main__":
    pipedream.run(recipe)
