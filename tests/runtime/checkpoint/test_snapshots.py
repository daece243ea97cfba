"""Snapshots: checkpoints in the memory of each machine, with a copy in that of the next one."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path
from typing import Any

import processes
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from pipedream.core.errors import WorkerError
from pipedream.core.plan.host_memory import find_neighbours
from pipedream.runtime.checkpoint import copies, folders, pieces, writer
from pipedream.training.snapshots import find_newest_snapshot
from tests.runtime.checkpoint import saving

MEMORY = Path("memory")


@given(st.lists(st.integers(0, 4), min_size=1, max_size=12))
def test_one_lost_machine_loses_nothing(machine_of: list[int]) -> None:
    machines = [[r for r, other in enumerate(machine_of) if other == m] for m in dict.fromkeys(machine_of)]
    neighbours = find_neighbours(machines)
    assert set(neighbours) == (set(range(len(machine_of))) if len(machines) > 1 else set())
    for rank, neighbour in neighbours.items():
        assert machine_of[rank] != machine_of[neighbour]
    for ranks in machines[: len(machines) * (len(machines) > 1)]:
        sizes = [sum(neighbour == rank for neighbour in neighbours.values()) for rank in ranks]
        assert max(sizes) - min(sizes) <= 1, "the work is shared"


MACHINES = {0: "one", 1: "two", 2: "two", 3: "three"}
NAME = folders.name_folder(15)


def train(epochs: int, checkpoint: Path | None = None) -> dict[str, torch.Tensor]:
    """Trains, from a snapshot if given, with a snapshot after each epoch; returns the weights."""
    animal = saving.zoo.make("mlp")
    with saving.pipeline(animal, (2, 2)) as pipeline:
        if checkpoint is not None:
            pipeline.load(checkpoint)
        for done in pipeline.train(animal.batches, until_epoch=epochs):
            if done.ends_epoch:
                pipeline.save(MEMORY, keep=1, wait=False, snapshot=True)
        return pipeline.state_dict()


def take_from(base: Path, case: str) -> tuple[Path, list[int]] | None:
    """Returns what is taken after losses, of which this machine makes its own."""
    home, saved = MACHINES[dist.get_rank()], base / "saved"
    dist.barrier()
    if dist.get_rank() in (0, 1, 3):  # one of each machine
        shutil.rmtree(MEMORY)
        shutil.copytree(saved / home / MEMORY, MEMORY)
        if home in {"two is lost": "two", "two and three are lost": "two three"}.get(case, "").split():
            shutil.rmtree(MEMORY)
        if case == "two is damaged" and home == "two":
            damage(MEMORY / NAME / "__2_0.distcp")
        if case == "the manifest of one is damaged" and home == "one":
            page = MEMORY / NAME / "checkpoint.json"
            page.write_bytes(page.read_bytes().replace(b'"seed": 0', b'"seed": 1'))
        if case == "all are damaged" and home != "one":
            damage(MEMORY / NAME / "__2_0.distcp")
        if case == "only one has renamed":
            (MEMORY / NAME).rename(MEMORY / (NAME if home == "one" else f".{NAME}"))
            shutil.copytree(saved / "before" / home / MEMORY, MEMORY, dirs_exist_ok=True)
    dist.barrier()
    return find_newest_snapshot(MEMORY, 15 if case == "as new on disk" else 9)


def damage(file: Path) -> None:
    """Changes a bit of a tensor's values."""
    manifest = folders.read_manifest(file.parent, check_files=False)
    name = next(n for n, stored in manifest.tensors.items() if all(p.file == file.name for p in stored.pieces))
    content = bytearray(file.read_bytes())
    content[content.index(pieces.read_tensors(file.parent, manifest, [name])[name].numpy().tobytes())] ^= 1
    file.write_bytes(content)


CASES = {
    "all live": (NAME, []),
    "two is lost": (NAME, [1, 2]),
    "two is damaged": (NAME, [2]),
    "the manifest of one is damaged": (NAME, []),
    "two and three are lost": None,
    "all are damaged": None,
    "as new on disk": None,
    "only one has renamed": (folders.name_folder(10), []),
}


