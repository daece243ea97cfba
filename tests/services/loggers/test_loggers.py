"""Loggers: what they get, which files they leave, and those of other packages."""

import csv
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import zoo
from cases import make_pipeline
from training import SGD

import pipedream as pd
from pipedream.services.loggers.loggers import make_loggers


class Log:
    """A logger as Lightning's are."""

    def __init__(self) -> None:
        self.rows: list[tuple[int, dict[str, float]]] = []
        self.params: list[Mapping[str, Any]] = []
        self.status: list[str] = []

    def log_metrics(self, metrics: dict[str, float], step: int) -> None:
        self.rows.append((step, dict(metrics)))

    def log_hyperparams(self, params: Mapping[str, Any]) -> None:
        assert not self.rows
        self.params.append(params)

    def finalize(self, status: str) -> None:
        self.status.append(status)

    def of(self, name: str) -> dict[int, float]:
        return {step: metrics[name] for step, metrics in self.rows if name in metrics}


def trained(
    *loggers: Any, epochs: int = 2, folder: Path | None = None, resume: bool = False
) -> tuple[list[pd.Done], list[dict[str, float]]]:
    """Returns the results of a run, and its evaluations, one after each epoch."""
    animal = zoo.make("mlp")
    heard, evaluations = [], []
    how = {"scheduler": partial(torch.optim.lr_scheduler.ExponentialLR, gamma=0.9), "schedule": "1f1b"}
    metrics = {"spread": lambda output, targets: output.square().mean()}
    with make_pipeline(animal, loggers=loggers, optimizer=SGD, metrics=metrics, **how) as pipeline:
        if resume:
            pipeline.load(folder)
        for done in pipeline.train(animal.batches, epochs=epochs - pipeline.position[0]):
            heard.append(done)
            if done.ends_epoch:
                evaluations.append(pipeline.evaluate(animal.batches))
                if folder is not None:
                    pipeline.save(folder)
    return heard, evaluations


