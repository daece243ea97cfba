"""Loaders that write later batches into the memory of earlier ones, which are still in flight."""

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import training
from marks import thinned
from torch import nn
from torch.utils.data import DataLoader, IterableDataset
from training import SGD, plan_of

import pipedream as pd

SAMPLES, SIZE = 24, 4
X, Y = torch.randn(SAMPLES, 4, dtype=torch.float64), torch.randint(0, 3, (SAMPLES,))
BATCHES = list(zip(X.split(SIZE), Y.split(SIZE), strict=True))

Arrays = tuple[Any, Any]


def by_torch() -> tuple[Arrays, Any]:
    batch = torch.empty(SIZE, 4, dtype=torch.float64), torch.empty(SIZE, dtype=torch.long)
    return batch, batch


def by_numpy() -> tuple[Arrays, Any]:
    arrays = np.empty((SIZE, 4)), np.empty(SIZE, np.int64)
    return arrays, tuple(map(torch.from_numpy, arrays))


class Loader(IterableDataset[Any]):
    """Fills sets of buffers in turn."""

    def __init__(self, make: Callable[[], tuple[Arrays, Any]], sets: int, wrap: Callable[..., Any] = tuple) -> None:
        self.buffers = [make() for _ in range(sets)]
        self.wrap = wrap

    def __iter__(self) -> Iterator[Any]:
        for number, batch in enumerate(BATCHES):
            arrays, tensors = self.buffers[number % len(self.buffers)]
            with torch.inference_mode():
                for array, tensor in zip(arrays, batch, strict=True):
                    array[:] = tensor
            yield self.wrap(tensors)


def refill(batch: dict[str, Any]) -> Callable[..., Any]:
    return lambda tensors: batch.update(x=tensors[0], y=tensors[1]) or batch


def in_an_object(tensors: Any) -> SimpleNamespace:
    return SimpleNamespace(arrays=[tensor.numpy() for tensor in tensors])


def one_array_of_inputs() -> Callable[[Any], torch.Tensor]:
    array = np.empty((SIZE, 4))

    def fill(batch: Any) -> torch.Tensor:
        array[:] = batch[0]
        return torch.from_numpy(array)

    return fill


def take(read: Callable[[Any, int], Any]) -> dict[str, Any]:
    """Returns options that take inputs and targets from a batch."""
    return {"inputs": lambda batch: read(batch, 0), "targets": lambda batch: read(batch, 1)}


LOADERS: dict[str, Callable[[], tuple[Any, dict[str, Any]]]] = {
    "one set by torch": lambda: (Loader(by_torch, 1), {}),
    "two sets by NumPy": lambda: (Loader(by_numpy, 2), {}),
    "in inference mode": lambda: (Loader(torch.inference_mode()(by_torch), 2), {}),
    "refilled dict": lambda: (Loader(by_torch, 1, refill({})), take(lambda batch, i: batch["xy"[i]])),
    "own class": lambda: (Loader(by_numpy, 1, in_an_object), take(lambda batch, i: torch.from_numpy(batch.arrays[i]))),
    "iterable data set": lambda: (DataLoader(Loader(by_numpy, 2), batch_size=None), {}),
    "inputs": lambda: (BATCHES, take(lambda batch, i: batch[i]) | {"inputs": one_array_of_inputs()}),
}


def model_of() -> nn.Module:
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3)).double()


def train(loader: Any, schedule: str, parts: int, replicas: tuple[int, ...], **options: Any) -> list[torch.Tensor]:
    plan = plan_of(model_of(), X[:SIZE], (2, 4)[: len(replicas) - 1], replicas)
    trained = training.train(model_of(), plan, loader, schedule=schedule, microbatches=parts, **options)
    return list(trained.state.values())


@pytest.mark.parametrize(
    ("schedule", "parts", "replicas"),
    thinned([("pipedream", 1, (1, 1, 1)), ("1f1b", 2, (2, 1)), ("pipedream_2bw", 4, (1, 1, 1))], 3),
)
def test_batches_in_reused_memory_train_as_others(schedule: str, parts: int, replicas: tuple[int, ...]) -> None:
    expected = train(BATCHES, schedule, parts, replicas)
    for name, make in LOADERS.items():
        loader, options = make()
        assert all(map(torch.equal, train(loader, schedule, parts, replicas, **options), expected)), name


def test_they_are_evaluated_and_predicted_as_others() -> None:
    model, loader = model_of(), Loader(by_numpy, 1)
    expected = model(X).detach()
    with pd.Pipeline(model, plan_of(model, X[:SIZE], (2,)), loss=F.cross_entropy, optimizer=SGD) as pipeline:
        assert pipeline.evaluate(loader)["loss"] == pytest.approx(float(F.cross_entropy(expected, Y)))
        assert torch.allclose(torch.cat(list(pipeline.predict(loader))), expected)
