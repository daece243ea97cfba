"""Runs in which something goes wrong, and predictions; importable by the processes that run them."""

import os
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
import zoo
from built import Built
from cases import make_pipeline
from torch import Tensor, nn

import pipedream as pd


class _Raises(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 1.0

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        raise ZeroDivisionError("a gradient that fails")


class Fails(nn.Module):
    """Raises at its sixth training forward or in its backward, or gives nan there."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.calls = kind, 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += torch.is_grad_enabled()
        if self.calls != 6:
            return x * 1.0
        if self.kind == "forward":
            raise ZeroDivisionError("a layer that fails")
        return _Raises.apply(x) if self.kind == "backward" else x * float("nan")


def train(kind: str, stages: int, schedule: str = "pipedream", **rest: Any) -> list[float]:
    animal, plan, losses = zoo.make("mlp"), zoo.plan_of(zoo.make("mlp"), stages), []
    if kind != "loop":
        animal.model[3] = Fails(kind)
    with make_pipeline(animal, plan, schedule=schedule, **rest) as pipeline:
        for done in pipeline.train(animal.batches, epochs=4):
            losses.append(done.loss)
            if kind == "loop" and done.number == 5 and pipeline.rank == 0:
                raise ZeroDivisionError("a loop that fails")
    return losses


def predict(stages: int, count: int) -> list[Tensor]:
    animal = zoo.make("cnn")
    x = torch.cat([batch for batch, _ in animal.batches])
    batches = [x[i : i + 1 + i % 4] for i in range(count)]
    with make_pipeline(animal, (1,) * stages) as pipeline:
        return list(pipeline.predict([batch.clone() for batch in batches]))


UNLIKE: dict[str, dict[str, Any]] = {
    "optimizer": {"optimizer": partial(torch.optim.SGD, lr=0.2)},
    "scheduler": {"scheduler": partial(torch.optim.lr_scheduler.StepLR, step_size=3)},
    "loss": {"loss": nn.CrossEntropyLoss(label_smoothing=0.1)},
    "seed": {"seed": 3},
    "ema": {"ema": 0.9},
    "clip_grad_norm": {"clip_grad_norm": 1.0, "clip": "local"},
    **{"epochs": {}, "the model": {}},
}
"""Options of the last rank alone, by what the error names."""


def _gather(output: Tensor, *_: Any) -> Tensor:
    dist.all_gather([torch.empty_like(output) for _ in range(dist.get_world_size())], output.detach().contiguous())
    return output.sum()


class Gathers(torch.optim.SGD):
    """Steps with what all ranks have, as Muon does for data parallelism."""

    def step(self, closure: Any = None) -> None:
        _gather(self.param_groups[0]["params"][0])


TOGETHER: Any = {"the loss": {"loss": _gather}, "the step": {"optimizer": partial(Gathers, lr=0.1)}, "forward": {}}
"""Options of all ranks, by what calls a collective."""


def train_refused(folder: str) -> dict[str, str]:
    """Builds and trains pipelines whose last rank has another setting or folder, or that gather; returns the errors."""
    is_last = dist.get_rank() == dist.get_world_size() - 1
    errors = {}
    for name, other in (UNLIKE | {"folder": {}} | TOGETHER).items():
        animal, plan = zoo.make("mlp"), zoo.plan_of(zoo.make("mlp"), dist.get_world_size())
        if is_last and name == "the model":
            next(animal.model.parameters()).requires_grad_(False)
        try:
            if name == "forward":
                pd.profile(nn.Sequential(animal.model, Built(lambda self, x: x + _gather(x))), animal.batches[0][0])
            with make_pipeline(animal, plan, **other if is_last or name in TOGETHER else {}) as pipeline:
                list(pipeline.train(animal.batches, epochs=2 if is_last and name == "epochs" else 1))
                pipeline.save(f"{folder}/{is_last if name == 'folder' else name}")
        except pd.PipelineError as error:
            errors[name] = str(error)
    return errors


def call_alone(rank: int, name: str, folder: str) -> None:
    """Makes a call on one rank only, in the middle of the training; errors are in the folder, too."""
    os.environ["TORCHELASTIC_ERROR_FILE"] = f"{folder}/{dist.get_rank()}.json"
    with make_pipeline("mlp", (1,) * dist.get_world_size()) as pipeline:
        for done in pipeline.train(zoo.make("mlp").batches, epochs=10):
            if done.number == 4 and dist.get_rank() == rank:
                pipeline.save(folder) if name == "save" else pipeline.state_dict()


class Scored(NamedTuple):
    """An output of a type of its own, which other layers take, too."""

    scores: Any
    length: int = 0
    loss: Any = None


class Scoring(nn.Module):
    def forward(self, value: Any) -> Scored:
        return Scored(value.scores * 2, value.length + 1) if isinstance(value, Scored) else Scored(value)


def predict_typed() -> tuple[list[Scored], list[Tensor]]:
    """Returns what three stages predict, and the scores that the model itself gives."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 3), Scoring(), Scoring(), Scoring())
    batches = [(torch.randn(size, 2), torch.zeros(size)) for size in (3, 1)]
    expected = [model(x).scores.detach() for x, _ in batches]
    animal = zoo.Animal(model, batches, F.mse_loss, lambda output, targets: (output, 1.0), {3: (2, 3)})
    with make_pipeline(animal, (1, 1, 1)) as pipeline:
        return list(pipeline.predict(batches)), expected
