"""Callbacks: which events they get, and that a stop ends all ranks at the same minibatch."""

import warnings
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import processes
import pytest
import torch
import zoo
from marks import thinned
from training import SGD

import pipedream as pd


class Events(pd.callbacks.Callback):
    """Writes down what it gets, with the weights' position then."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def of(self, kind: str) -> list[tuple[Any, ...]]:
        return [call for call in self.calls if call[0] == kind]

    def on_minibatch(self, pipeline: Any, done: pd.Done) -> None:
        self.calls.append(("minibatch", done.number))

    def on_evaluation(self, pipeline: Any, metrics: Mapping[str, float]) -> None:
        self.calls.append(("evaluation", pipeline.drain(), dict(metrics)))

    def on_checkpoint(self, pipeline: Any, folder: Path) -> None:
        self.calls.append(("checkpoint", pipeline.drain(), (folder / "checkpoint.json").is_file()))


class StopsAt(pd.callbacks.Callback):
    """Stops after a minibatch or at an evaluation, at some ranks only, as a limit of time of one rank would."""

    def __init__(self, number: int = -1, ranks: tuple[int, ...] = (0, 1, 2, 3), evaluation: int = -1) -> None:
        self.number, self.ranks, self.evaluations_left = number, ranks, evaluation

    def on_minibatch(self, pipeline: Any, done: pd.Done) -> None:
        pipeline.should_stop |= done.number == self.number and pipeline.rank in self.ranks

    def on_evaluation(self, pipeline: Any, metrics: Mapping[str, float]) -> None:
        self.evaluations_left -= 1
        pipeline.should_stop |= self.evaluations_left == 0 and pipeline.rank in self.ranks


def pipeline_of(animal: zoo.Animal, *counts: int, **options: Any) -> pd.Pipeline:
    plan = zoo.plan_of(animal, len(counts) or 2, counts or None)
    return pd.Pipeline(animal.model, plan, **{"loss": animal.loss, "optimizer": SGD} | options)


def trained(
    counts: tuple[int, ...], callbacks: list[pd.callbacks.Callback], evaluate: bool = False, break_at: int = -1
) -> tuple[list[float], int, dict[str, torch.Tensor], bool]:
    """Returns the losses of a run of 8 epochs, its minibatches, its weights, and whether it was stopped."""
    animal, losses = zoo.make("mlp"), []
    with pipeline_of(animal, *counts, schedule="pipedream", callbacks=callbacks) as pipeline:
        for done in pipeline.train(animal.batches, epochs=8):
            losses.append(done.loss)
            if evaluate and done.ends_epoch:
                pipeline.evaluate(animal.batches)
            if done.number == break_at:
                break
        return losses, pipeline.drain(), pipeline.state_dict(), pipeline.should_stop


def test_events_come_in_order_with_complete_checkpoints(tmp_path: Path) -> None:
    animal, events = zoo.make("mlp"), Events()
    with pipeline_of(animal, 1, 1, 1, callbacks=[events]) as pipeline:
        heard = []
        for done in pipeline.train(animal.batches, epochs=2):
            heard.append(done.number)
            assert ("minibatch", done.number) in events.calls, "before the loop"
            if done.ends_epoch:
                pipeline.evaluate(animal.batches)
                pipeline.evaluate(animal.batches, name="train")
                pipeline.save(tmp_path, wait=False)
                pipeline.save(tmp_path)  # exists already
    assert [number for _, number in events.of("minibatch")] == heard
    others = [call for call in events.calls if call[0] != "minibatch"]
    assert others[1] == ("checkpoint", others[0][1], True)
    assert [call[0] for call in others] == ["evaluation", "checkpoint"] * 2
    assert (others[-1][1], others[0][2].keys()) == (2 * len(animal.batches), {"loss"})


@pytest.mark.parametrize("counts", [(1, 1, 1), (2, 1)])
def test_a_stop_ends_as_a_break_does(counts: tuple[int, ...]) -> None:
    losses, minibatches, weights, stopped = trained(counts, [StopsAt(3)])
    whole, *_ = trained(counts, [])
    assert stopped
    assert 4 <= minibatches < len(whole)
    assert losses == whole[:minibatches], "the loop gets what was admitted, too"
    _, _, expected, _ = trained(counts, [], break_at=3)
    assert all(torch.equal(weights[name], expected[name]) for name in expected)


def test_a_stop_in_the_last_minibatch_of_a_phase_ends_the_training() -> None:
    animal = zoo.make("mlp")
    count = len(animal.batches)
    with pipeline_of(animal, phases="pipedream:2e,1f1b", callbacks=[StopsAt(2 * count - 1)]) as pipeline:
        assert len(list(pipeline.train(animal.batches, epochs=4))) == 2 * count
        assert pipeline.should_stop


class Scripted(pd.callbacks.EarlyStopping):
    """Is given these losses."""

    def __init__(self, losses: list[float], **options: Any) -> None:
        super().__init__(**options)
        self.losses = iter(losses)

    def on_evaluation(self, pipeline: Any, metrics: Mapping[str, float]) -> None:
        super().on_evaluation(pipeline, {"loss": next(self.losses)})


@pytest.mark.parametrize(
    ("losses", "options", "evaluations"),
    [
        ([3.0, 2.0, 2.5, 2.0, 1.0, 0.5, 0.4, 0.3], {"patience": 2}, 4),
        ([3.0, 2.0, 1.95, 1.9, 1.0, 1.0, 1.0, 1.0], {"patience": 2, "min_delta": 0.2}, 4),
        ([1.0, 2.0, 3.0, 3.0, 3.0, 3.0, 3.0, 3.0], {"patience": 3, "mode": "max"}, 6),
        ([3.0, float("nan"), 1.0], {}, 2),
        ([8.0, 7.0, 6.0, 5.0, 4.0, 3.0, 2.0, 1.0], {"patience": 0}, 8),
    ],
)
def test_early_stopping(losses: list[float], options: dict[str, Any], evaluations: int) -> None:
    heard = Events()
    *_, stopped = trained((1, 1), [Scripted(losses, **options), heard], evaluate=True)
    assert len(heard.of("evaluation")) == evaluations
    assert stopped == (evaluations < 8)


@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize("obeys", [True, False])
def test_a_stop_between_two_calls_is_seen_or_warned_of(inside: bool, obeys: bool) -> None:
    animal, count = zoo.make("mlp"), 0
    with (
        warnings.catch_warnings(record=True) as caught,
        pipeline_of(animal, schedule="1f1b", callbacks=[Scripted([3.0] * 4, patience=2)]) as pipeline,
    ):
        warnings.simplefilter("always")
        for _ in range(4):
            if obeys and pipeline.should_stop:
                break
            for done in pipeline.train(animal.batches):
                count += 1
                if inside and done.ends_epoch:
                    pipeline.evaluate(animal.batches)
            if not inside:
                pipeline.evaluate(animal.batches)
    told = ["if pipeline.should_stop: break" in str(warning.message) for warning in caught]
    assert (count, any(told)) == (len(animal.batches) * (3 if obeys else 4), not obeys)


@pytest.mark.parametrize("ema", [{}, {"ema": True}])
def test_early_stopping_continues_from_a_checkpoint(ema: dict[str, bool], tmp_path: Path) -> None:
    """The last evaluation before the checkpoint counts, also one of averaged weights."""

    def run(first: int) -> list[pd.callbacks.EarlyStopping]:
        animal = zoo.make("mlp")
        stopping = [pd.callbacks.EarlyStopping(mode=mode, patience=50) for mode in ("min", "max")]
        with pipeline_of(animal, callbacks=stopping, ema=0.9) as pipeline:
            if first:
                pipeline.load(tmp_path)
            for done in pipeline.train(animal.batches, epochs=4 - first):
                if done.ends_epoch:
                    pipeline.evaluate(animal.batches, **ema)
                    if not first and done.epoch == 1:
                        pipeline.save(tmp_path)
        return stopping

    whole, resumed = run(0), run(2)
    assert [vars(callback) for callback in resumed] == [vars(callback) for callback in whole]
    assert whole[0].best_score != whole[1].best_score
    assert whole[1].wait_count == 3, "the loss only falls"


def test_what_makes_no_sense_is_refused(tmp_path: Path) -> None:
    class Keeps(pd.callbacks.Callback):
        def state_dict(self) -> dict[str, Any]:
            return {"weights": torch.zeros(1)}

    animal = zoo.make("mlp")
    with pytest.raises(pd.PipelineError, match="mode='up' was asked for; give 'min' or 'max'"):
        pd.callbacks.EarlyStopping(mode="up")
    with pytest.raises(pd.PipelineError, match=r"not a list of pipedream\.callbacks\.Callback objects"):
        pipeline_of(animal, callbacks=[print])
    with pytest.raises(pd.PipelineError, match="monitor is 'accuracy', but an evaluation has loss"):
        pipeline_of(animal, callbacks=[pd.callbacks.EarlyStopping("accuracy")])
    with (
        pytest.raises(pd.PipelineError, match="Keeps/0 cannot be kept in a checkpoint"),
        pipeline_of(animal, callbacks=[Keeps()]) as pipeline,
    ):
        pipeline.save(tmp_path)


@pytest.mark.slow
def test_a_recipe_has_loggers_and_callbacks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    animal, events = zoo.make("mlp"), Events()
    heard = {"callbacks": [pd.callbacks.EarlyStopping(patience=1, min_delta=9.0), events]}
    heard |= {"loggers": [pd.loggers.CSVLogger(tmp_path / "own.csv")]}
    recipe = pd.Recipe(animal.model, animal.loss, SGD, animal.batches, animal.batches, epochs=8, name="zoo", **heard)
    plan = zoo.plan_of(animal, 2)
    summary = pd.run(lambda seed: recipe, plan=plan, schedule="1f1b", out=tmp_path / "run", logs=("csv",))
    count = 2 * len(animal.batches)
    assert summary["minibatches"] == count, "the second evaluation is no better by 9"
    assert f"stopped after minibatch {count}: should_stop was set by a callback" in capsys.readouterr().out
    rows = (tmp_path / "own.csv").read_text(encoding="utf-8").splitlines()
    assert len(rows) == 1 + count
    assert len((tmp_path / "run" / "train.csv").read_text(encoding="utf-8").splitlines()) == len(rows)
    assert events.of("checkpoint") == [("checkpoint", number, True) for number in (count // 2, count)]


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.parametrize(
    ("counts", "callbacks", "evaluate"),
    [
        ((2, 1), [StopsAt(3)], False),
        ((1, 1), [StopsAt(3, ranks=(0,))], False),  # what reads the data decides
        ((1, 1), [StopsAt(evaluation=2, ranks=(1,))], True),
    ],
)
def test_all_processes_stop_at_the_same_minibatch(counts: tuple[int, ...], callbacks: Any, evaluate: bool) -> None:
    results = processes.team(sum(counts)).results(partial(trained, evaluate=evaluate), counts, callbacks)
    alone = trained(counts, [StopsAt(evaluation=2)] if evaluate else [StopsAt(3)], evaluate=evaluate)
    for losses, minibatches, _, stopped in results:
        assert stopped
        assert (losses, minibatches) == alone[:2]
    assert all(torch.equal(results[0][2][name], tensor) for name, tensor in alone[2].items())


def evaluated(calls: str, *, epochs: int = 3, **rest: Any) -> dict[str, list[float]]:
    """Trains with evaluations after each epoch: T plain, A of the average, V of another name; returns the losses."""
    animal, results = zoo.make("mlp"), {letter: list[float]() for letter in calls}
    with pipeline_of(animal, ema=0.9, **rest) as pipeline:
        for done in pipeline.train(animal.batches, epochs=epochs):
            for letter in calls if done.ends_epoch else "":
                choice = {"A": {"ema": True}, "V": {"name": "val"}}.get(letter, {})
                results[letter].append(pipeline.evaluate(animal.batches, **choice)["loss"])
    return results


@pytest.mark.parametrize("schedule", thinned(["1f1b", "pipedream"]))
@pytest.mark.parametrize("calls", thinned(["T", "A", "VTA", "AT", "VA", "AV", "TA"], 3))
def test_callbacks_follow_the_average_where_nothing_else_is_evaluated(calls: str, schedule: str) -> None:
    followed = "T" if "T" in calls else "A"
    heard = Events()
    losses = evaluated(calls, callbacks=[heard], schedule=schedule)[followed]
    assert [metrics["loss"] for *_, metrics in heard.of("evaluation")] == losses
    assert len(losses) == 3


def test_a_plateau_follows_the_average() -> None:
    plateau = partial(torch.optim.lr_scheduler.ReduceLROnPlateau, patience=0, factor=0.5, threshold=10.0)
    animal, rates = zoo.make("mlp"), []
    with pipeline_of(animal, schedule="1f1b", ema=0.9, scheduler=plateau) as pipeline:
        for _ in range(3):  # evaluated between two calls of `train`
            rates.append(list(pipeline.train(animal.batches))[-1].rate)
            pipeline.evaluate(animal.batches, ema=True)
    assert rates == [0.1, 0.05, 0.025]


@pytest.mark.parametrize(("calls", "names"), [("V", r"\['val'\]"), ("", "none")])
def test_early_stopping_without_its_evaluations_warns(calls: str, names: str) -> None:
    with pytest.warns(UserWarning, match=f"early stopping follows evaluations named 'test', but this run made {names}"):
        evaluated(calls, epochs=1, schedule="1f1b", callbacks=[pd.callbacks.EarlyStopping()])
