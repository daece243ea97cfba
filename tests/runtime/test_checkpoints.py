"""Checkpoints on disk: whole or not there, read without running anything, and clear about damage."""

from __future__ import annotations

import json
import os
import pickle
import random
import resource
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import processes
import pytest
import torch
import zoo

import pipedream as pd
from pipedream.core.checkpoint import Checkpoint
from pipedream.core.errors import ArtifactError, WorkerError
from pipedream.runtime.checkpoint import writer as checkpoints
from pipedream.runtime.data.rng import restore_rng, saved_rng


def save(folder: Path, counts: tuple[int, ...] = (1, 1), numbers: int = 4, keep: int | None = None) -> list[Path]:
    """Trains and saves after each epoch; returns what there is then."""
    animal = zoo.make("mlp")
    with pipeline(animal, counts) as made:
        for done in made.train(animal.batches, epochs=numbers):
            if done.ends_epoch:
                made.save(folder, keep=keep, wait=done.epoch % 2 == 0)
    return checkpoints.complete(folder)


def pipeline(animal: zoo.Animal, counts: tuple[int, ...] = (1, 1)) -> pd.Pipeline:
    """Returns a pipeline that flushes, so that it is drained at the end of each epoch."""
    return pd.Pipeline(
        animal.model,
        zoo.plan_of(zoo.make("mlp"), len(counts), counts),
        schedule="gpipe",
        microbatches=3,
        loss=animal.loss,
        optimizer=partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    )


def names(paths: list[Path]) -> list[str]:
    """Returns the folders' names."""
    return [path.name for path in paths]


def test_the_newest_are_kept(tmp_path: Path) -> None:
    every = names(save(tmp_path / "all"))
    assert len(every) == 4
    assert names(save(tmp_path / "two", keep=2)) == every[-2:]
    assert names(save(tmp_path / "one", keep=1)) == every[-1:]
    assert sorted(os.listdir(tmp_path / "two")) == every[-2:], "nothing else is left"


def test_what_is_not_complete_is_not_taken(tmp_path: Path) -> None:
    assert checkpoints.newest(tmp_path) is None
    assert checkpoints.newest(tmp_path / "nowhere") is None
    saved = save(tmp_path, numbers=2)
    (tmp_path / "minibatch-00000099").mkdir()
    (tmp_path / ".minibatch-00000098").mkdir()
    (tmp_path / ".minibatch-00000098" / checkpoints.CONTENTS).write_text("{}")
    (tmp_path / "minibatch-of-mine").mkdir()
    (tmp_path / "minibatch-of-mine" / checkpoints.CONTENTS).write_text("{}")
    assert checkpoints.complete(tmp_path) == saved
    assert checkpoints.newest(tmp_path) == saved[-1]
    assert checkpoints.newest(saved[0]) == saved[0]


def test_what_a_killed_save_has_left_is_removed_by_the_next(tmp_path: Path) -> None:
    left = tmp_path / ".minibatch-00000001"
    left.mkdir()
    (left / "__0_0.distcp").write_bytes(b"half")
    saved = save(tmp_path, numbers=1)
    assert os.listdir(tmp_path) == names(saved)


