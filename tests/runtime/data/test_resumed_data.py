"""A run that was left within an epoch continues with the samples that it lacks, whatever the size of its batches."""

import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import processes
import pytest
import torch
import zoo
from built import Built
from marks import slow, thinned
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, Sampler, TensorDataset
from training import plan_of

import pipedream as pd

SAMPLES = 48


def notice(self: Any, x: Tensor) -> Tensor:
    """Notices the number of each sample, which is its first feature."""
    if torch.is_grad_enabled():
        self.samples += x[:, 0].int().tolist()
    return self.inner(x)


def data(count: int = SAMPLES) -> Tensor:
    return torch.stack([torch.arange(float(count)), torch.ones(count)], 1)


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return zip(data(), data(), strict=True)


class Batches:
    """An iterable."""

    def __init__(self, size: int) -> None:
        self.batch_size = size

    def __iter__(self) -> Iterator[Any]:
        return ((part, part) for part in data().split(self.batch_size))


class Counting(Batches):
    """Knows how many batches it has yielded, and continues there."""

    count = 0

    def __iter__(self) -> Iterator[Any]:
        for batch in list(super().__iter__())[self.count :]:
            self.count += 1
            yield batch
        self.count = 0

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["count"]


class Shuffled(Sampler[list[int]]):
    """A user's batch sampler; with `buckets` its batches are of neighbours."""

    def __init__(self, size: int, buckets: bool = False) -> None:
        self.size, self.buckets = size, buckets

    def __iter__(self) -> Iterator[list[int]]:
        order = torch.arange(SAMPLES) if self.buckets else torch.randperm(SAMPLES)
        return (part.tolist() for part in order.split(self.size)[:: -1 if self.buckets else 1])


def map_style(size: int, count: int = SAMPLES, **options: Any) -> DataLoader[Any]:
    return DataLoader(TensorDataset(data(count), data(count)), size, **options)


LOADERS: dict[str, Callable[[int], Any]] = {
    "shuffling": lambda size: map_style(size, shuffle=True),
    "in order": map_style,
    "distributed": lambda size: map_style(size, sampler=DistributedSampler(range(SAMPLES), 1, 0)),
    "batch sampler": lambda size: DataLoader(TensorDataset(data(), data()), batch_sampler=Shuffled(size)),
    "stream": lambda size: DataLoader(Stream(), size),
    "list": lambda size: list(Batches(size)),
    "iterable": Batches,
    "dicts": lambda size: [{"x": x.numpy()} for x, _ in Batches(size)],
    "state": Counting,
    "own batches": lambda size: DataLoader(list(Batches(size)), batch_size=None),
}


def read(batch: Any) -> Tensor:
    return torch.from_numpy(batch["x"]) if isinstance(batch, dict) else batch[0]


def pipeline(stages: int = 1, schedule: str = "1f1b", microbatches: int = 1) -> tuple[pd.Pipeline, Any]:
    torch.manual_seed(3)
    model = nn.Sequential(Built(notice, inner=nn.Linear(2, 2), samples=[]), nn.Linear(2, 2), nn.Linear(2, 2))
    how: dict[str, Any] = {"loss": lambda y, batch: y.square().mean(), "inputs": read, "targets": read, "check": False}
    how |= {"optimizer": partial(torch.optim.SGD, lr=1e-4), "schedule": schedule, "microbatches": microbatches}
    return pd.Pipeline(model, plan_of(model, data(8), tuple(range(1, stages))), **how), model[0]


def train(loader: Any, folder: Path, until: int | None, *how: Any) -> list[int]:
    """Trains up to a minibatch, and saves, or from there to the end of the second epoch; returns the samples."""
    trained, layer = pipeline(*how)
    torch.manual_seed(3 if until else 4)
    with trained, warnings.catch_warnings():
        warnings.filterwarnings("ignore", "the loader's batch has")
        if until is None:
            trained.load(folder)
        layer.samples.clear()
        for done in trained.train(loader, until_epoch=2):
            if done.number + 1 == until:
                trained.save(folder)
                break
    return list(layer.samples)