def save_twice(place: Any, name: str) -> tuple[str, list[str]]:
    """Makes a snapshot, and one that rank 3's machine cannot finish; returns why, and the names of what is there."""

    def fail(path: Path, *_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    animal = saving.zoo.make("mlp")
    with saving.pipeline(animal, (2, 2)) as pipeline, pytest.MonkeyPatch.context() as patch:
        list(pipeline.train(animal.batches))
        pipeline.save(MEMORY, keep=1, snapshot=True)
        list(pipeline.train(animal.batches))
        if dist.get_rank() == 3:
            patch.setattr(place, name, fail, raising=False)
        with pytest.raises(WorkerError) as caught:
            pipeline.save(MEMORY, keep=1, snapshot=True)
    return str(caught.value), [path.name for path in folders.list_checkpoints(MEMORY)]


def try_cases(base: Path) -> tuple[Any, ...]:
    """Trains on three machines, whose memories are folders; returns what is chosen in each case, and more."""
    home = base / MACHINES[dist.get_rank()]
    home.mkdir(exist_ok=True)
    os.environ["RANK"] = str(dist.get_rank())
    os.chdir(home)
    MEMORY.mkdir(exist_ok=True)
    copies._CHUNK_BYTES = 1000  # so that files are sent in several parts
    for epochs, folder in ((2, base / "saved" / "before"), (3, base / "saved")):
        train(epochs, None if epochs == 2 else MEMORY)
        dist.barrier()
        shutil.copytree(MEMORY, folder / home.name / MEMORY, dirs_exist_ok=True)
    chosen = {case: take_from(base, case) for case in CASES}
    point = take_from(base, "two is lost")
    assert point is not None
    continued = train(4, point[0])
    again = None
    if take_from(base, "two and three are lost") is None:
        again = train(4)  # over what is left in memory
    dist.barrier()
    shutil.copytree(MEMORY, base / "left" / home.name, dirs_exist_ok=True)
    failed = [save_twice(writer, "publish"), save_twice(copies, "open")]
    return chosen, continued, again, failed


@pytest.mark.processes
def test_what_is_lost_or_damaged_is_read_from_the_next_machine(tmp_path: Path) -> None:
    results = processes.results(try_cases, 4, tmp_path, timeout_s=120.0)
    chosen, continued, again, _ = results[0]
    saved = {machine: tmp_path / "saved" / machine / MEMORY / NAME for machine in MACHINES.values()}
    names = {machine: sorted(path.name for path in place.iterdir()) for machine, place in saved.items()}
    assert names == {  # the second replicas, ranks 1 and 3, have nothing of their own that would be sent
        "one": ["__0_0.distcp", "checkpoint.json"],
        "two": ["__0_0.distcp", "__1_0.distcp", "__2_0.distcp", "checkpoint.json"],
        "three": ["__2_0.distcp", "__3_0.distcp", "checkpoint.json"],
    }
    assert len({(place / "checkpoint.json").read_bytes() for place in saved.values()}) == 1
    assert (saved["one"] / "__0_0.distcp").read_bytes() == (saved["two"] / "__0_0.distcp").read_bytes()
    assert chosen == {case: result and (MEMORY / result[0], result[1]) for case, result in CASES.items()}
    for machine in saved:
        (newest,) = folders.list_checkpoints(tmp_path / "left" / machine, parts=True)
        assert newest.name == folders.name_folder(20), "the one before is removed"
        assert not list((tmp_path / "left" / machine).glob(".minibatch*"))
    for rank, (*_, failed) in enumerate(results):
        for (error, names), number in zip(failed, (2, 1), strict=True):
            assert "rank 3, saving the checkpoint of minibatch 10" in error
            assert "No space left on device" in error
            assert folders.name_folder(5) in names, "the one before is there until all machines have the next"
            assert len(names) == (1 if MACHINES[rank] == "three" else number)
    os.chdir(tmp_path)
    with saving.pipeline(saving.zoo.make("mlp"), (2, 2)) as whole:
        list(whole.train(saving.zoo.make("mlp").batches, epochs=4))
        weights = whole.state_dict()
    assert all(torch.equal(continued[name], weights[name]) for name in weights)
    assert all(torch.equal(again[name], weights[name]) for name in weights)
