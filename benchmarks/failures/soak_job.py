"""The run of the soak: its recipe (this file), whose layers sleep, and a line for each finished minibatch.

FINISHED is the file of the lines. The first PACED minibatches take their time, all by default: what is computed does
not depend on it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import pipedream as pd
from pipedream.callbacks import Callback

BATCHES, BATCH, LAYERS = 200, 16, 6
MINIBATCH_S = 0.04
"""What the layers sleep in a minibatch, forwards and backwards together."""

_FINISHED = Path(os.environ.get("FINISHED", os.devnull))
_PACED = float(os.environ.get("PACED", "inf"))


class _Sleep(torch.autograd.Function):
    """Sleeps in the forward, and twice as long in the backward."""

    @staticmethod
    def forward(context: Any, x: Tensor, seconds: float) -> Tensor:
        context.seconds = seconds
        time.sleep(seconds)
        return x.clone()

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        time.sleep(2 * context.seconds)
        return gradients[0], None


class Sleeper(nn.Module):
    """A layer that sleeps while it trains, for its samples' share of the minibatch."""

    seconds = MINIBATCH_S / 3 / LAYERS

    def forward(self, x: Tensor) -> Tensor:
        return _Sleep.apply(x, Sleeper.seconds * len(x) / BATCH) if torch.is_grad_enabled() else x


class _Lines(Callback):
    def on_minibatch(self, pipeline: Any, done: Any) -> None:
        """Writes rank 0's attempt, number, time, process and loss."""
        if done.number >= _PACED:
            Sleeper.seconds = 0.0
        if pipeline.rank == 0:
            attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
            with _FINISHED.open("a") as file:
                file.write(f"{attempt} {done.number} {time.time()} {os.getpid()} {done.loss!r}\n")


class _Batches:
    def __len__(self) -> int:
        return BATCHES

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        draw = torch.Generator().manual_seed(0)
        for _ in range(BATCHES):
            yield torch.rand(BATCH, 16, generator=draw).double(), torch.randint(2, (BATCH,), generator=draw)


def recipe(seed: int = 0) -> pd.Recipe:
    """Returns dropout, AdamW and a schedule of the rate; the run is as long as the command says."""
    torch.manual_seed(seed)
    layers = [layer for _ in range(LAYERS) for layer in (nn.Linear(16, 16), nn.Tanh(), nn.Dropout(0.2), Sleeper())]
    return pd.Recipe(
        model=nn.Sequential(*layers, nn.Linear(16, 2)).double(),
        loss=nn.functional.cross_entropy,
        optimizer=partial(torch.optim.AdamW, lr=1e-3),
        scheduler=partial(torch.optim.lr_scheduler.StepLR, step_size=50, gamma=0.99),
        train=_Batches(),
        epochs=1_000_000,
        callbacks=[_Lines()],
    )