class Evil:
    """Runs code where it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


def load(folder: Path) -> tuple[int, int]:
    """Loads the newest checkpoint into a new pipeline."""
    with pipeline(zoo.make("mlp")) as made:
        return made.load(folder)


def test_torchs_own_page_is_not_unpickled(tmp_path: Path) -> None:
    path = save(tmp_path, numbers=1)[0]
    (path / ".metadata").write_bytes(pickle.dumps(Evil(tmp_path / "ran")))
    assert load(tmp_path) == (1, 0)
    assert not (tmp_path / "ran").exists()


def test_tensors_are_not_unpickled(tmp_path: Path) -> None:
    path = save(tmp_path, numbers=1)[0]
    page = json.loads((path / checkpoints.CONTENTS).read_text())
    evil = tmp_path / "evil"
    torch.save(Evil(tmp_path / "ran"), evil)
    stored = next(iter(page["tensors"].values()))
    (path / stored["file"]).write_bytes(evil.read_bytes())
    page["files"][stored["file"]] = stored["length"] = evil.stat().st_size
    page["tensors"] = {name: stored | {"offset": 0} for name in page["tensors"]}
    (path / checkpoints.CONTENTS).write_text(json.dumps(page))
    with pytest.raises(ArtifactError, match="cannot be read: UnpicklingError"):
        load(tmp_path)
    assert not (tmp_path / "ran").exists()


def cut_short(path: Path) -> None:
    """Takes the end of a file away."""
    file = next(path.glob("*.distcp"))
    file.write_bytes(file.read_bytes()[:-1])


def lost(path: Path) -> None:
    """Removes a file."""
    next(path.glob("*.distcp")).unlink()


def scrambled(path: Path) -> None:
    """Writes over a file."""
    file = next(path.glob("*.distcp"))
    file.write_bytes(bytes(len(file.read_bytes())))


def page_with(**wrong: Any) -> Callable[[Path], None]:
    """Returns a way to change each tensor's line in the contents page."""

    def change(path: Path) -> None:
        page = json.loads((path / checkpoints.CONTENTS).read_text())
        page["tensors"] = {name: stored | wrong for name, stored in page["tensors"].items()}
        (path / checkpoints.CONTENTS).write_text(json.dumps(page))

    return change


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (cut_short, "is damaged: __0_0.distcp has .* bytes, and had"),
        (lost, "is damaged: .*No such file"),
        (scrambled, "cannot be read"),
        (page_with(shape=[3, 3]), "has shape|cannot be read|mismatch"),
        (page_with(dtype="load"), "'load' is not a dtype of torch"),
        (page_with(shape=[1 << 60]), "cannot be read"),
        (page_with(offset=1 << 40), "lies outside of the file"),
        (page_with(file="../../secret"), "expected a file name without folders"),
        (page_with(file="/etc/passwd"), "expected a file name without folders"),
    ],
)
def test_damage_is_told(tmp_path: Path, damage: Callable[[Path], None], words: str) -> None:
    path = save(tmp_path, numbers=2)[-1]
    damage(path)
    with pytest.raises(ArtifactError, match=words) as caught:
        load(tmp_path)
    if "lies" not in words and "without folders" not in words and "shape" not in words:
        assert "resume from" in str(caught.value), "it names the one before"
    assert load(checkpoints.complete(tmp_path)[0]) == (1, 0), "which is whole"


def full_disk(folder: Path, asynchronous: bool) -> list[str]:
    """Saves twice; the second time no file may grow beyond some bytes, as on a full disk."""
    animal = zoo.make("mlp")
    told = []
    with pipeline(animal) as made:
        for done in made.train(animal.batches, epochs=3):
            if done.ends_epoch and done.epoch == 0:
                made.save(folder)
                resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))
            if done.ends_epoch and done.epoch == 1:
                try:
                    made.save(folder, wait=not asynchronous)
                    if asynchronous:
                        made.save(folder / "more")
                except WorkerError as error:
                    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
                    told.append(str(error))
    return told


@pytest.mark.processes
@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("workers", [1, 2])
def test_a_full_disk_is_told_and_the_checkpoint_before_is_whole(
    tmp_path: Path, asynchronous: bool, workers: int
) -> None:
    for told in processes.results(full_disk, workers, tmp_path, asynchronous):
        assert len(told) == 1
        assert "saving the checkpoint of minibatch 10" in told[0]
        assert "File too large" in told[0]
        assert "earlier checkpoints are intact" in told[0]
    assert names(checkpoints.complete(tmp_path)) == ["minibatch-00000005"]
    assert load(tmp_path) == (1, 0)


def test_contents_page_goes_through_json(tmp_path: Path) -> None:
    page = checkpoints.contents(save(tmp_path, numbers=1)[0])
    assert Checkpoint.from_json(page.to_json()) == page
    assert page.minibatches == 5
    assert {name.split("/")[0] for name in page.tensors} == {"model", "optimizer"}


def test_generators_come_back(tmp_path: Path) -> None:
    cpu = torch.device("cpu")
    random.gauss(0, 1)
    np.random.normal()
    text = saved_rng(cpu)
    first = [torch.rand(3).tolist(), random.random(), random.gauss(0, 1), np.random.normal()]
    restore_rng(text, cpu)
    assert [torch.rand(3).tolist(), random.random(), random.gauss(0, 1), np.random.normal()] == first
    with pytest.raises(ArtifactError, match="random state is damaged"):
        restore_rng(text[:100], cpu)
