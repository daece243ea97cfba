"""Checkpoints on disk: whole or not there, read without running anything, and clear about damage."""

import importlib
import json
import math
import os
import pickle
import random
import resource
import shutil
import sys
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import processes
import pytest
import torch
import zoo
from marks import slow

from pipedream.core.artifact import system_error
from pipedream.core.checkpoint import Checkpoint
from pipedream.core.errors import ArtifactError, WorkerError
from pipedream.runtime.checkpoint import folders, pieces, writer
from pipedream.runtime.data.rng import restore_rng, save_rng
from pipedream.training.run_folder import CHECKPOINTS, check_unused, find_resume_point
from tests.runtime.checkpoint.saving import load, pipeline, save

sys.path.append(str(Path(__file__).parents[3] / "benchmarks" / "failures"))
damage = importlib.import_module("damage")
sys.path.pop()


def names(paths: list[Path]) -> list[str]:
    """Returns the folders' names."""
    return [path.name for path in paths]


def test_the_writers_thread_uses_the_gpu_of_the_tensors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = save(tmp_path / "first", epochs=1)[0]
    done: list[tuple[str, int]] = []
    write = torch.save

    def recorded_save(*args: Any, **rest: Any) -> Any:
        done.append(("save", threading.get_ident()))
        return write(*args, **rest)

    monkeypatch.setattr(torch, "save", recorded_save)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: done.append((str(device), threading.get_ident())))
    background = writer.Writer(0, False, torch.device("cuda", 1))
    background.begin(tmp_path / "second", folders.read_manifest(path), {"model/a": torch.ones(2)}, None)
    background.finish()
    assert [what for what, _ in done] == ["cuda:1", "save"]
    assert done[0][1] == done[1][1] != threading.get_ident()


class _OnGpu(torch.Tensor):
    """Stands for a tensor on a GPU: a copy into pinned memory is complete when an event is."""

    is_cuda = True  # type: ignore[assignment]
    under_way: ClassVar[list[tuple[torch.Tensor, torch.Tensor]]] = []

    def clone(self, **options: Any) -> torch.Tensor:  # type: ignore[override]
        raise AssertionError("takes memory of the GPU")

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.empty_like:
            assert kwargs == {"device": "cpu", "pin_memory": True}
            return torch.full(args[0].shape, -1.0)
        if function is torch.Tensor.copy_ and not isinstance(args[0], _OnGpu):
            assert kwargs == {"non_blocking": True}
            cls.under_way.append((args[0], args[1].as_subclass(torch.Tensor).clone()))
            return args[0]
        return super().__torch_function__(function, types, args, kwargs or {})


class _Event:
    def record(self) -> None:
        self._copies = list(_OnGpu.under_way)

    def synchronize(self) -> None:
        for copy, value in self._copies:
            copy.copy_(value)


def test_what_is_saved_in_the_background_is_copied_to_the_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Event", _Event)
    weight, step = torch.ones(3), torch.ones(2)
    more = {"model/weight": weight.as_subclass(_OnGpu), "optimizer/weight/step": step}
    with pipeline(zoo.make("mlp")) as trained:
        checkpointer = trained._session.checkpointer
        tensors, places, stages = checkpointer._collect()
        monkeypatch.setattr(checkpointer, "_collect", lambda: (tensors | more, places, stages))
        path = trained.save(tmp_path, wait=False)
        for tensor in (weight, step):
            tensor.fill_(2.0)  # as training would
        checkpointer.writer.finish()
    saved = pieces.read_tensors(path, folders.read_manifest(path), more)
    assert {name: tensor.tolist() for name, tensor in saved.items()} == {
        "model/weight": [1.0, 1.0, 1.0],
        "optimizer/weight/step": [1.0, 1.0],
    }


def test_the_newest_are_kept(tmp_path: Path) -> None:
    every = names(save(tmp_path / "all"))
    assert len(every) == 4
    assert names(save(tmp_path / "two", keep=2)) == every[-2:]
    assert names(save(tmp_path / "one", keep=1)) == every[-1:]
    assert sorted(os.listdir(tmp_path / "two")) == every[-2:], "nothing else is left"


def test_a_folder_is_named_after_its_minibatches(tmp_path: Path) -> None:
    assert folders.name_folder(91) == "minibatch-00000091", "earlier versions have written this name"
    assert [folders.parse_minibatches(name) for name in ("minibatch-00000091", "minibatch-123456789")] == [
        91,
        123456789,
    ]
    for name in (".minibatch-00000091", "minibatch-of-mine", "minibatch-", "minibatch-00000091-old", "91"):
        assert folders.parse_minibatches(name) is None
    saved = save(tmp_path, epochs=2)
    assert names(saved) == [folders.name_folder(folders.read_manifest(path).minibatches) for path in saved]


