"""The data of real runs: each sample loaded once, by whoever trains on it, in the order of a plain loop."""

import multiprocessing
import random
from collections import Counter
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import processes
import pytest
import torch
import torch.distributed as dist
import zoo
from cases import make_pipeline
from loaders import Stateful, Stream, seed_all
from marks import long, slow
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, RandomSampler, default_collate

import pipedream as pd
from pipedream.runtime.data import source

SIZE, BATCH, SEED = 50, 12, 10


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
    drain_at: int = -1
    leave_at: int = -1
    fails_at: int = -1
    machines: str = ""


@dataclass
class Ran:
    dones: list[pd.Done]
    state: dict[str, Tensor]
    drains: list[int]
    position: tuple[int, int]
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


def loader_of(kind: str, notes: Notes) -> Any:
    """Returns a loader: 'map', 'ahead' (two processes load), 'own' generator, 'iterable', 'stateful'."""
    if kind == "iterable":
        return DataLoader(Stream(SIZE, notes.__getitem__), batch_size=BATCH)
    if kind == "stateful":
        return Stateful(SIZE, BATCH, lambda indices: default_collate([notes[i] for i in indices.tolist()]))
    workers = {"num_workers": 2, "persistent_workers": kind == "persistent"} if kind in ("ahead", "persistent") else {}
    generator = torch.Generator().manual_seed(random.randrange(1000)) if kind == "own" else None
    return DataLoader(notes, batch_size=BATCH, shuffle=True, generator=generator, **workers)


def pipeline_of(job: Job) -> pd.Pipeline:
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
        for done in pipeline.train(loader, epochs=3):
            dones.append(done)
            if done.number == job.drain_at:
                pipeline.evaluate(others)
            if done.number == job.leave_at:
                still = torch.equal(torch.get_rng_state(), before[0]) and random.getstate() == before[1]
                torch.rand(1 + rank), random.random(), np.random.rand()
                break
        if job.leave_at >= 0:
            pipeline.drain()
            dones += list(pipeline.train(loader, epochs=3 - pipeline.position[0]))
        return Ran(dones, pipeline.state_dict(), pipeline.drains, pipeline.position, still)


def run_all(jobs: list[Job], folder: str) -> list[Ran]:
    return [run(job, str(Path(folder) / str(i))) for i, job in enumerate(jobs)]


KINDS = ("map", "ahead", "persistent", "own", "iterable", "stateful")
SHARDED = ("map", "ahead", "persistent", "own")
JOBS = {
    3: [
        Job("map", (2, 1), drain_at=3),
        *(Job(kind, (2, 1), leave_at=6) for kind in KINDS),
        *(Job(kind, (2, 1), "gpipe", 4, leave_at=6) for kind in ("map", "iterable")),
        *(Job(kind, (2, 1), "1f1b", 4, drain_at=3) for kind in ("ahead", "stateful")),
        Job("map", (2, 1), "pipedream_2bw", 3, leave_at=6),
        *(Job(kind, (3,), drain_at=8) for kind in ("map", "iterable")),
        *(Job(kind, (2, 1), "gpipe", 4, drain_at=3, leave_at=6, machines="abb") for kind in KINDS),
        Job("map", (2, 1), "pipedream_2bw", 3, leave_at=6, machines="abb"),
        Job("map", (3,), "gpipe", 4, leave_at=6, machines="abb"),
    ],
    4: [
        *(Job(kind, (3, 1), leave_at=6) for kind in ("map", "iterable")),
        Job("own", (2, 2), drain_at=3, leave_at=9),
        Job("map", (2, 1, 1), "pipedream_vertical_sync", leave_at=6),
    ],
}


def written(folder: Path) -> dict[int, list[int]]:
    """Returns rank -> what it loaded."""
    files = [file for file in folder.iterdir() if file.is_file()] if folder.is_dir() else []
    return {int(file.name): [int(line) for line in file.read_text().split()] for file in files}


def folders(root: Path, count: int) -> Path:
    for number in range(count):
        (root / str(number) / "evaluated").mkdir(parents=True)
    return root


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("replicas", [(2, 1), long((1, 1)), slow((3,))])
@pytest.mark.parametrize(
    "rest", [{"leave_at": 6}, slow({"drain_at": 3}), slow({"schedule": "1f1b", "microbatches": 4, "leave_at": 4})]
)
def test_one_process_loads_as_a_loop(
    kind: str, replicas: tuple[int, ...], rest: dict[str, Any], tmp_path: Path
) -> None:
    ran = run_all([Job(kind, replicas, **rest)], str(folders(tmp_path, 1)))[0]
    plain = tmp_path / "plain"
    plain.mkdir()
    seed_all(SEED)
    loader = loader_of("map" if kind in ("ahead", "persistent") else kind, Notes(str(plain)))
    for _ in range(3):
        list(loader)
    expected = written(plain)[0]
    assert ran.still, "the generators of the process have not moved"
    assert ran.position == (3, 0)
    loaded = written(tmp_path / "0")[0]
    if kind in ("ahead", "persistent"):
        assert set(loaded) == set(expected)  # processes that load ahead do so in vain before a break
    elif kind in SHARDED or "leave_at" not in rest:
        assert loaded == expected
    else:
        # An iterable that was left has been read one minibatch ahead, and is iterated again from the epoch's start
        # where it has no state of its own.
        assert len(loaded) - len(expected) <= (BATCH if kind == "stateful" else 50)
        assert Counter(loaded) >= Counter(expected)
        assert loaded[-50:] == expected[-50:]


