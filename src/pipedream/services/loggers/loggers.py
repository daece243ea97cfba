"""Loggers of a run's results: Lightning's protocol, and loggers for files, TensorBoard, Weights & Biases and MLflow.

| name | of | when |
| --- | --- | --- |
| `epoch`, `train/loss`, `train/rate`, `train/METRIC` | a minibatch; `rate` is the learning rate | every minibatch |
| `train/samples_per_s`, `train/bubble` | the time since the last such row | about every second, and at an epoch's end |
| `test/loss`, `test/METRIC` | an evaluation | every evaluation |

The step is the number of the newest minibatch whose gradients are in the weights, from 0.
"""

import csv
import json
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from statistics import mean
from typing import Any, Protocol

from pipedream.core.artifact import writing
from pipedream.core.errors import PipelineError, RecipeError
from pipedream.runtime.results import Done

_SPEED_EVERY_S = 1.0


class Logger(Protocol):
    """Protocol of a logger, that of Lightning's loggers; only rank 0 calls it.

    It may also have ``log_hyperparams(params)``, called before the first minibatch, and ``finalize(status)``, called
    when the pipeline closes, with 'success' or 'failed'. If it has ``log(done)``, that gets each `Done` instead.
    """

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        """Logs numbers by name."""


class Loggers:
    """All loggers of a run. Every rank makes one and calls it, because of the busy shares; only rank 0 logs.

    Args:
        loggers: as many on each rank.
        status: returns rank -> its recent busy share, for the ranks that are known here.

    Raises:
        PipelineError: an object is not a logger.
    """

    def __init__(
        self, loggers: Iterable[Any], rank: int, workers: int, status: Callable[[], Mapping[int, Mapping[str, float]]]
    ) -> None:
        self._loggers = tuple(loggers)
        self._called = self._loggers if rank == 0 else ()
        self._workers = workers
        self._status = status
        self._begun = self._is_final = False
        self._since_s: float | None = None
        self._samples = 0
        for logger in self._loggers:
            if isinstance(logger, type) or not (hasattr(logger, "log_metrics") or hasattr(logger, "log")):
                raise PipelineError(
                    f"{logger!r} was given as a logger; give an object with log_metrics(metrics, step), such as "
                    "pipedream.loggers.CSVLogger(path) or a logger of Lightning, or with log(done)"
                )

    def begin(self, params: Callable[[], Mapping[str, Any]]) -> None:
        """Logs the hyperparameters, once."""
        if self._is_final:
            raise PipelineError("train() was called after the pipeline's with block; train in it, or make a new one")
        loggers = () if self._begun else self._called
        self._begun = True
        for logger in loggers:
            if hasattr(logger, "log_hyperparams"):
                logger.log_hyperparams(dict(params()))

    def minibatch(self, done: Done) -> None:
        if not self._loggers:
            return
        speed = self._measure_speed(done)
        numbers = {"epoch": done.epoch, "train/loss": done.loss, "train/rate": done.rate}
        numbers |= {f"train/{name}": value for name, value in done.metrics.items()}
        for logger in self._called:
            if hasattr(logger, "log"):
                logger.log(done)
                if speed and hasattr(logger, "log_metrics"):
                    logger.log_metrics(speed, done.number)
            else:
                logger.log_metrics(numbers | speed, done.number)

    def evaluation(self, name: str, metrics: Mapping[str, float], step: int) -> None:
        """Logs an evaluation, named 'test' or otherwise."""
        for logger in self._called:
            if hasattr(logger, "log_metrics"):
                logger.log_metrics({f"{name}/{metric}": value for metric, value in metrics.items()}, step)

    def pause(self) -> None:
        """Leaves the time until the next minibatch, of a drain or an evaluation, out of the throughput."""
        self._since_s = None

    def finalize(self, status: str) -> None:
        self._is_final = True
        for logger in self._called:
            if hasattr(logger, "finalize"):
                logger.finalize(status)

    def _measure_speed(self, done: Done) -> dict[str, float]:
        """Returns throughput and bubble since the last call that returned them, about every second."""
        now_s = time.perf_counter()
        self._samples += done.samples
        if self._since_s is None:
            self._status()
        elif now_s - self._since_s < _SPEED_EVERY_S and not done.ends_epoch:
            return {}
        speed: dict[str, float] = {}
        if self._since_s is not None and now_s > self._since_s:
            speed["train/samples_per_s"] = self._samples / (now_s - self._since_s)
            shares = [row["busy_share"] for row in self._status().values()]
            if len(shares) == self._workers:
                speed["train/bubble"] = 1.0 - mean(shares)
        self._since_s, self._samples = now_s, 0
        return speed


# Each of these loggers opens with its first log, so only at rank 0; a log after `finalize` opens it again.


