"""Checkpoints on disk and at URLs: whole or not there, read without running anything, and clear about damage."""

import json
import math
import os
import pickle
import random
import resource
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import processes
import pytest
import torch
import zoo
from commands import load_benchmark
from marks import slow, thinned

import pipedream as pd
from pipedream.services.checkpoint import folders, pieces, stores, writer
from pipedream.services.checkpoint.stores.store import CheckpointStore, name_checkpoint
from tests.services.checkpoint.saving import load, names, pipeline, read, run, save, write

(damage,) = load_benchmark("failures", "damage")


@pytest.fixture(params=["disk", "store"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> CheckpointStore:
    """A folder on disk, and one in an object store."""
    return stores.open_store(tmp_path / "run" if request.param == "disk" else f"memory://{tmp_path.name}/run")


def test_the_newest_are_kept(folder: CheckpointStore) -> None:
    every = [f"minibatch-{minibatches:08d}" for minibatches in (5, 10, 15, 20)]
    for keep, kept in ((None, every), (2, every[-2:]), (1, every[-1:])):
        save(folder.within(str(keep)), keep=keep)
        assert names(folder.within(str(keep))) == kept, "and nothing else is left"


def test_a_checkpoint_without_its_manifest_does_not_exist(folder: CheckpointStore) -> None:
    assert folders.find_newest_checkpoint(folder) is None
    old, new = save(folder, epochs=2)
    new.delete(folders.MANIFEST)
    assert folders.list_checkpoints(folder) == [old]
    assert folders.find_newest_checkpoint(folder) == folders.find_newest_checkpoint(str(old)) == old
    assert load(old) == (1, 0), "it was asked for"
    words = f"{new.name} is newer than .*{old.name}, but has no checkpoint.json"
    with pytest.warns(UserWarning, match=words):
        assert load(folder) == (1, 0)
    if not folder.on_disk:  # on disk no killed save leaves this
        with pytest.warns(UserWarning, match=words):
            run(folder, epochs=3, resume=folder)
        assert names(folder) == [name_checkpoint(number) for number in (5, 10, 15)]


def test_what_a_killed_save_has_left_is_not_taken_and_removed_by_the_next(tmp_path: Path) -> None:
    for name in (".minibatch-00000098", "minibatch-of-mine"):
        (tmp_path / name).mkdir()
        (tmp_path / name / folders.MANIFEST).write_text("{}")
    assert folders.find_newest_checkpoint(tmp_path) is None
    assert [path.name for path in save(tmp_path, epochs=1)] == ["minibatch-00000005"]
    assert names(tmp_path) == ["minibatch-00000005", "minibatch-of-mine"]


def test_only_a_run_that_resumes_from_an_older_one_replaces_the_newer(folder: CheckpointStore) -> None:
    old, new = save(folder, epochs=2)
    scrambled(new)
    assert load(old) == (1, 0)
    assert folders.list_checkpoints(folder) == [old, new], "loading changes nothing"
    run(folder, epochs=2, resume=old)
    assert names(folder) == [old.name, new.name, f"{new.name}.replaced"]
    assert load(folder) == (2, 0)
    with pytest.raises(pd.PipelineError, match="exists already"):
        run(folder, epochs=1)


def test_what_is_trained_after_a_load_is_said_once(two_saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    animal = zoo.make("mlp")
    words = "in epoch 3: epochs=3 trains 3 more, 5 in all; train(until_epoch=3) trains 3 in all"
    for options, count in (({"epochs": 3}, 3), ({"until_epoch": 3}, 1), ({"until_epoch": 1}, 0)):
        with pipeline(animal) as resumed:
            resumed.load(two_saved)
            assert sum(done.ends_epoch for done in resumed.train(animal.batches, **options)) == count
            list(resumed.train(animal.batches))
        text = capsys.readouterr().err
        assert text.count(words) == len(text.splitlines()) == ("epochs" in options)


def draw() -> list[Any]:
    """Draws from the global generators, of which two keep the second of two normal numbers."""
    return [torch.rand(3).tolist(), random.random(), random.gauss(0, 1), np.random.normal()]


def test_generators_come_back(tmp_path: Path) -> None:
    draw()
    with pipeline(zoo.make("mlp")) as trained:
        path = trained.save(tmp_path)
        drawn = draw()
        trained.load(tmp_path)
        assert draw() == drawn
        manifest_with(lambda manifest: manifest.update(random=["{}"]))(stores.open_store(path))
        with pytest.raises(pd.PipelineError, match="random state is damaged"):
            trained.load(tmp_path)


def in_file(change: Callable[[bytes], bytes]) -> Callable[[stores.CheckpointStore], None]:
    """Returns a way to change the file of a checkpoint."""

    def rewrite(checkpoint: stores.CheckpointStore) -> None:
        write(checkpoint, "__0_0.distcp", change(read(checkpoint, "__0_0.distcp")))

    return rewrite


scrambled = in_file(lambda data: bytes(len(data)))


def linked(checkpoint: stores.CheckpointStore) -> None:
    """Moves a file out of the folder and leaves a link."""
    file, elsewhere = Path(checkpoint.locate("__0_0.distcp")), Path(checkpoint.above().locate("__0_0.distcp"))
    file.rename(elsewhere)
    file.symlink_to(elsewhere)


def manifest_with(change: Callable[[dict[str, Any]], object]) -> Callable[[stores.CheckpointStore], None]:
    """Returns a way to change a manifest, whose checksum is removed."""

    def rewrite(checkpoint: stores.CheckpointStore) -> None:
        manifest = json.loads(checkpoint.read_text(folders.MANIFEST))
        manifest.pop("crc32", None)
        change(manifest)
        write(checkpoint, folders.MANIFEST, json.dumps(manifest).encode())

    return rewrite


def tensors_with(**wrong: Any) -> Callable[[stores.CheckpointStore], None]:
    return manifest_with(lambda manifest: [stored.update(wrong) for stored in manifest["tensors"].values()])


def options_with(**wrong: Any) -> Callable[[stores.CheckpointStore], None]:
    return manifest_with(lambda manifest: manifest["stages"][0]["groups"][0]["options"].update(wrong))


@pytest.fixture(scope="module")
def two_saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two checkpoints; tests change copies of it."""
    folder = tmp_path_factory.mktemp("saved")
    save(folder, epochs=2)
    return folder


OF_FILES: list[tuple[Any, str]] = [
    (in_file(lambda data: data[:-1]), "is damaged: __0_0.distcp has .* bytes, and had"),
    (lambda checkpoint: checkpoint.delete("__0_0.distcp"), "is damaged: .*(No such file|there is no)"),
    (scrambled, "cannot be read: (?!OSError)"),
    (lambda checkpoint: write(checkpoint, folders.MANIFEST, b"{"), "not JSON"),
]
ON_DISK: list[tuple[Any, str]] = [
    (linked, "its __0_0.distcp is a link"),
    (tensors_with(shape=[3, 3]), "has dtype and shape"),
    (tensors_with(dtype="load"), "has dtype and shape .*'float64'.* had .*'load'"),
    (tensors_with(crc32=7), "another checksum than when"),
    (tensors_with(offset=1 << 40), "lies outside of the file"),
    (tensors_with(file="../../secret"), "expected a file name without folders"),
    (manifest_with(lambda m: m["files"].update({"../../etc/passwd": 1})), "expected a file name without folders"),
    (options_with(lr=math.nan), "option lr is a number up to 1e60, found nan"),
    (options_with(betas={"__tuple__": [1e300, -5]}), r"option betas .* found 1e\+300"),
    (manifest_with(lambda m: m.update(minibatches=1 << 62)), r"counts are from 0 to 1e\+15, found"),
]


@pytest.mark.parametrize(
    ("folder", "change", "words"),
    thinned([("disk", *row) for row in OF_FILES + ON_DISK] + [("store", *row) for row in OF_FILES]),
    indirect=["folder"],
)
def test_damage_is_told(
    two_saved: Path, folder: CheckpointStore, change: Callable[[stores.CheckpointStore], None], words: str
) -> None:
    for file in two_saved.glob("*/*"):
        if folder.on_disk:
            Path(folder.locate(file.parent.name)).mkdir(parents=True, exist_ok=True)
        write(folder.within(file.parent.name), file.name, file.read_bytes())
    old, new = folders.list_checkpoints(folder)
    change(new)
    with pytest.raises(pd.PipelineError, match=words) as caught:
        load(folder)
    assert f"resume from {old} (--resume {old})" in str(caught.value)


def test_no_damage_is_read_as_other_weights(two_saved: Path, tmp_path: Path) -> None:
    """A few of the trials of benchmarks/failures/damage.py."""
    shutil.copytree(two_saved, tmp_path, dirs_exist_ok=True)
    counts = damage.trials(tmp_path / "minibatch-00000005", 10)
    assert not [key for key in counts if key[2] == "wrong"]
    assert all(counts[file, "flipped bit", "refused"] for file in ("__0_0.distcp", "checkpoint.json"))


def test_the_command_verifies(
    run_command: Callable[..., tuple[int, str, str]], refused: Callable[..., str], folder: CheckpointStore
) -> None:
    old, new = save(folder.within("checkpoints"), epochs=2)
    status, out, _ = run_command("checkpoint", "verify", folder)
    assert (status, [line.split(", ")[0] for line in out.splitlines()]) == (0, [f"{old}: intact", f"{new}: intact"])
    weight = pieces.read_tensors(new, folders.read_manifest(new), ["model/0.weight"])["model/0.weight"]
    values = weight.numpy().tobytes()
    in_file(lambda data: data.replace(values, bytes([values[0] ^ 1]) + values[1:]))(new)
    status, out, error = run_command("checkpoint", "verify", folder.within("checkpoints"))
    assert (status, out.splitlines()[1]) == (2, f"{new}: damaged")
    assert f"(--resume {old})" in error
    status, out, _ = run_command("checkpoint", "verify", new, "--json")
    assert status == 2
    assert "another checksum" in json.loads(out)["damage"][str(new)]
    assert refused("checkpoint", "verify", folder.within("nowhere"))


def test_nothing_is_unpickled(tmp_path: Path) -> None:
    """Neither torch's own metadata, nor tensors."""

    class Evil:
        def __reduce__(self) -> Any:
            return os.mkdir, (str(tmp_path / "ran"),)

    path, evil = Path(str(save(tmp_path, epochs=1)[0])), Evil()
    (path / ".metadata").write_bytes(pickle.dumps(evil))
    assert load(tmp_path) == (1, 0)
    torch.save(evil, path / "__0_0.distcp")
    size = (path / "__0_0.distcp").stat().st_size
    tensors_with(offset=0, length=size)(stores.open_store(path))
    manifest_with(lambda manifest: manifest["files"].update({"__0_0.distcp": size}))(stores.open_store(path))
    with pytest.raises(pd.PipelineError, match="cannot be read: UnpicklingError: a tensor's bytes") as caught:
        load(tmp_path)
    assert "weights_only" not in str(caught.value), "torch advises to run it"
    assert not (tmp_path / "ran").exists()


def full_disk(folder: Path, asynchronous: bool) -> str:
    """Saves twice; the second time no file may grow beyond some bytes, as on a full disk."""
    animal, told = zoo.make("mlp"), ""
    with pipeline(animal) as trained:
        for done in trained.train(animal.batches, epochs=3):
            if done.number == 4:
                trained.save(folder)
                resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))
            if done.number == 9:
                try:
                    trained.save(folder, wait=not asynchronous)
                    if asynchronous:
                        trained.save(folder / "more")
                except pd.errors.WorkerError as error:
                    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
                    told = str(error)
    return told


@pytest.mark.processes
@pytest.mark.parametrize(("workers", "asynchronous"), [(1, False), (2, True), slow(1, True), slow(2, False)])
def test_a_full_disk_is_told_and_the_one_before_is_whole(tmp_path: Path, asynchronous: bool, workers: int) -> None:
    for told in processes.results(full_disk, workers, tmp_path, asynchronous):
        assert "saving the checkpoint of minibatch 10" in told
        assert f"cannot write {tmp_path / 'minibatch-00000010'}: File too large" in told
        assert "earlier checkpoints are intact" in told
    assert names(tmp_path) == ["minibatch-00000005"], "what was written takes no more space"
    assert load(tmp_path) == (1, 0)


def test_a_folder_that_is_removed_during_a_run_is_an_error(tmp_path: Path) -> None:
    animal, run = zoo.make("mlp"), tmp_path / "run"
    with pipeline(animal) as trained:
        batches = trained.train(animal.batches, epochs=2)
        next(batches)
        trained.save(run)
        shutil.rmtree(run)
        next(batches)
        with pytest.raises(pd.PipelineError, match="run was removed or replaced while this run was writing"):
            trained.save(run)
        list(batches)
    assert not run.exists()


def test_the_writer_uses_the_tensors_gpu(two_saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[tuple[str, int]] = []
    monkeypatch.setattr(torch, "save", lambda *args: done.append(("save", threading.get_ident())))
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: done.append((str(device), threading.get_ident())))
    background = writer.Writer(0, False, torch.device("cuda", 1))
    manifest = folders.read_manifest(stores.open_store(two_saved / "minibatch-00000005"))
    background.begin(writer.Save(stores.open_store(tmp_path), manifest, {"model/a": torch.ones(2)}, None))
    background.finish()
    assert [what for what, _ in done] == ["cuda:1", "save"]
    assert done[0][1] == done[1][1] != threading.get_ident()


class _OnGpu(torch.Tensor):
    """Stands for a tensor on a GPU: a copy into pinned memory is complete when an event is."""

    is_cuda = True  # type: ignore[assignment]
    under_way: ClassVar[list[tuple[torch.Tensor, torch.Tensor]]] = []

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert function is not torch.Tensor.clone, "takes memory of the GPU"
        if function is torch.empty_like:
            assert kwargs == {"device": "cpu", "pin_memory": True}
            return torch.full(args[0].shape, -1.0)
        if function is torch.Tensor.copy_ and not isinstance(args[0], _OnGpu):
            assert kwargs == {"non_blocking": True}
            cls.under_way.append((args[0], torch.tensor(args[1].tolist())))
            return args[0]
        return super().__torch_function__(function, types, args, kwargs or {})


def _finish_copies() -> None:
    for copy, value in _OnGpu.under_way:
        copy.copy_(value)


def test_what_is_saved_in_the_background_is_copied_to_the_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    event = SimpleNamespace(record=lambda: None, synchronize=_finish_copies)
    monkeypatch.setattr(torch.cuda, "Event", lambda: event)
    weight, step = torch.ones(3), torch.ones(2)
    more = {"model/weight": weight.as_subclass(_OnGpu), "optimizer/weight/step": step}
    with pipeline(zoo.make("mlp")) as trained:
        checkpointer = trained._saver
        tensors, places, stages = checkpointer._collect()
        monkeypatch.setattr(checkpointer, "_collect", lambda: (tensors | more, places, stages))
        path = trained.save(tmp_path, wait=False)
        for tensor in (weight, step):
            tensor.fill_(2.0)  # as training would
        checkpointer.writer.finish()
    checkpoint = stores.open_store(path)
    saved = pieces.read_tensors(checkpoint, folders.read_manifest(checkpoint), more)
    assert saved["model/weight"].tolist() == [1.0] * 3
    assert saved["optimizer/weight/step"].tolist() == [1.0] * 2
