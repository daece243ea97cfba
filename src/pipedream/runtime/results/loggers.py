"""Loggers of a run's results."""

from __future__ import annotations

import csv
import os
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

from pipedream.core.errors import RecipeError
from pipedream.runtime.results.results import Done

__all__ = ["CSVLogger", "Logger", "TensorBoardLogger", "loggers_of"]


class Logger(Protocol):
    """Protocol of a logger; rank 0 calls it for every minibatch."""

    def log(self, done: Done) -> None:
        """Logs one minibatch."""


class CSVLogger:
    """Writes one row per minibatch: number, epoch, loss, weight, samples, rate, metrics. Creates the file's folder."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        self._file = open(path, "w", newline="", encoding="utf-8")  # noqa: SIM115 - closed in close()
        self._writer = csv.writer(self._file)
        self._named = False

    def log(self, done: Done) -> None:
        if not self._named:
            self._writer.writerow(["number", "epoch", "loss", "weight", "samples", "rate", *done.metrics])
            self._named = True
        self._writer.writerow(
            [done.number, done.epoch, done.loss, done.weight, done.samples, done.rate, *done.metrics.values()]
        )

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class TensorBoardLogger:
    """Writes scalars ``train/loss``, ``train/rate`` and ``train/<metric>`` for TensorBoard.

    Raises:
        ImportError: the package tensorboard is not installed.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        from torch.utils.tensorboard import SummaryWriter  # optional: needs the package tensorboard

        self._writer: Any = SummaryWriter(str(folder))

    def log(self, done: Done) -> None:
        for name, value in {"loss": done.loss, "rate": done.rate, **done.metrics}.items():
            self._writer.add_scalar(f"train/{name}", value, done.number)

    def close(self) -> None:
        self._writer.close()


def loggers_of(names: Sequence[str], folder: Path) -> list[CSVLogger | TensorBoardLogger]:
    """Returns the loggers named 'csv' and 'tensorboard' for a run folder; raises RecipeError for another name."""
    found: list[CSVLogger | TensorBoardLogger] = []
    for name in names:
        if name == "csv":
            found.append(CSVLogger(folder / "train.csv"))
        elif name == "tensorboard":
            found.append(TensorBoardLogger(folder / "tensorboard"))
        else:
            raise RecipeError(f"logger {name!r} is not known; choose csv or tensorboard")
    return found
