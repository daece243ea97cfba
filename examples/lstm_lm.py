"""An LSTM over the words of Python's standard library: paragraphs of any length, so each batch has its own shape.

Run it: pipedream train examples/lstm_lm.py --workers 2
"""

import re
from collections import Counter
from functools import partial
from pathlib import Path
from sysconfig import get_path

import torch
from torch import Tensor, nn
from torch.nn.functional import dropout
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

import pipedream

MODULES = "argparse ast calendar configparser copy csv dataclasses datetime difflib doctest enum fractions ftplib"
WIDTH, LENGTH, WORDS, RARE, PAD = 80, 40, 2000, 1, 0


class Recurrent(nn.LSTM):  # what it reads beside the words goes past it to the next (Graves 2013): a pair crosses a cut
    def forward(self, x: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return dropout(super().forward(torch.cat(x, 2))[0], 0.2, self.training), x[1]


class Embed(nn.Embedding):
    def forward(self, words: Tensor) -> tuple[Tensor, Tensor]:
        return super().forward(words), super().forward(words)


class Read(nn.Linear):
    def forward(self, x: tuple[Tensor, Tensor]) -> Tensor:
        return super().forward(torch.cat(x, 2)).transpose(1, 2)  # cross entropy wants the classes second


def right(output: Tensor, words: Tensor) -> tuple[Tensor, Tensor]:
    return ((output.argmax(1) == words) & (words != PAD)).sum(), (words != PAD).sum()


def batch_of(pieces: list[Tensor]) -> tuple[Tensor, Tensor]:
    words = pad_sequence(pieces, batch_first=True, padding_value=PAD)
    return words[:, :-1], words[:, 1:]


def recipe(seed: int = 0) -> pipedream.Recipe:
    """Returns model, loss, optimizer and data: paragraphs, of which every tenth is kept for the test."""
    torch.manual_seed(seed)
    text = "".join(Path(get_path("stdlib"), f"{name}.py").read_text(encoding="utf-8") for name in MODULES.split())
    paragraphs = [re.findall(r"\w+|[^\w\s]", paragraph) for paragraph in text.split("\n\n")]
    common = Counter(word for words in paragraphs for word in words).most_common(WORDS - 2)
    number = {word: i for i, (word, _) in enumerate(common, start=2)}
    data = [torch.tensor([number.get(word, RARE) for word in words[: LENGTH + 1]]) for words in paragraphs if words[1:]]
    train = [words for i, words in enumerate(data) if i % 10]
    layers = (Recurrent(2 * WIDTH, WIDTH, batch_first=True) for _ in range(3))
    order = torch.Generator().manual_seed(seed)
    return pipedream.Recipe(
        model=nn.Sequential(Embed(WORDS, WIDTH, PAD), *layers, Read(2 * WIDTH, WORDS)),
        loss=nn.CrossEntropyLoss(ignore_index=PAD),  # a mean over the words that count, in any microbatch
        optimizer=partial(torch.optim.Adam, lr=8e-3),
        train=DataLoader(train, batch_size=16, shuffle=True, generator=order, collate_fn=batch_of),
        test=DataLoader(data[::10], batch_size=64, collate_fn=batch_of),
        metrics={"accuracy": right},
        clip_grad_norm=1.0,
        clip="local",  # stages update at different times, so each clips by its own norm
        epochs=4,
        target=("accuracy", 0.4),
    )


if __name__ == "__main__":
    pipedream.run(recipe)
