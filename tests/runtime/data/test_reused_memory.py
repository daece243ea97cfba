"""Loaders that write later batches into the memory of earlier ones, which are still in flight."""

from collections.abc import Callable, Iterator
from multiprocessing import shared_memory
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import training
from first_minibatches import SGD, plan_of
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

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


def by_memoryview() -> tuple[Arrays, Any]:
    memory = memoryview(bytearray(SIZE * 40))
    arrays = np.frombuffer(memory[: SIZE * 32]).reshape(SIZE, 4), np.frombuffer(memory[SIZE * 32 :], np.int64)
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


def collate_into_one_array() -> DataLoader[Any]:
    arrays, tensors = by_numpy()

    def collate(samples: list[Any]) -> Any:
        for i, (x, y) in enumerate(samples):
            arrays[0][i], arrays[1][i] = x, y
        return tensors

    return DataLoader(list(zip(X, Y, strict=True)), SIZE, collate_fn=collate)


def refill(batch: dict[str, Any]) -> Callable[..., Any]:
    return lambda tensors: batch.update(x=tensors[0], y=tensors[1]) or batch


def one_array_of_inputs() -> Callable[[Any], torch.Tensor]:
    array = np.empty((SIZE, 4))

    def fill(batch: Any) -> torch.Tensor:
        array[:] = batch[0]
        return torch.from_numpy(array)

    return fill


def of(index: Any) -> dict[str, Any]:
    """Returns options that take inputs and targets from a batch."""
    return {"inputs": lambda batch: batch[index[0]], "targets": lambda batch: batch[index[1]]}


LOADERS: dict[str, Callable[[], tuple[Any, dict[str, Any]]]] = {
    **{
        f"{sets} {make.__name__}": lambda make=make, sets=sets: (Loader(make, sets), {})
        for make, sets in (
            (by_torch, 1),
            (by_numpy, 1),
            (by_numpy, 2),
            (by_memoryview, 3),
            (torch.inference_mode()(by_torch), 2),
        )
    },
    "refilled dict": lambda: (Loader(by_torch, 1, refill({})), of("xy")),
    "own class": lambda: (
        Loader(by_numpy, 1, lambda tensors: SimpleNamespace(arrays=tuple(tensor.numpy() for tensor in tensors))),
        {
            "inputs": lambda batch: torch.from_numpy(batch.arrays[0]),
            "targets": lambda batch: torch.from_numpy(batch.arrays[1]),
        },
    ),
    "collate": lambda: (collate_into_one_array(), {}),
    "iterable data set": lambda: (DataLoader(Loader(by_numpy, 2), batch_size=None), {}),
    "inputs": lambda: (BATCHES, of((0, 1)) | {"inputs": one_array_of_inputs()}),
}


def model_of() -> nn.Module:
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3)).double()


def train(loader: Any, schedule: str, parts: int, replicas: tuple[int, ...], **options: Any) -> list[torch.Tensor]:
    model = model_of()
    plan = plan_of(model, X[:SIZE], (2, 4)[: len(replicas) - 1], replicas)
    trained = training.train(model, plan, loader, schedule=schedule, microbatches=parts, **options)
    return list(trained.state.values())


@pytest.mark.parametrize(
    ("schedule", "parts", "replicas"),
    [("pipedream", 1, (1, 1, 1)), ("1f1b", 2, (2, 1)), ("pipedream_2bw", 4, (1, 1, 1))],
)
def test_batches_in_reused_memory_train_as_others(schedule: str, parts: int, replicas: tuple[int, ...]) -> None:
    expected = train(BATCHES, schedule, parts, replicas)
    for name, make in LOADERS.items():
        loader, options = make()
        trained = train(loader, schedule, parts, replicas, **options)
        assert all(map(torch.equal, trained, expected)), name


def test_a_shared_array_is_evaluated_and_predicted_as_others() -> None:
    memory = shared_memory.SharedMemory(create=True, size=SIZE * 40)
    try:
        arrays = np.ndarray((SIZE, 4), np.float64, memory.buf), np.ndarray(SIZE, np.int64, memory.buf, SIZE * 32)
        loader = Loader(lambda: (arrays, tuple(map(torch.from_numpy, arrays))), 1)
        model = model_of()
        expected = model(X).detach()
        plan = plan_of(model, X[:SIZE], (2,))
        with pd.Pipeline(model, plan, loss=F.cross_entropy, optimizer=SGD) as pipeline:
            assert pipeline.evaluate(loader)["loss"] == pytest.approx(float(F.cross_entropy(expected, Y)))
            assert torch.allclose(torch.cat(list(pipeline.predict(loader))), expected)
    finally:
        memory.unlink()