@pytest.mark.parametrize(("until", "size"), [(4, 16), *(slow(*pair) for pair in ((4, 4), (3, 12), (6, 5)))])
@pytest.mark.parametrize("name", thinned(LOADERS))
def test_each_sample_comes_once(name: str, until: int, size: int, tmp_path: Path) -> None:
    """In the order that a run of whole epochs has; the last, smaller batch is no other one."""
    if name == "own batches" and until < 6:
        pytest.skip("an index is a batch of unknown size")
    whole = train(LOADERS[name](8), tmp_path / "whole", 12)
    first = train(LOADERS[name](8), tmp_path, until)
    assert [*first, *train(LOADERS[name](size), tmp_path, None)] == whole
    assert sorted(whole[:SAMPLES]) == list(range(SAMPLES))


@pytest.mark.parametrize("name", thinned(LOADERS))
def test_batches_that_do_not_add_up_are_refused(name: str, tmp_path: Path) -> None:
    train(LOADERS[name](8), tmp_path, 5)
    number = r"5 samples of it .* end after 3" if name == "own batches" else r"40 samples of it .* end after 48"
    with pytest.raises(pd.PipelineError, match=f"{number}\\n.*checkpoint at an epoch's end"):
        train(LOADERS[name](16), tmp_path, None)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (map_style(8), map_style(8, shuffle=True)),
        (map_style(8, shuffle=True), map_style(8)),
        (map_style(8, shuffle=True), map_style(8, 56, shuffle=True)),
        (map_style(8, shuffle=True, generator=torch.Generator().manual_seed(1)), map_style(4, shuffle=True)),
        tuple(DataLoader(TensorDataset(data(), data()), batch_sampler=Shuffled(size, True)) for size in (8, 4)),
        (LOADERS["own batches"](8), LOADERS["own batches"](4)),
    ],
)
def test_other_samples_are_warned_of(before: Any, after: Any, tmp_path: Path) -> None:
    train(before, tmp_path, 4)
    with pytest.warns(UserWarning, match="epoch 0 now begins with other samples than were trained"):
        train(after, tmp_path, None)


def test_more_samples_in_order_are_trained_after_those_done(tmp_path: Path) -> None:
    train(map_style(8), tmp_path, 4)
    assert train(map_style(4, 60), tmp_path, None)[:28] == list(range(32, 60))
    train(map_style(8), tmp_path / "dropped", 5)
    assert train(map_style(10, drop_last=True), tmp_path / "dropped", None) == list(range(40)), "the epoch is over"


def test_a_loop_that_is_left_goes_on_with_other_batches() -> None:
    trained, layer = pipeline()
    with trained, warnings.catch_warnings():
        warnings.filterwarnings("ignore", "the loader's batch has")
        next(iter(trained.train(map_style(8))))
        rest = layer.samples[-8:]
        list(trained.train(map_style(4)))
        assert layer.samples[-40:] == list(range(8, 48))
        assert rest == list(range(8))


def leg(folder: Path, schedule: str, resume: Path | None) -> dict[int, float]:
    """Trains three epochs of six minibatches, saves in the second one, and returns the losses by number."""
    torch.manual_seed(3)
    samples = data().double()
    model = nn.Sequential(*(nn.Linear(2, 2, dtype=torch.float64) for _ in range(8)))
    shape = "any" if pd.schedules.METHODS[schedule.partition("[")[0]].stage_order else "straight"  # both on two workers
    plan = pd.plan(zoo.alike_layers(8), pd.Cluster.flat(2), schedule=schedule, shape=shape)
    options: dict[str, Any] = {"loss": lambda y, x: (y * x).mean(), "inputs": lambda x: x[0], "targets": lambda x: x[0]}
    losses = {}
    torch.manual_seed(3 if resume is None else 4)
    with pd.Pipeline(model, plan, check=False, optimizer=partial(torch.optim.SGD, lr=1e-6), **options) as trained:
        if resume is not None:
            trained.load(resume)
        for done in trained.train(DataLoader(TensorDataset(samples, samples), 8, shuffle=True), until_epoch=3):
            losses[done.number] = done.loss
            if done.number == 8 and resume is None:
                trained.save(folder)
    return losses


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize("schedule", ["1f1b", "pipedream", "chimera", "roundpipe[delay=1]"])
def test_processes_go_on_with_the_order_of_the_data(schedule: str, tmp_path: Path) -> None:
    """Also where the first stage is not on rank 0, as in RoundPipe, or on both, as in Chimera."""
    whole = processes.team(2).results(leg, tmp_path, schedule, None)[0]
    rest = processes.team(2).results(leg, tmp_path / "rest", schedule, tmp_path)[0]
    assert max(rest) == 17
    assert rest == {number: loss for number, loss in whole.items() if number in rest}
