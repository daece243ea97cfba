"""The recipes of `accuracy`: digits, characters and text, with the learning rate and the minibatches that it asks for.

The variable ASKED has JSON: task; rate; epochs; minibatches (of an epoch; null: all data); batch, the minibatch in
units of the task's; each_update, the minibatches of an update.
"""

from __future__ import annotations

import json
import math
import os
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, RandomSampler, TensorDataset

from pipedream import Recipe
from pipedream.apps.training.recipe import load_recipe

ASKED = "PIPEDREAM_SPEEDUP_ASKED"
ROOT = Path(__file__).parents[2]


def recipe(seed: int = 0) -> Recipe:
    """Returns the recipe of the asked task."""
    settings = json.loads(os.environ[ASKED])
    return {"digits": digits, "characters": characters, "text": text}[settings["task"]](seed, settings)


def digits(seed: int, settings: dict[str, Any]) -> Recipe:
    """examples/vgg_digits.py."""
    base = load_recipe(str(ROOT / "examples" / "vgg_digits.py"), seed=seed)
    optimizer = partial(torch.optim.SGD, lr=settings["rate"], momentum=0.9)
    return replace(base, optimizer=optimizer, **_read(base.train.dataset, 32, seed, settings))


def characters(seed: int, settings: dict[str, Any]) -> Recipe:
    """The GPT of benchmarks/convergence over the source of Python's library, wider: 0.8 million weights."""
    return _make_gpt(seed, settings, tests=250, target=2.1, context=32, width=128, heads=4, count=4)


def text(seed: int, settings: dict[str, Any]) -> Recipe:
    """The same with 10.7 million weights and windows of 128 characters: 5,263 to train on, 50 to test."""
    return _make_gpt(seed, settings, tests=50, target=2.17, context=128, width=384, heads=6, count=6)


def _make_gpt(seed: int, settings: dict[str, Any], *, tests: int, target: float, context: int, **sizes: int) -> Recipe:
    """Returns the training of a GPT on windows of so many characters, to a loss over so many of the test's.

    NAdam with long momentum tolerates stale gradients, and is as good without (Ajanthan et al., ICML 2025, section 5).
    """
    sys.path.append(str(ROOT / "benchmarks" / "convergence"))
    from tasks import char_gpt_units, characters as windows, measure_per_token

    torch.manual_seed(seed)
    train, test = windows(context)
    return Recipe(
        model=nn.Sequential(*char_gpt_units(context=context, **sizes)),
        loss=measure_per_token,
        targets=lambda batch: batch[1],
        optimizer=partial(torch.optim.NAdam, lr=settings["rate"], betas=(0.99, 0.999)),
        test=DataLoader(TensorDataset(*(values[:tests] for values in test)), batch_size=50),
        target=("loss", target),
        **_read(TensorDataset(*train), 16, seed, settings),
    )


def _read(data: Dataset[Any], batch: int, seed: int, settings: dict[str, Any]) -> dict[str, Any]:
    """Returns the data in a random order, and a learning rate that rises, then falls as half a cosine."""
    samples = len(data) if settings["minibatches"] is None else batch * settings["minibatches"]
    order = RandomSampler(data, num_samples=samples, generator=torch.Generator().manual_seed(seed))
    train = DataLoader(data, batch * settings["batch"], sampler=order, drop_last=True)
    per_update = settings["each_update"]
    # A worker that accumulates has an update for what is left of an epoch; two workers leave out an odd minibatch.
    updates = settings["epochs"] * (len(train) // per_update if per_update <= 2 else math.ceil(len(train) / per_update))

    def factor(update: int) -> float:
        return min(1.0, (update + 1) / (0.1 * updates)) * (1 + math.cos(math.pi * min(update / updates, 1.0))) / 2

    schedule = partial(torch.optim.lr_scheduler.LambdaLR, lr_lambda=factor)
    return {"train": train, "scheduler": schedule, "epochs": settings["epochs"]}
