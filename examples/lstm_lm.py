"""An LSTM over the words of Python's standard library: paragraphs of any length, so each batch has its own shape.

    pipedream train examples/lstm_lm.py --workers 2
"""

import re
from collections import Counter
from functools import partial
from pathlib import Path
from sysconfig import get_path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

import pipedream

MODULES = "argparse ast calendar configparser copy csv dataclasses datetime difflib doctest enum fractions ftplib"
WIDTH, LENGTH, WORDS, RARE, PAD = 96, 40, 2000, 1, 0


class Recurrent(nn.Module):
    """A layer and its input: what it read goes past it to the next one (Graves 2013, section 2). A pair crosses."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.lstm, self.dropout = nn.LSTM(width, WIDTH, batch_first=True), nn.Dropout(0.2)

    def forward(self, words: Tensor | tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        whole = words if isinstance(words, Tensor) else torch.cat(words, 2)
        return self.dropout(self.lstm(whole)[0]), words if isinstance(words, Tensor) else words[1]


class Read(nn.Linear):
    def forward(self, pair: tuple[Tensor, Tensor]) -> Tensor:
        return super().forward(torch.cat(pair, 2)).transpose(1, 2)  # cross_entropy wants the classes second


def batch_of(paragraphs: list[Tensor]) -> tuple[Tensor, Tensor]:
    words = pad_sequence(paragraphs, batch_first=True, padding_value=PAD)
    return words[:, :-1], words[:, 1:]
