"""The training loop: what it measures."""

import io
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import nn
from torch.nn import functional as F

import pipedream as pd
from pipedream.apps.training import loop, train
from pipedream.workflows.simulate import simulate_program


class Finishing:
    """A pipeline that holds two minibatches when it is drained; it takes 5 s to fill it, and then 1 s a minibatch."""

    plan = SimpleNamespace(workers=1, in_flight=(2,))
    rank, position, should_stop, extra = 0, (0, 0), False, None
    now_s, finished, is_full = 0.0, 0, False

    def perf_counter(self) -> float:
        return self.now_s

    def train(self, loader: Any, until_epoch: int) -> Iterator[pd.Done]:
        for number in range(8):
            if number >= self.finished:
                self.now_s += 1.0 if self.is_full else 5.0
                self.is_full = True
                self.finished += 1
            yield pd.Done(number, number // 4, number % 4 == 3, 0.5, 4.0, 4, 0.1)

    def evaluate(self, loader: Any) -> dict[str, float]:
        self.now_s += 100.0
        self.finished, self.is_full = min(self.finished + 2, 8), False
        return {"loss": 0.5}

    def drain(self) -> int:
        return self.finished


@pytest.mark.parametrize(("batches", "rates"), [(1, [4.0, 4.0]), (4, [4.0])])
def test_rate_of_an_epoch(batches: int, rates: list[float], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The first minibatches of an epoch were finished by the drain before an evaluation; to fill up again takes 5 s.

    Of 8 minibatches 4 warm up: the first epoch is left out, and nothing of the second.
    """
    pipeline: Any = Finishing()
    monkeypatch.setattr(loop, "time", pipeline)
    recipe = pd.Recipe(nn.Linear(1, 1), F.mse_loss, partial(torch.optim.SGD, lr=0.1), [1] * batches, [1])
    policy = loop.CheckpointPolicy(tmp_path, 0, 1)
    training = loop.TrainingLoop(pipeline, recipe, Console(file=io.StringIO()), 1, policy, 0.0)
    assert not training.train(2, None, 1.0)
    assert [number for number, _ in training.losses] == list(range(8))
    assert training.samples_per_s == rates


def test_of_a_long_run_a_part_is_simulated(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    totals: list[int] = []

    def simulate(program: pd.Program, total: int, **how: Any) -> pd.Timeline:
        totals.append(total)
        return simulate_program(program, total, **how)

    monkeypatch.setattr(train, "simulate_program", simulate)
    monkeypatch.setattr(train, "_LONGEST", 12)
    data = [(torch.randn(4, 3), torch.randn(4, 3))] * 50
    layers = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    pd.run(
        lambda: pd.Recipe(layers, F.mse_loss, partial(torch.optim.SGD, lr=0.1), data),
        workers=2, epochs=1, out=tmp_path / "run", quiet=True,
    )  # fmt: skip
    assert max(totals) == 12


def test_a_log_gets_lines_within_a_long_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipedream.core.progress.QUIET_S", 2.0)
    now_s = 0.0
    monkeypatch.setattr("pipedream.core.progress.time.monotonic", lambda: now_s)
    log = io.StringIO()
    shown = loop.Progress(Console(file=log, soft_wrap=True))
    shown.remaining = 1000
    for number in range(100, 200):
        now_s += 1.5
        shown.show(pd.Done(number, 3, number == 101, 0.5, 8.0, 8, 0.1))
    lines = log.getvalue().splitlines()
    assert "minibatch    103      0.7 minibatches/s  loss 0.5000  about 1496 s left" in lines[0]
    assert len(lines) < 9


def test_what_is_left() -> None:
    """Of epochs of ten minibatches, of a run that ends within one, and of a loader without a length."""
    rows = ((0, 0), 3, None), ((1, 4), 3, None), ((1, 4), 3, 20), ((1, 4), 3, 7)
    counts = [loop.count_left([0] * 10, *row) for row in rows]
    assert [*counts, loop.count_left(iter([0]), (0, 0), 3, 20)] == [30, 16, 6, 0, 0]
