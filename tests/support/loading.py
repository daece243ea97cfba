"""Runs of a pipeline over data that notes which process loaded what; in one process, or as one rank of several."""

import json
import multiprocessing
import random
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist
import zoo
from cases import make_pipeline
from loaders import seed_all
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset

import pipedream as pd
from pipedream.runtime.data import source

SIZE, BATCH = 50, 12
SEED = 10


@dataclass(frozen=True)
class Job:
    """A run.

    Attributes:
        kind: kind of loader, see `loader_of`.
        replicas: replicas of each stage.
        drain_at, leave_at: minibatches after which the loop evaluates, and is left and begun again; negative for never.
        fails_at: index whose loading fails; negative for never.
        machines: those of the ranks; by default one.
    """

    kind: str
    replicas: tuple[int, ...]
    schedule: str = "pipedream"
    microbatches: int | None = None
    epochs: int = 3
    drain_at: int = -1
    leave_at: int = -1
    fails_at: int = -1
    machines: str = ""

    def __str__(self) -> str:
        words = [
            self.kind,
            self.schedule,
            "-".join(map(str, self.replicas)),
            *(str(n) for n in [self.microbatches] if n),
            self.machines,
        ]
        return " ".join(words)


@dataclass
class Ran:
    """Results of a run: losses, weights, drains, and the position in the data."""

    dones: list[pd.Done]
    state: dict[str, Tensor]
    drains: list[int]
    position: tuple[int, int]
    data_state: dict[str, Any]
    still: bool


class Notes(Dataset[tuple[Tensor, Tensor]]):
    """Samples; each index that is loaded is written to a file of the rank."""

    def __init__(self, folder: str, fails_at: int = -1) -> None:
        x, y = (torch.cat(part) for part in zip(*zoo.make("mlp").batches, strict=True))
        self.x, self.y, self.fails_at = x, y, fails_at
        self.file = Path(folder) / str(dist.get_rank() if dist.is_initialized() else 0)

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if index == self.fails_at:
            raise ZeroDivisionError("a sample that fails")
        with self.file.open("a") as file:
            file.write(f"{index}\n")
        return self.x[index], self.y[index]


class Drawn(IterableDataset[tuple[Tensor, Tensor]]):
    """The samples in an order that is drawn on the way."""

    def __init__(self, notes: Notes) -> None:
        self.notes = notes

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        rest = list(range(SIZE))
        while rest:
            yield self.notes[rest.pop(random.randrange(len(rest)))]


class Stateful:
    """A loader with a state of its own, after torchdata's StatefulDataLoader."""

    def __init__(self, notes: Notes) -> None:
        self.notes = notes
        self.order: list[int] = []
        self.at = 0
        self.restored = False

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        if not self.restored:
            self.order, self.at = np.random.permutation(SIZE).tolist(), 0
        self.restored = False
        while self.at < SIZE:
            indices = self.order[self.at : self.at + BATCH]
            self.at += BATCH
            x, y = zip(*(self.notes[i] for i in indices), strict=True)
            yield torch.stack(x), torch.stack(y)

    def state_dict(self) -> dict[str, Any]:
        return {"order": torch.tensor(self.order), "at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.order, self.at, self.restored = state["order"].tolist(), state["at"], True


def loader_of(kind: str, notes: Notes) -> Any:
    """Returns a loader: 'map', 'ahead' (two processes load), 'own' generator, 'iterable', 'stateful'."""
    if kind == "iterable":
        return DataLoader(Drawn(notes), batch_size=BATCH)
    if kind == "stateful":
        return Stateful(notes)
    workers = {"num_workers": 2, "persistent_workers": kind == "persistent"} if kind in ("ahead", "persistent") else {}
    generator = torch.Generator().manual_seed(random.randrange(1000)) if kind == "own" else None
    return DataLoader(notes, batch_size=BATCH, shuffle=True, generator=generator, **workers)


def pipeline_of(job: Job) -> pd.Pipeline:
    """Returns a job's pipeline."""
    options = {"schedule": job.schedule, "microbatches": job.microbatches, "seed": 3, "check": False}
    return make_pipeline("mlp", job.replicas, optimizer=partial(torch.optim.SGD, lr=0.05, momentum=0.9), **options)


def run(job: Job, folder: str) -> Ran:
    """Does a job; each rank has its own seed, and the loop draws numbers of its own."""
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]  # it may have children
    rank = dist.get_rank() if dist.is_initialized() else 0
    with patch.object(source, "read_machine", lambda: job.machines[rank : rank + 1]), pipeline_of(job) as pipeline:
        others = loader_of(job.kind, Notes(str(Path(folder) / "evaluated")))
        seed_all(SEED + rank)
        loader = loader_of(job.kind, Notes(folder, job.fails_at))
        before = torch.get_rng_state(), random.getstate()
        dones = []
        still = True
        for done in pipeline.train(loader, epochs=job.epochs):
            dones.append(done)
            if done.number == job.drain_at:
                pipeline.evaluate(others)
            if done.number == job.leave_at:
                still = torch.equal(torch.get_rng_state(), before[0]) and random.getstate() == before[1]
                torch.rand(1 + rank), random.random(), np.random.rand()
                break
        data_state: dict[str, Any] = {}
        if job.leave_at >= 0:
            pipeline.drain()
            data_state = json.loads(json.dumps(pipeline._session.streams.data_state(*pipeline.position)))
            dones += list(pipeline.train(loader, epochs=job.epochs - pipeline.position[0]))
        return Ran(dones, pipeline.state_dict(), pipeline.drains, pipeline.position, data_state, still)


def run_all(jobs: list[Job], folder: str) -> list[Ran]:
    """Does one job after the other, each in a folder of its own."""
    return [run(job, str(Path(folder) / str(i))) for i, job in enumerate(jobs)]


def resume(job: Job, folder: str, position: tuple[int, int], state: dict[str, Any]) -> int:
    """Goes on from the state of another run, in this plan; returns the minibatches that were left."""
    seed_all(77)
    with pipeline_of(job) as pipeline:
        session = pipeline._session
        loader = loader_of(job.kind, Notes(folder))
        session.streams.open_feed(
            loader, pipeline._adapt_batch, first_epoch=position[0], epochs=job.epochs, skip=position[1], state=state
        )
        return len(list(session.streams.train()))


def resume_all(jobs: list[tuple[Job, str, tuple[int, int], dict[str, Any]]]) -> list[int]:
    """Goes on with one after the other."""
    return [resume(*job) for job in jobs]
