"""The job of the trials: a small network, one of whose workers sends the signals that `trial.json` names.

The file is renamed before the signals, so that a run that is resumed is left alone. TRIAL_TRAINING chooses how it
trains.
"""

from __future__ import annotations

import atexit
import json
import os
import signal
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import pipedream
from pipedream.apps.training import run_folder
from pipedream.services.checkpoint import writer

RANK = int(os.environ.get("RANK", "0"))
FOLDER = Path(os.environ.get("TRIAL_FOLDER", "."))
TRIAL = FOLDER / "trial.json"
COUNTS = {"start": 0, "forward": 0, "backward": 0, "save": 0, "evaluation": 0, "end": 0, "exit": 0}
BATCHES, BATCH, EPOCHS = 20, 32, 2


def count(what: str) -> None:
    """Counts an event on this rank, and sends the trial's signal if it was the one."""
    COUNTS[what] += 1
    if not TRIAL.exists():
        return
    trial = json.loads(TRIAL.read_text(encoding="utf-8"))
    if (trial["rank"], trial["event"], trial["count"]) != (RANK, what, COUNTS[what]):
        return
    launcher = int(os.environ.get("PIPEDREAM_LAUNCHER", f"{os.getppid()} 0").split()[0])
    ours, others = [], []
    for target in trial["targets"]:
        pid = launcher if target == "launcher" else int(read(FOLDER / f"pid{target}"))
        (ours if pid == os.getpid() else others).append(pid)
    TRIAL.rename(TRIAL.with_name("fired.json"))
    TRIAL.with_name("fired_at").write_text(str(time.time()), encoding="utf-8")
    for pid in [*others, *ours]:
        os.kill(pid, getattr(signal, trial["signal"]))


def read(file: Path) -> str:
    """Returns a file's text, which a worker that starts has yet to write."""
    while not file.exists() or not file.read_text(encoding="utf-8"):
        time.sleep(0.01)
    return file.read_text(encoding="utf-8")


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


class Test:
    """The data of an evaluation."""

    def __init__(self, batches: Any) -> None:
        self.batches = batches

    def __iter__(self) -> Any:
        count("evaluation")
        yield from self.batches


def after(function: Any, event: str) -> Any:
    """Returns the function with an event counted after it."""

    def called(*args: Any, **rest: Any) -> Any:
        result = function(*args, **rest)
        count(event)
        return result

    return called


def recipe(seed: int = 0) -> pipedream.Recipe:
    """Returns the job: shuffled data and a schedule of the rate; dropout or BatchNorm, AdamW or SGD with momentum."""
    (FOLDER / f"pid{RANK}").write_text(str(os.getpid()), encoding="utf-8")
    atexit.register(count, "exit")
    count("start")
    writer.write_tensors = after(writer.write_tensors, "save")
    run_folder.write_run = after(run_folder.write_run, "end")
    torch.manual_seed(seed)
    adamw = os.environ.get("TRIAL_TRAINING", "adamw") == "adamw"
    layers: list[nn.Module] = []
    for _ in range(3):
        layers += [nn.Linear(16, 16), nn.Tanh(), nn.Dropout(0.2) if adamw else nn.BatchNorm1d(16), Probe()]
    inputs = torch.randn(BATCHES * BATCH, 16)
    data = TensorDataset(inputs, (inputs.sum(1) > 0).long())
    sgd = partial(torch.optim.SGD, lr=0.05, momentum=0.9, nesterov=True)
    steps = partial(torch.optim.lr_scheduler.StepLR, step_size=7, gamma=0.5)
    return pipedream.Recipe(
        model=nn.Sequential(*layers, nn.Linear(16, 2)),
        loss=nn.functional.cross_entropy,
        optimizer=partial(torch.optim.AdamW, lr=1e-3) if adamw else sgd,
        scheduler=partial(torch.optim.lr_scheduler.CosineAnnealingLR, T_max=EPOCHS * BATCHES) if adamw else steps,
        ema=0.9 if adamw else None,
        train=DataLoader(data, batch_size=BATCH, shuffle=True),
        test=Test(DataLoader(data, batch_size=BATCH)),
        epochs=EPOCHS,
    )