def test_the_newest_checkpoint_of_a_run_folder_is_resumed(tmp_path: Path) -> None:
    saved = save(tmp_path / CHECKPOINTS, epochs=2)
    for resume, path in ((tmp_path, saved[-1]), (tmp_path / CHECKPOINTS, saved[-1]), (saved[0], saved[0])):
        resumed = find_resume_point(resume, None)
        assert resumed is not None
        assert (resumed.path, resumed.folder) == (path, tmp_path)
    with pytest.raises(ArtifactError, match="holds checkpoints of an earlier run"):
        check_unused(tmp_path)


def test_what_is_not_complete_is_not_taken(tmp_path: Path) -> None:
    assert folders.find_newest_checkpoint(tmp_path) is None
    assert folders.find_newest_checkpoint(tmp_path / "nowhere") is None
    saved = save(tmp_path, epochs=2)
    (tmp_path / folders.name_folder(99)).mkdir()
    (tmp_path / f".{folders.name_folder(98)}").mkdir()
    (tmp_path / f".{folders.name_folder(98)}" / folders.MANIFEST).write_text("{}")
    (tmp_path / "minibatch-of-mine").mkdir()
    (tmp_path / "minibatch-of-mine" / folders.MANIFEST).write_text("{}")
    assert folders.list_checkpoints(tmp_path) == saved
    assert folders.find_newest_checkpoint(tmp_path) == saved[-1]
    assert folders.find_newest_checkpoint(saved[0]) == saved[0]


def test_what_is_trained_after_a_load_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save(tmp_path, epochs=2)
    animal = zoo.make("mlp")
    for options, count, words in (
        ({"epochs": 3}, 3, "in epoch 3: epochs=3 trains 3 more, 5 in all; train(until_epoch=3) trains 3 in all"),
        ({"until_epoch": 3}, 1, ""),
        ({"until_epoch": 1}, 0, ""),
    ):
        with pipeline(animal) as resumed:
            resumed.load(tmp_path)
            assert sum(done.ends_epoch for done in resumed.train(animal.batches, **options)) == count
            text = capsys.readouterr().err
            assert words in text
            assert bool(text) == bool(words)
            list(resumed.train(animal.batches))
            assert not capsys.readouterr().err, "it is said once"


def test_a_newer_one_without_a_manifest_is_named(tmp_path: Path) -> None:
    saved = save(tmp_path, epochs=2)
    (saved[1] / folders.MANIFEST).unlink()
    with pytest.warns(UserWarning, match="minibatch-00000010 is newer than .*5, but has no checkpoint.json"):
        assert load(tmp_path) == (1, 0)
    with warnings.catch_warnings(action="error"):
        assert load(saved[0]) == (1, 0), "it was asked for"


def test_what_a_killed_save_has_left_is_removed_by_the_next(tmp_path: Path) -> None:
    folder = tmp_path / f".{folders.name_folder(1)}"
    folder.mkdir()
    (folder / "__0_0.distcp").write_bytes(b"half")
    saved = save(tmp_path, epochs=1)
    assert os.listdir(tmp_path) == names(saved)


class Evil:
    """Runs code where it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


def test_torchs_own_metadata_is_not_unpickled(tmp_path: Path) -> None:
    path = save(tmp_path, epochs=1)[0]
    (path / ".metadata").write_bytes(pickle.dumps(Evil(tmp_path / "ran")))
    assert load(tmp_path) == (1, 0)
    assert not (tmp_path / "ran").exists()


def test_tensors_are_not_unpickled(tmp_path: Path) -> None:
    path = save(tmp_path, epochs=1)[0]
    manifest = json.loads((path / folders.MANIFEST).read_text())
    evil = tmp_path / "evil"
    torch.save(Evil(tmp_path / "ran"), evil)
    stored = next(iter(manifest["tensors"].values()))
    (path / stored["file"]).write_bytes(evil.read_bytes())
    manifest["files"][stored["file"]] = stored["length"] = evil.stat().st_size
    manifest["tensors"] = {name: stored | {"offset": 0} for name in manifest["tensors"]}
    del manifest["crc32"]
    (path / folders.MANIFEST).write_text(json.dumps(manifest))
    with pytest.raises(ArtifactError, match="cannot be read: UnpicklingError: a tensor's bytes") as caught:
        load(tmp_path)
    assert "weights_only" not in str(caught.value), "torch advises to run it"
    assert not (tmp_path / "ran").exists()


def cut_short(path: Path) -> None:
    """Takes the end of a file away."""
    file = next(path.glob("*.distcp"))
    file.write_bytes(file.read_bytes()[:-1])


def lost(path: Path) -> None:
    """Removes a file."""
    next(path.glob("*.distcp")).unlink()


def linked(path: Path) -> None:
    """Moves a file out of the folder and leaves a link."""
    file = next(path.glob("*.distcp"))
    file.rename(path.parent / file.name)
    file.symlink_to(path.parent / file.name)


def scrambled(path: Path) -> None:
    """Writes over a file."""
    file = next(path.glob("*.distcp"))
    file.write_bytes(bytes(len(file.read_bytes())))


def manifest_with(**wrong: Any) -> Callable[[Path], None]:
    """Returns a way to change each tensor's line in the manifest, whose checksum is removed."""

    def change(path: Path) -> None:
        manifest = json.loads((path / folders.MANIFEST).read_text())
        del manifest["crc32"]
        manifest["tensors"] = {name: stored | wrong for name, stored in manifest["tensors"].items()}
        (path / folders.MANIFEST).write_text(json.dumps(manifest))

    return change


