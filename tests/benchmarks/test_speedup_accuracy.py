"""Time to accuracy in benchmarks/speedup: the recipes do what is asked, and the tables say what the rows have."""

from __future__ import annotations

import importlib
import sys
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch

FOLDER = str(Path(__file__).parents[2] / "benchmarks" / "speedup")
sys.path.append(FOLDER)
accuracy, accuracy_recipe = (importlib.import_module(name) for name in ("accuracy", "accuracy_recipe"))
sys.path.remove(FOLDER)  # other benchmarks have a run.py, too


@pytest.mark.parametrize(("batch", "each_update", "updates"), [(1, 1, 10), (1, 2, 4), (2, 1, 4)])
def test_rate_falls_to_zero_over_the_updates(
    batch: int, each_update: int, updates: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = accuracy.Task("digits", "accuracy", 0.01, 2, 5, 5e7)
    monkeypatch.setenv(accuracy_recipe.ASKED, task.describe_request(0.02, batch=batch, each_update=each_update))
    recipe = accuracy_recipe.recipe(3)
    images, _ = next(iter(recipe.train))
    assert len(images) == 32 * batch
    assert len(recipe.train) // each_update * recipe.epochs == updates
    optimizer = recipe.optimizer(recipe.model.parameters())
    scheduler, rates = recipe.scheduler(optimizer), []
    for _ in range(updates):
        rates.append(scheduler.get_last_lr()[0])
        optimizer.step()
        scheduler.step()
    assert max(rates) == pytest.approx(0.02)
    assert scheduler.get_last_lr()[0] == pytest.approx(0.0, abs=1e-9)


def test_characters_are_new_in_each_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(
        accuracy_recipe.ASKED, accuracy.Task("characters", "loss", 0.01, 2, 3, 5e7).describe_request(0.01)
    )
    recipe = accuracy_recipe.recipe(0)
    first, second = ([text for text, _ in recipe.train] for _ in range(2))
    assert [len(text) for text in first] == [16] * 3
    assert not torch.equal(first[0], second[0])
    text, following = next(islice(recipe.train, 1))
    assert torch.equal(text[:, 1:], following[:, :-1])
    assert recipe.loss(recipe.model(text), following).item() == pytest.approx(4.85, abs=0.6)  # of 128 symbols


def row(variant: str, seed: int, final: float, seconds: float | None) -> dict[str, Any]:
    row = {"task": "digits", "metric": "accuracy", "target": 0.98, "bytes_per_s": 5e7, "rate": 0.01, "others": 0.0}
    reached = {"seconds_to_target": seconds, "bytes_to_target": None if seconds is None else 1e8 * seconds}
    return row | reached | {"variant": variant, "seed": seed, "final": final, "samples_per_s": 100.0}


def test_tables() -> None:
    tuned = {"task": "digits", "metric": "accuracy", "tunes": "DDP", "each_update": 2}
    rows = [
        tuned | {"rate": 0.01, "final": 0.99, "is_best": True},
        tuned | {"rate": 0.02, "final": 0.98, "is_best": False},
        *(row("DDP", seed, 0.99, 20.0 + seed) for seed in range(3)),
        *(row("PipeDream, full", seed, 0.99 + seed / 1000, 5.0) for seed in range(3)),
        *(row("2BW", seed, 0.97, 5.0 if seed else None) for seed in range(3)),
    ]
    text = accuracy.tables(rows)
    assert "| DDP | 0.01 | 0.990 (0.990 to 0.990) | 21.0 (20.0 to 22.0) | 1.0 | 2.10 GB (2.00 GB to 2.20 GB)" in text
    assert "| PipeDream, full | 0.01 | 0.991 (0.990 to 0.992) | 5.0 (5.0 to 5.0) | 4.2 | 500 MB (500 MB to " in text
    assert "| 2BW | 0.01 | 0.970 (0.970 to 0.970) | not reached by 1 of 3 | - | not reached by 1 of 3" in text
    assert "Learning rates tried for DDP, with the accuracy at the end: 0.01: 0.990 (taken); 0.02: 0.980." in text


@pytest.mark.network
@pytest.mark.slow
@pytest.mark.long
@pytest.mark.processes
def test_runs() -> None:
    lines: list[str] = []
    rows = accuracy.measure("test", lines.append)
    assert [row["variant"] for row in rows if "variant" in row] == ["DDP", "PipeDream, full"]
    assert len(lines) == 2
    assert "| PipeDream, full | 0.01 |" in accuracy.tables(rows)