class CSVLogger:
    """Writes one row per minibatch: number, epoch, loss, weight, samples, rate, metrics; then what else is logged.

    A number that was logged for some minibatches only is empty in the other rows. The file is overwritten, and its
    folder created; if the first minibatch is not number 0, as in a resumed run, earlier rows are kept.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = Path(path)
        self._file: Any = None
        self._columns: list[str] = []
        self._row: dict[str, Any] = {}

    def log(self, done: Done) -> None:
        row = {"epoch": done.epoch, "loss": done.loss, "weight": done.weight, "samples": done.samples}
        self.log_metrics(row | {"rate": done.rate, **done.metrics}, done.number)

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        if self._row and self._row["number"] != step:
            self._write()
        self._row = {"number": step} | self._row | {n.removeprefix("train/"): value for n, value in metrics.items()}

    def finalize(self, status: str) -> None:
        if self._row:
            self._write()
        if self._file is not None:
            with writing(self._path):
                self._file.close()
            self._file = None

    def _write(self) -> None:
        row, self._row = self._row, {}
        with writing(self._path):
            if self._file is None or not row.keys() <= set(self._columns):
                self._open(row)
            csv.DictWriter(self._file, self._columns).writerow(row)

    def _open(self, row: Mapping[str, Any]) -> None:
        """Opens the file with columns for the row, after the rows before it."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        earlier_rows: list[dict[str, str]] = []
        if row["number"] and self._path.exists():
            with open(self._path, newline="", encoding="utf-8") as file:
                reader = csv.DictReader(file)
                earlier_rows = [earlier_row for earlier_row in reader if int(earlier_row["number"]) < row["number"]]
                self._columns = list(reader.fieldnames or ())
        else:
            self._columns = []
        self._columns += [name for name in row if name not in self._columns]
        if self._file is not None:
            self._file.close()
        self._file = open(self._path, "w", buffering=1, newline="", encoding="utf-8")  # noqa: SIM115 - until finalize()
        writer = csv.DictWriter(self._file, self._columns)
        writer.writeheader()
        writer.writerows(earlier_rows)


class TensorBoardLogger:
    """Writes scalars, named as in this module's table, for TensorBoard.

    A resumed run hides what an earlier one has written from its first minibatch on.

    Raises:
        ImportError: the package tensorboard is not installed.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        _check_installed("tensorboard")
        self._folder = Path(folder)
        self._writer: Any = None
        self._params = ""

    def log_hyperparams(self, params: Mapping[str, Any]) -> None:
        self._params = json.dumps(params, indent=1, default=str)

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        with writing(self._folder):
            if self._writer is None:
                from torch.utils.tensorboard import SummaryWriter

                self._writer = SummaryWriter(str(self._folder), purge_step=step or None)
                if self._params:
                    self._writer.add_text("hyperparameters", f"```\n{self._params}\n```", step)
            for name, value in metrics.items():
                self._writer.add_scalar(name, value, step)

    def finalize(self, status: str) -> None:
        if self._writer is not None:
            with writing(self._folder):
                self._writer.close()
            self._writer = None


class WandbLogger:
    """Logs to Weights & Biases, by its own package.

    Args:
        init: arguments of ``wandb.init``, such as project and name; `wandb login` and its environment variables apply
            too (``WANDB_MODE=offline`` needs no network). A run that is active already is used, and stays open.

    Raises:
        ImportError: the package wandb is not installed.
    """

    def __init__(self, **init: Any) -> None:
        _check_installed("wandb")
        self._init = init
        self._run: Any = None
        self._starts_run = False

    @property
    def experiment(self) -> Any:
        """The wandb run, which is started by the first use."""
        if self._run is None:
            import wandb

            self._starts_run = wandb.run is None
            self._run = wandb.run or wandb.init(**self._init)
        return self._run

    def log_hyperparams(self, params: Mapping[str, Any]) -> None:
        self.experiment.config.update(dict(params), allow_val_change=True)

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        self.experiment.log(dict(metrics), step=step)

    def finalize(self, status: str) -> None:
        if self._starts_run:
            self._run.finish(exit_code=int(status != "success"))
        self._run, self._starts_run = None, False


class MLFlowLogger:
    """Logs to MLflow, by its own package.

    Args:
        start: arguments of ``mlflow.start_run``, such as run_name; MLflow's environment variables apply too
            (``MLFLOW_TRACKING_URI``, ``MLFLOW_EXPERIMENT_NAME``). A run that is active already is used, and stays open.

    Raises:
        ImportError: the package mlflow is not installed.
    """

    def __init__(self, **start: Any) -> None:
        _check_installed("mlflow")
        self._start = start
        self._run: Any = None
        self._starts_run = False

    @property
    def experiment(self) -> Any:
        """The MLflow run, which is started by the first use."""
        if self._run is None:
            import mlflow

            active = mlflow.active_run()
            self._starts_run = active is None
            self._run = active or mlflow.start_run(**self._start)
        return self._run

    def log_hyperparams(self, params: Mapping[str, Any]) -> None:
        import mlflow

        assert self.experiment is not None
        mlflow.log_params({name: str(value) for name, value in params.items()})

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        import mlflow

        mlflow.log_metrics(dict(metrics), step=step, run_id=self.experiment.info.run_id)

    def finalize(self, status: str) -> None:
        import mlflow

        if self._starts_run:
            mlflow.end_run("FINISHED" if status == "success" else "FAILED")
        self._run, self._starts_run = None, False


def make_loggers(names: Sequence[str], folder: Path) -> list[Logger]:
    """Returns the loggers of these names for a run folder.

    Raises:
        RecipeError: another name, or a package is not installed.
    """
    factories: dict[str, Callable[[], Logger]] = {
        "csv": lambda: CSVLogger(folder / "train.csv"),
        "tensorboard": lambda: TensorBoardLogger(folder / "tensorboard"),
        "wandb": lambda: WandbLogger(name=folder.name, dir=str(folder)),
        "mlflow": lambda: MLFlowLogger(run_name=folder.name),
    }
    if unknown := [name for name in names if name not in factories]:
        raise RecipeError(f"logger {unknown[0]!r} is not known; choose from {', '.join(factories)}")
    try:
        return [factories[name]() for name in names]
    except ImportError as error:
        raise RecipeError(str(error)) from None


def _check_installed(package: str) -> None:
    if find_spec(package) is None:
        raise ImportError(
            f"this logger needs the package {package}, which is not installed; pip install {package}, or "
            f"'torch-pipedream[{package}]'"
        )