@pytest.mark.processes
@pytest.mark.parametrize("workers", [pytest.param(w, marks=pytest.mark.long if w == 3 else ()) for w in JOBS])
@pytest.mark.slow
def test_several_processes_load_each_sample_once_and_train_as_one(workers: int, tmp_path: Path) -> None:
    jobs = JOBS[workers]
    apart, alone = (folders(tmp_path / name, len(jobs)) for name in ("apart", "alone"))
    of_ranks = processes.team(workers).results(run_all, jobs, str(apart), timeout_s=120.0)
    for number, (job, alone_run) in enumerate(zip(jobs, run_all(jobs, str(alone)), strict=True)):
        # gloo adds up three gradients in another order than one process does
        bound = 1e-12 if max(job.replicas) > 2 else 0.0
        for rank, runs in enumerate(of_ranks):
            rank_run = runs[number]
            for there, done in zip(rank_run.dones, alone_run.dones, strict=True):
                assert abs(there.loss - done.loss) <= bound, f"{job}: rank {rank}, minibatch {done.number}"
                assert replace(there, loss=done.loss) == done
            assert (rank_run.drains, rank_run.position) == (alone_run.drains, alone_run.position), str(job)
            assert rank_run.still, "the generators of the process have not moved"
        torch.testing.assert_close(of_ranks[0][number].state, alone_run.state, rtol=0, atol=bound)
        loaded, expected = written(apart / str(number)), written(alone / str(number))[0]
        readers = {0}
        if job.kind in SHARDED and job.microbatches is None:
            readers = set(range(job.replicas[0]))
        elif job.kind in SHARDED and job.machines:
            readers = {job.machines.index(machine) for machine in job.machines}
            ahead = Counter(loaded.pop(1))
            if job.kind not in ("ahead", "persistent"):
                assert ahead >= Counter(expected), f"{job}: it reads whole minibatches"
                assert ahead.total() <= len(expected) + BATCH, "one of them in vain before it is left"
            readers.remove(1)
        assert set(loaded) == readers, str(job)
        if job.kind not in ("ahead", "persistent"):  # processes that load ahead do so in vain before a break
            assert Counter(chain(*loaded.values())) == Counter(expected), str(job)
        if job.kind in SHARDED and job.kind not in ("ahead", "persistent"):
            assert set(Counter(expected).values()) == {3}
            evaluated = written(apart / str(number) / "evaluated")
            assert sum(map(len, evaluated.values())) == (50 if job.drain_at >= 0 else 0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "rest"), [("ahead", {}), ("persistent", {"leave_at": 6}), ("ahead", {"fails_at": 3})], ids=str
)
def test_processes_that_load_are_ended(kind: str, rest: dict[str, int], tmp_path: Path) -> None:
    before = set(multiprocessing.active_children())
    job = Job(kind, (2, 1), **rest)  # type: ignore[arg-type]
    caught = None
    if job.fails_at >= 0:
        with pytest.raises(pd.errors.WorkerError, match="a sample that fails") as caught:
            run(job, str(tmp_path))
    else:
        assert run(job, str(tmp_path)).position == (3, 0)
    assert set(multiprocessing.active_children()) <= before, caught


@pytest.mark.parametrize("replicas", [slow((1, 1)), (2, 1)])
def test_an_evaluation_does_not_move_the_order(replicas: tuple[int, ...], tmp_path: Path) -> None:
    """Not even where its loader draws from the same generator, in the middle of an epoch that draws as it goes."""
    loaded = []
    for looks in (False, True):
        (tmp_path / str(looks)).mkdir()
        with pipeline_of(Job("", replicas)) as pipeline:
            shared = torch.Generator().manual_seed(7)
            seed_all(SEED)
            train, test = (
                DataLoader(data, 5, sampler=RandomSampler(range(50), True, 90, shared), generator=shared)
                for data in (Notes(str(tmp_path / str(looks))), Notes(str(tmp_path)))
            )
            for done in pipeline.train(train, epochs=2):
                if done.number == 4:
                    pipeline.evaluate(test) if looks else pipeline.drain()
        loaded.append(written(tmp_path / str(looks))[0])
    assert loaded[0] == loaded[1]
    assert len(written(tmp_path)[0]) == 90


@pytest.mark.parametrize("kind", ["map", "own", "iterable"])
def test_the_first_batch_of_a_recipe_does_not_move_the_order(kind: str, tmp_path: Path) -> None:
    orders, model = [], torch.nn.Linear(1, 1)
    for looks in (False, True):
        (tmp_path / str(looks)).mkdir()
        seed_all(SEED)
        loader = loader_of(kind, Notes(str(tmp_path / str(looks))))
        if looks:
            recipe = pd.Recipe(model, None, torch.optim.SGD, loader)  # type: ignore[arg-type]
            assert len(recipe.first_batch()[0]) == BATCH
        orders.append([batch[0] for batch in loader])
    assert all(torch.equal(a, b) for a, b in zip(*orders, strict=True))