def head_with(**wrong: Any) -> Callable[[Path], None]:
    """Returns a way to change fields of the manifest, or options of the first stage's first group."""

    def change(path: Path) -> None:
        manifest = json.loads((path / folders.MANIFEST).read_text())
        del manifest["crc32"]
        manifest["files"] |= wrong.pop("files", {})
        manifest["stages"][0]["groups"][0]["options"] |= wrong.pop("options", {})
        (path / folders.MANIFEST).write_text(json.dumps(manifest | wrong))

    return change


@pytest.fixture(scope="module")
def two_saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two checkpoints; tests change copies of it."""
    folder = tmp_path_factory.mktemp("saved")
    save(folder, epochs=2)
    return folder


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (cut_short, "is damaged: __0_0.distcp has .* bytes, and had"),
        (lost, "is damaged: .*No such file"),
        (linked, "its __0_0.distcp is a link"),
        (scrambled, "cannot be read"),
        (manifest_with(shape=[3, 3]), "has dtype and shape"),
        (manifest_with(dtype="load"), "has dtype and shape .*'float64'.* had .*'load'"),
        (manifest_with(dtype="float32"), "has dtype and shape .*'float64'.* had .*'float32'"),
        (manifest_with(shape=[1 << 60]), "has dtype and shape"),
        (manifest_with(crc32=7), "another checksum than when"),
        (manifest_with(offset=1 << 40), "lies outside of the file"),
        (manifest_with(file="../../secret"), "expected a file name without folders"),
        (manifest_with(file="/etc/passwd"), "expected a file name without folders"),
        (head_with(files={"../../etc/passwd": 1}), "expected a file name without folders"),
        (head_with(options={"lr": math.nan}), "option lr is a number up to 1e60, found nan"),
        (head_with(options={"betas": {"__tuple__": [1e300, -5]}}), r"option betas .* found 1e\+300"),
        (head_with(minibatches=1 << 62), r"counts are from 0 to 1e\+15, found"),
    ],
)
def test_damage_is_told(two_saved: Path, tmp_path: Path, change: Callable[[Path], None], words: str) -> None:
    shutil.copytree(two_saved, tmp_path, dirs_exist_ok=True)
    change(folders.list_checkpoints(tmp_path)[-1])
    with pytest.raises(ArtifactError, match=words) as caught:
        load(tmp_path)
    before = folders.list_checkpoints(tmp_path)[0]
    assert f"resume from {before} (--resume {before})" in str(caught.value), "it names the one before"
    assert load(folders.list_checkpoints(tmp_path)[0]) == (1, 0), "which is whole"


def test_no_damage_is_read_as_other_weights(tmp_path: Path) -> None:
    """A few of the trials of benchmarks/failures/damage.py."""
    counts = damage.trials(save(tmp_path, epochs=1)[0], 10)
    assert not [key for key in counts if key[2] == "wrong"]
    assert counts["__0_0.distcp", "flipped bit", "refused"] > 0
    assert counts["checkpoint.json", "flipped bit", "refused"] > 0


def test_the_command_verifies(run_command: Callable[..., tuple[int, str, str]], tmp_path: Path) -> None:
    old, new = save(tmp_path / CHECKPOINTS, epochs=2)
    status, out, _ = run_command("checkpoint", "verify", str(tmp_path))
    assert (status, [line.split(", ")[0] for line in out.splitlines()]) == (0, [f"{old}: intact", f"{new}: intact"])
    file = new / "__0_0.distcp"
    data = file.read_bytes()
    values = pieces.read_tensors(new, folders.read_manifest(new), ["model/0.weight"])["model/0.weight"]
    at = data.index(values.numpy().tobytes())
    file.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
    status, out, error = run_command("checkpoint", "verify", str(tmp_path / CHECKPOINTS))
    assert (status, out.splitlines()[1]) == (2, f"{new}: damaged")
    assert f"(--resume {old})" in error
    status, out, _ = run_command("checkpoint", "verify", str(new), "--json")
    assert status == 2
    assert "another checksum" in json.loads(out)["damage"][str(new)]
    assert run_command("checkpoint", "verify", str(tmp_path / "nowhere"))[0] == 2


def full_disk(folder: Path, asynchronous: bool) -> list[str]:
    """Saves twice; the second time no file may grow beyond some bytes, as on a full disk."""
    animal = zoo.make("mlp")
    told = []
    with pipeline(animal) as trained:
        for done in trained.train(animal.batches, epochs=3):
            if done.ends_epoch and done.epoch == 0:
                trained.save(folder)
                resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))
            if done.ends_epoch and done.epoch == 1:
                try:
                    trained.save(folder, wait=not asynchronous)
                    if asynchronous:
                        trained.save(folder / "more")
                except WorkerError as error:
                    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
                    told.append(str(error))
    return told


@pytest.mark.processes
@pytest.mark.parametrize(
    ("workers", "asynchronous"), [(1, False), (2, True), *(slow(*case) for case in ((1, True), (2, False)))]
)
def test_a_full_disk_is_told_and_the_checkpoint_before_is_whole(
    tmp_path: Path, asynchronous: bool, workers: int
) -> None:
    for told in processes.results(full_disk, workers, tmp_path, asynchronous):
        assert len(told) == 1
        assert "saving the checkpoint of minibatch 10" in told[0]
        assert f"cannot write {tmp_path / 'minibatch-00000010'}: File too large" in told[0]
        assert "earlier checkpoints are intact" in told[0]
    assert names(folders.list_checkpoints(tmp_path)) == ["minibatch-00000005"]
    assert not list(tmp_path.glob(".minibatch*")), "what was written takes no more space"
    assert load(tmp_path) == (1, 0)


@pytest.mark.parametrize("values", [10, 100_000])
def test_a_full_disk_is_named_where_torch_does_not(values: int) -> None:
    with pytest.raises((OSError, RuntimeError)) as caught, open("/dev/full", "wb") as full:
        torch.save(torch.ones(values), full)
    assert "No space left" in str(system_error(caught.value))


def test_a_folder_that_is_removed_during_a_run_is_an_error(tmp_path: Path) -> None:
    animal = zoo.make("mlp")
    run = tmp_path / "run"
    with pipeline(animal) as trained:
        batches = trained.train(animal.batches, epochs=2)
        next(batches)
        trained.save(run)
        shutil.rmtree(run)
        next(batches)
        with pytest.raises(ArtifactError, match="run was removed or replaced while this run was writing"):
            trained.save(run)
        for _ in batches:
            pass
    assert not run.exists()


def test_manifest_goes_through_json(tmp_path: Path) -> None:
    manifest = folders.read_manifest(save(tmp_path, epochs=1)[0])
    assert Checkpoint.from_json(manifest.to_json()) == manifest
    assert manifest.minibatches == 5
    assert {name.split("/")[0] for name in manifest.tensors} == {"model", "optimizer"}


def test_generators_come_back(tmp_path: Path) -> None:
    cpu = torch.device("cpu")
    random.gauss(0, 1)
    np.random.normal()
    text = save_rng(cpu)
    first = [torch.rand(3).tolist(), random.random(), random.gauss(0, 1), np.random.normal()]
    restore_rng(text, cpu)
    assert [torch.rand(3).tolist(), random.random(), random.gauss(0, 1), np.random.normal()] == first
    with pytest.raises(ArtifactError, match="random state is damaged"):
        restore_rng(text[:100], cpu)


def test_a_run_that_resumes_from_an_older_one_replaces_the_newer(tmp_path: Path) -> None:
    old, new = save(tmp_path, epochs=2)
    scrambled(new)
    animal = zoo.make("mlp")
    with pipeline(animal) as trained:
        trained.load(old)
        assert folders.list_checkpoints(tmp_path) == [old, new], "loading changes nothing"
        for done in trained.train(animal.batches):
            if done.ends_epoch:
                trained.save(tmp_path)
    assert sorted(os.listdir(tmp_path)) == [old.name, new.name, f"{new.name}.replaced"]
    assert load(tmp_path) == (2, 0)
