"""The job of the trials: a small network that ends or stops its own process where `trial.json` says.

The file is removed before the signal, so that the run that goes on is left alone.
"""

from __future__ import annotations

import json
import os
import signal
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.utils.data import DataLoader, TensorDataset

import pipedream

RANK = int(os.environ.get("RANK", "0"))
TRIAL = Path(os.environ.get("TRIAL_FOLDER", ".")) / "trial.json"
COUNTS = {"forward": 0, "backward": 0, "save": 0}


def count(what: str) -> None:
    """Counts an event on this rank, and sends the trial's signal to this process if it was the one."""
    COUNTS[what] += 1
    if not TRIAL.exists():
        return
    trial = json.loads(TRIAL.read_text(encoding="utf-8"))
    if (trial["rank"], trial["event"], trial["count"]) == (RANK, what, COUNTS[what]):
        TRIAL.rename(TRIAL.with_name("fired.json"))
        TRIAL.with_name("fired_at").write_text(str(time.time()), encoding="utf-8")
        os.kill(os.getpid(), getattr(signal, trial["signal"]))


class Seen(torch.autograd.Function):
    """Counts forwards and backwards."""

    @staticmethod
    def forward(context: Any, x: Tensor) -> Tensor:
        count("forward")
        return x.clone()

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> Tensor:
        count("backward")
        return gradients[0]


class Probe(nn.Module):
    """A layer that is counted while it trains."""

    def forward(self, x: Tensor) -> Tensor:
        return Seen.apply(x) if torch.is_grad_enabled() else x


def recipe(seed: int = 0) -> pipedream.Recipe:
    """Returns the job: 90 minibatches in shuffled order, dropout, momentum, a schedule, an average of the weights."""
    written = FileSystemWriter.write_data

    def write(self: Any, *args: Any, **rest: Any) -> Any:
        result = written(self, *args, **rest)
        count("save")
        return result

    FileSystemWriter.write_data = write
    torch.manual_seed(seed)
    layers: list[nn.Module] = []
    for _ in range(3):
        layers += [nn.Linear(16, 16), nn.Tanh(), nn.Dropout(0.2), Probe()]
    inputs = torch.randn(30 * 8, 16)
    data = TensorDataset(inputs, (inputs.sum(1) > 0).long())
    return pipedream.Recipe(
        model=nn.Sequential(*layers, nn.Linear(16, 2)),
        loss=nn.functional.cross_entropy,
        optimizer=partial(torch.optim.AdamW, lr=1e-3),
        scheduler=partial(torch.optim.lr_scheduler.CosineAnnealingLR, T_max=90),
        ema=0.9,
        train=DataLoader(data, batch_size=8, shuffle=True),
        epochs=3,
    )