def read(path: Path) -> list[dict[str, str]]:
    with open(path, newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def test_all_numbers_go_to_a_logger_like_lightnings() -> None:
    log = Log()
    heard, evaluations = trained(log)
    for name in ("loss", "rate"):
        assert log.of(f"train/{name}") == {done.number: getattr(done, name) for done in heard}
    assert log.of("train/spread") == {done.number: done.metrics["spread"] for done in heard}
    assert log.of("epoch") == {done.number: done.epoch for done in heard}
    assert len(set(log.of("train/rate").values())) == len(heard), "the schedule's"
    ends = [done.number for done in heard if done.ends_epoch]
    for name in ("loss", "spread"):
        assert log.of(f"test/{name}") == dict(zip(ends, (evaluation[name] for evaluation in evaluations), strict=True))
    speeds, bubbles = log.of("train/samples_per_s"), log.of("train/bubble")
    assert set(ends) <= speeds.keys() == bubbles.keys()
    assert min(speeds.values()) > 0
    assert 0.0 <= min(bubbles.values()) <= max(bubbles.values()) < 1.0
    assert log.status == ["success"]
    (params,) = log.params
    assert (params["schedule"], params["workers"], params["plan"], params["rate"]) == ("1f1b", 2, "1-1", 0.1)


def test_evaluations_are_named_and_a_failed_run_finalizes_its_loggers() -> None:
    class Full(Log):
        def finalize(self, status: str) -> None:
            super().finalize(status)
            raise OSError("no space left")

    animal, log = zoo.make("mlp"), Full()
    with suppress(ZeroDivisionError), make_pipeline(animal, loggers=[log], ema=0.9) as pipeline:
        pipeline.evaluate(animal.batches)
        pipeline.evaluate(animal.batches, ema=True)
        pipeline.evaluate(animal.batches, name="valid")
        raise ZeroDivisionError
    assert log.status == ["failed"]
    names = "test/loss", "test_ema/loss", "valid/loss"
    assert [(step, *metrics) for step, metrics in log.rows] == [(0, name) for name in names]


def test_a_csv_file_has_a_row_for_each_minibatch(tmp_path: Path) -> None:
    path = tmp_path / "new" / "train.csv"
    heard, evaluations = trained(pd.loggers.CSVLogger(path))
    rows = read(path)
    head = ["number", "epoch", "loss", "weight", "samples", "rate", "spread", "samples_per_s", "bubble"]
    assert [*rows[0]] == [*head, "test/loss", "test/spread"]
    assert [int(row["number"]) for row in rows] == [done.number for done in heard]
    for row, done in zip(rows, heard, strict=True):
        assert (float(row["loss"]), float(row["rate"])) == (done.loss, done.rate)
        assert (float(row["weight"]), int(row["samples"])) == (done.weight, done.samples)
        assert bool(row["test/loss"]) == done.ends_epoch
    tests = [float(row["test/loss"]) for row in rows if row["test/loss"]]
    assert tests == [evaluation["loss"] for evaluation in evaluations]


@pytest.mark.slow
def test_a_resumed_csv_file_is_that_of_one_run(tmp_path: Path) -> None:
    def read_rows(name: str) -> list[dict[str, str]]:
        return [{k: v for k, v in row.items() if k not in ("samples_per_s", "bubble")} for row in read(tmp_path / name)]

    trained(pd.loggers.CSVLogger(tmp_path / "whole.csv"), epochs=3)
    trained(pd.loggers.CSVLogger(tmp_path / "parts.csv"), epochs=2, folder=tmp_path / "saved")
    # A run that was killed has logged more than its last checkpoint has.
    log = pd.loggers.CSVLogger(tmp_path / "parts.csv")
    log.log_metrics({"loss": 0.0, "beyond": 1.0}, len(read(tmp_path / "parts.csv")))
    log.finalize("success")
    trained(pd.loggers.CSVLogger(tmp_path / "parts.csv"), epochs=3, folder=tmp_path / "saved", resume=True)
    assert [{k: v for k, v in row.items() if k != "beyond"} for row in read_rows("parts.csv")] == read_rows("whole.csv")
    trained(pd.loggers.CSVLogger(tmp_path / "parts.csv"), epochs=1)
    assert read_rows("parts.csv") == read_rows("whole.csv")[: len(zoo.make("mlp").batches)], "a new run begins anew"


def test_what_is_no_logger_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipedream.services.loggers.loggers.find_spec", lambda name: None)
    named = partial(make_loggers, folder=tmp_path)
    for call, logger, words in (
        (trained, print, "was given as a logger; give an object with log_metrics"),
        (trained, pd.loggers.CSVLogger, "was given as a logger; give an object with log_metrics"),
        (named, ["csv", "commet"], "'commet' is not known; choose from csv, tensorboard, wandb"),
        (trained, pd.loggers.CSVLogger("/dev/full"), "cannot write /dev/full: No space left"),
        (named, ["wandb"], "needs the package wandb, which is not installed; pip install wandb"),
    ):
        with pytest.raises(pd.PipelineError, match=words):
            call(logger)


def test_tensorboard_gets_scalars_by_name(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    (tmp_path / "file").touch()
    with pytest.raises(pd.PipelineError, match=f"cannot write {tmp_path}/file/a: "):
        trained(pd.loggers.TensorBoardLogger(tmp_path / "file" / "a"))
    heard, evaluations = trained(pd.loggers.TensorBoardLogger(tmp_path))
    events = EventAccumulator(str(tmp_path)).Reload()
    assert [event.step for event in events.Scalars("train/loss")] == [done.number for done in heard]
    assert [event.value for event in events.Scalars("test/loss")] == pytest.approx([e["loss"] for e in evaluations])
    assert {"train/rate", "train/samples_per_s", "train/bubble", "test/spread"} <= set(events.Tags()["scalars"])
    assert "hyperparameters/text_summary" in events.Tags()["tensors"]


@pytest.mark.slow
def test_wandb_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = pytest.importorskip("wandb", reason="wandb is not installed")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    rows: dict[int, Any] = {}
    log = wandb.Run.log

    def noted(run: Any, row: dict[str, float], step: int) -> None:
        rows.setdefault(step, {}).update(row)
        log(run, row, step)

    monkeypatch.setattr(wandb.Run, "log", noted)
    heard, evaluations = trained(pd.loggers.WandbLogger(project="zoo", dir=str(tmp_path)))
    assert wandb.run is None, "it is finished"
    assert list(tmp_path.rglob("*.wandb"))
    assert {step: row["train/loss"] for step, row in rows.items()} == {done.number: done.loss for done in heard}
    tests = [row["test/loss"] for row in rows.values() if "test/loss" in row]
    assert tests == [evaluation["loss"] for evaluation in evaluations]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of its own dependencies
def test_mlflow_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow", reason="mlflow is not installed")
    mlflow.set_tracking_uri(f"sqlite:///{tmp_path}/mlflow.db")
    monkeypatch.chdir(tmp_path)
    heard, evaluations = trained(pd.loggers.MLFlowLogger(run_name="zoo"))
    assert mlflow.active_run() is None, "it is ended"
    (run,) = mlflow.search_runs(output_format="list")
    assert (run.info.status, run.info.run_name, run.data.params["schedule"]) == ("FINISHED", "zoo", "1f1b")
    client = mlflow.MlflowClient()

    def history(name: str) -> dict[int, float]:
        return {metric.step: metric.value for metric in client.get_metric_history(run.info.run_id, name)}

    assert history("train/loss") == {done.number: done.loss for done in heard}
    assert [*history("test/loss").values()] == [evaluation["loss"] for evaluation in evaluations]
