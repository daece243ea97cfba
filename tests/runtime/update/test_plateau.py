"""ReduceLROnPlateau: one schedule for all stages, which follows the evaluations."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import zoo
from cases import make_pipeline
from marks import long, slow
from torch import Tensor
from torch.optim.lr_scheduler import ReduceLROnPlateau

import pipedream as pd

SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.5)
HALVES = partial(ReduceLROnPlateau, factor=0.5, patience=1, threshold=0.1)  # most epochs improve less than by a tenth


def square(output: Tensor, targets: Tensor) -> Tensor:
    return output.square().mean()


def trained(
    counts: tuple[int, ...], folder: Path | None = None, resume: bool = False, scheduler: Any = HALVES, **options: Any
) -> tuple[list[float], list[dict[str, float]], tuple[float, ...], dict[str, Tensor]]:
    """Returns the rate of each minibatch, the evaluations, the stages' rates at the end, and the weights."""
    animal, rates, evaluations = zoo.make("mlp"), [], []
    options = {"optimizer": SGD, "metrics": {"square": square}, "scheduler": scheduler, "schedule": "1f1b"} | options
    with make_pipeline(animal, counts, **options) as pipeline:
        if resume:
            pipeline.load(folder)
        for done in pipeline.train(animal.batches, epochs=8 - pipeline.position[0]):
            rates.append(done.rate)
            if done.ends_epoch:
                pipeline.evaluate(animal.batches, name="again")  # which nothing follows
                evaluations.append(pipeline.evaluate(animal.batches))
                if folder is not None and done.epoch == 3 and not resume:
                    pipeline.save(folder)
        return rates, evaluations, pipeline.learning_rates(), pipeline.state_dict()


@pytest.mark.parametrize(("counts", "monitor"), [long((1, 1), "loss"), slow((2, 1), "square")])
def test_rates_are_those_of_torch(counts: tuple[int, ...], monitor: str) -> None:
    scheduler = partial(HALVES, mode="max") if monitor == "square" else HALVES
    rates, evaluations, at_stages, _ = trained(counts, monitor=monitor, scheduler=scheduler)
    optimizer, expected = SGD([torch.nn.Parameter(torch.zeros(1))]), []
    plateau = scheduler(optimizer)
    for means in evaluations:
        expected += [optimizer.param_groups[0]["lr"]] * len(zoo.make("mlp").batches)
        plateau.step(means[monitor])
    assert rates == expected
    assert len(set(rates)) > 2
    assert len(set(at_stages)) == 1


@pytest.mark.parametrize("counts", [(1, 1), slow((1, 1, 1))])
def test_a_resumed_run_has_the_same_rates(counts: tuple[int, ...], tmp_path: Path) -> None:
    rates, *_, weights = trained((1, 1), tmp_path)
    later, *_, resumed = trained(counts, tmp_path, resume=True)
    assert later == rates[-len(later) :]
    if counts == (1, 1):  # another plan has other microbatches
        assert all(torch.equal(resumed[name], weights[name]) for name in weights)


def test_what_would_never_step_is_refused(tmp_path: Path) -> None:
    animal = zoo.make("mlp")

    def run(how: dict[str, Any], **rest: Any) -> None:
        recipe = pd.Recipe(animal.model, animal.loss, SGD, animal.batches, name="zoo", **rest)
        pd.run(lambda: recipe, plan=zoo.plan_of(animal, 2), out=tmp_path, quiet=True, checkpoint_every=0, **how)

    with pytest.raises(pd.PipelineError, match="ReduceLROnPlateau needs evaluations, but the recipe has no test"):
        run({}, scheduler=HALVES)
    with pytest.raises(pd.PipelineError, match="early stopping needs evaluations, but evaluate_every=0 leaves only"):
        run({"evaluate_every": 0}, callbacks=[pd.callbacks.EarlyStopping()], test=animal.batches)
    with pytest.raises(pd.PipelineError, match="monitor is 'accuracy', but an evaluation has loss"):
        run({}, scheduler=HALVES, monitor="accuracy")


@pytest.mark.slow
def test_a_recipe_is_profiled_with_it(tmp_path: Path) -> None:
    animal = zoo.make("mlp")
    recipe = pd.Recipe(animal.model, animal.loss, SGD, animal.batches, animal.batches, scheduler=HALVES, name="zoo")
    summary = pd.run(lambda: recipe, workers=2, out=tmp_path, quiet=True, checkpoint_every=0)
    assert summary["minibatches"] == len(animal.batches)
