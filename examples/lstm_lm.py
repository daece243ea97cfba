"""An LSTM over characters of Python's standard library, in paragraphs of any length: each batch has its own shape.

Run it: pipedream train examples/lstm_lm.py --workers 2
"""

from functools import partial
from pathlib import Path
from sysconfig import get_path

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

import pipedream

MODULES = "argparse ast calendar configparser copy csv dataclasses datetime difflib doctest enum fractions ftplib"
WIDTH, LENGTH, PAD = 96, 100, 0  # pad_sequence pads with 0


class Embed(nn.Embedding):
    def forward(self, text: Tensor) -> tuple[Tensor, Tensor]:
        return super().forward(text), super().forward(text)


class Recurrent(nn.LSTM):  # the embedded text goes past each layer to the next (Graves 2013): a pair crosses every cut
    def forward(self, x: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return torch.dropout(super().forward(torch.cat(x, 2))[0], 0.1, self.training), x[1]


class Read(nn.Linear):
    def forward(self, x: tuple[Tensor, Tensor]) -> Tensor:
        return super().forward(torch.cat(x, 2)).transpose(1, 2)  # cross entropy wants the classes second


def recipe(seed: int = 0) -> pipedream.Recipe:
    """Paragraphs, of which every tenth is kept for the test."""
    torch.manual_seed(seed)
    text = "".join(Path(get_path("stdlib"), f"{name}.py").read_text(encoding="utf-8") for name in MODULES.split())
    data = [torch.tensor([*p.encode("ascii", "replace")])[: LENGTH + 1] for p in text.split("\n\n") if len(p) > 1]
    train, order = [piece for i, piece in enumerate(data) if i % 10], torch.Generator().manual_seed(seed)
    layers = (Recurrent(2 * WIDTH, WIDTH, batch_first=True) for _ in range(3))
    return pipedream.Recipe(
        model=nn.Sequential(Embed(128, WIDTH, PAD), *layers, Read(2 * WIDTH, 128)),
        loss=nn.CrossEntropyLoss(ignore_index=PAD),  # a mean over the characters that count, in any microbatch
        optimizer=partial(torch.optim.Adam, lr=5e-3),
        train=DataLoader(train, 16, shuffle=True, generator=order, collate_fn=partial(pad_sequence, batch_first=True)),
        test=DataLoader(data[::10], 64, collate_fn=partial(pad_sequence, batch_first=True)),
        inputs=lambda text: text[:, :-1],
        targets=lambda text: text[:, 1:],
        clip_grad_norm=1.0,
        clip="local",  # stages update at different times, so each clips by its own norm
        epochs=4,
        target=("loss", 1.6),
    )


if __name__ == "__main__":
    pipedream.run(recipe)
