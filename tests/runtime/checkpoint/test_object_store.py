"""Checkpoints at URLs: as whole, as checked and as exact as those on disk."""

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import processes
import pytest
import torch
import torch.distributed.checkpoint as dcp
import zoo
from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader

from pipedream.core.errors import ArtifactError, WorkerError
from pipedream.runtime.checkpoint import folders, pieces
from pipedream.runtime.checkpoint.object_store import RemotePath, any_path
from pipedream.training.run_folder import CHECKPOINTS
from tests.runtime.checkpoint import saving

URL = "memory://bucket/run"


@pytest.fixture(autouse=True)
def memory() -> Iterator[Any]:
    """Yields an empty store."""
    files = fsspec.filesystem("memory")
    files.rm("/", recursive=True)
    yield files
    files.rm("/", recursive=True)


def names(url: str = URL) -> list[str]:
    """Returns the names in a folder."""
    return [path.name for path in RemotePath(url).glob("*")]


def flip(path: RemotePath, at: int = -1) -> None:
    """Flips a bit of a file."""
    with path.open("rb") as file:
        data = bytearray(file.read())
    data[at] ^= 1
    path.write_bytes(bytes(data))


def test_a_run_continues_exactly(tmp_path: Path) -> None:
    whole = saving.run(tmp_path, epochs=4)
    saving.run(URL, epochs=2)
    losses = saving.run(URL, epochs=4, resume=URL)
    assert all(torch.equal(losses[name], whole[name]) for name in whole)
    assert names() == [folders.name_folder(5 * epochs) for epochs in (1, 2, 3, 4)], "and nothing else is left"


def test_the_newest_are_kept() -> None:
    assert [str(path) for path in saving.save(URL, keep=2)] == [f"{URL}/minibatch-000000{n}" for n in (15, 20)]
    assert len(names()) == 2


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_torchs_reader_reads_it() -> None:
    path = saving.save(URL, (2, 1), epochs=1)[0]
    with saving.pipeline(zoo.make("mlp"), (2, 1)) as trained:
        trained.load(URL)
        expected = {f"model/{name}": tensor for name, tensor in trained.state_dict().items()}
    tensors = {name: torch.zeros_like(tensor) for name, tensor in expected.items()}
    dcp.load(tensors, storage_reader=FsspecReader(str(path)), no_dist=True)
    assert all(torch.equal(tensors[name], expected[name]) for name in expected)


def test_a_checkpoint_without_its_manifest_does_not_exist(memory: Any) -> None:
    old, new = saving.save(URL, epochs=2)
    (new / folders.MANIFEST).unlink()
    assert folders.list_checkpoints(any_path(URL)) == [old]
    with pytest.warns(UserWarning, match=f"{new.name} is newer than .*{old.name}, but has no checkpoint.json"):
        assert saving.load(URL) == (1, 0)
    with pytest.warns(UserWarning, match="but has no checkpoint.json"):
        saving.run(URL, epochs=3, resume=URL)
    assert names() == [folders.name_folder(5 * epochs) for epochs in (1, 2, 3)]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.* but has no checkpoint.json")
def test_a_killed_save_leaves_the_checkpoint_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed after any of the store's operations, the folder resumes from a checkpoint that is whole."""
    saving.run(URL, epochs=1)
    whole = fsspec.filesystem("memory").find("/")
    assert len(whole) == 3
    done, allowed = 0, 0
    files = type(fsspec.filesystem("memory"))

    def limited(name: str) -> None:
        original = getattr(files, name)

        def call(*args: Any, **options: Any) -> Any:
            nonlocal done
            done += 1
            if done > allowed:
                raise ConnectionResetError("killed")
            return original(*args, **options)

        monkeypatch.setattr(files, name, call)

    for name in ("open", "rm", "rm_file"):
        limited(name)
    while True:
        done = 0
        try:
            saving.run(URL, epochs=2, keep=1, resume=URL)
        except (ArtifactError, WorkerError, OSError):
            pass
        else:
            break
        before, allowed_then = allowed, allowed
        done, allowed = -(10**9), allowed_then
        assert saving.load(URL)[0] in (1, 2), before
        for path in folders.list_checkpoints(any_path(URL)):
            pieces.verify_checkpoint(path)
        allowed += 1
        if saving.load(URL)[0] == 2:
            break
    assert allowed > 5


def test_damage_is_found(run_command: Callable[..., tuple[int, str, str]]) -> None:
    run = f"{URL}/{CHECKPOINTS}"
    old, new = saving.save(run, epochs=2)
    status, out, _ = run_command("checkpoint", "verify", URL)
    assert (status, [line.split(", ")[0] for line in out.splitlines()]) == (0, [f"{old}: intact", f"{new}: intact"])
    stored = folders.read_manifest(new).tensors["model/0.weight"].pieces[0]
    flip(new / stored.file, stored.offset + stored.length // 2)
    status, out, error = run_command("checkpoint", "verify", run)
    assert (status, out.splitlines()[1]) == (2, f"{new}: damaged")
    assert f"(--resume {old})" in error
    with pytest.raises(ArtifactError, match=f"resume from {old}"):
        saving.load(run)
    assert saving.load(str(old)) == (1, 0)
    (new / stored.file).write_bytes(bytes(folders.read_manifest(old).files[stored.file]))
    with pytest.raises(ArtifactError, match=f"cannot be read: (?!OSError).*resume from {old}"):
        saving.load(run)
    flip(old / folders.MANIFEST, 100)
    with pytest.raises(ArtifactError, match=r"damaged|not JSON"):
        saving.load(str(old))


def test_a_file_that_is_cut_short_is_found() -> None:
    (path,) = saving.save(URL, epochs=1)
    with (path / "__0_0.distcp").open("rb") as file:
        data = file.read()
    (path / "__0_0.distcp").write_bytes(data[:-1])
    with pytest.raises(ArtifactError, match=r"is damaged: __0_0.distcp has"):
        saving.load(URL)


def test_gather_copies_between_disk_and_store(run_command: Callable[..., tuple[int, str, str]], tmp_path: Path) -> None:
    saving.run(f"{URL}/{CHECKPOINTS}", epochs=1)
    assert run_command("checkpoint", "gather", URL, "-o", tmp_path)[0] == 0
    assert saving.load(tmp_path / CHECKPOINTS) == (1, 0)
    assert run_command("checkpoint", "gather", tmp_path, "-o", "memory://copy")[0] == 0
    assert saving.load(f"memory://copy/{CHECKPOINTS}") == (1, 0)
    status, _, error = run_command("checkpoint", "gather", tmp_path, "-o", "memory://copy")
    assert (status, "exists already" in error) == (2, True)


def test_a_run_that_resumes_from_an_older_one_replaces_the_newer() -> None:
    old, new = saving.save(URL, epochs=2)
    saving.run(URL, epochs=2, resume=str(old))
    assert names() == [old.name, new.name, f"{new.name}.replaced"]
    assert saving.load(URL) == (2, 0)


def test_a_second_run_takes_the_folder() -> None:
    animal = zoo.make("mlp")
    with saving.pipeline(animal) as first:
        batches = first.train(animal.batches)
        next(batches)
        first.save(URL)
        saving.run(URL, epochs=2, resume=URL)
        next(batches)
        with pytest.raises(ArtifactError, match="another run has begun to write into the folder memory://bucket/run"):
            first.save(URL)
        for _ in batches:
            pass


def test_a_checkpoint_is_not_overwritten() -> None:
    saving.run(URL, epochs=1)
    with pytest.raises(ArtifactError, match="exists already"):
        saving.run(URL, epochs=1)


class Unreachable(fsspec.AbstractFileSystem):
    """A store whose network is gone; its error is no OSError, as those of some packages."""

    protocol = "unreachable"

    def info(self, path: str, **options: Any) -> Any:
        raise RuntimeError("no route to host")

    ls = info
    _open = info


def test_a_store_that_cannot_be_reached_is_no_empty_folder() -> None:
    fsspec.register_implementation("unreachable", Unreachable, clobber=True)
    for attempt, kind in ((saving.load, OSError), (saving.run, ArtifactError)):
        with pytest.raises(kind, match=r"unreachable://run.*no route to host.*credentials"):
            attempt("unreachable://run")


def test_urls_that_cannot_be_used_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ArtifactError, match=r"nothing://.*protocol"):
        any_path("nothing://bucket/run")
    monkeypatch.setitem(sys.modules, "s3fs", None)
    with pytest.raises(ArtifactError, match=r"pip install 'torch-pipedream\[s3\]'"):
        any_path("s3://bucket/run")
    with pytest.raises(ArtifactError, match="has lost a slash"):
        any_path(Path("s3://bucket/run"))
    assert any_path("C:/of/windows") == Path("C:/of/windows")


def test_paths() -> None:
    path = RemotePath("memory://a/b/")
    assert (str(path), path.name, str(path.parent), str(path / "c")) == (
        "memory://a/b",
        "b",
        "memory://a",
        "memory://a/b/c",
    )
    assert str(RemotePath("memory://a").parent) == "memory://"
    assert str(RemotePath("memory://") / "a") == "memory://a"
    assert path == RemotePath("memory://a/b")
    assert {path: 1}[RemotePath("memory://a") / "b"] == 1
    assert not path.exists()
    assert list(path.glob("*")) == []
    (path / "c").write_text("text")
    assert (path.is_dir(), path.is_file(), (path / "c").is_file()) == (True, False, True)
    assert ((path / "c").stat().st_size, (path / "c").read_text()) == (4, "text")
    with pytest.raises(FileNotFoundError):
        (path / "d").stat()
    path.remove_folder()
    path.remove_folder()
    assert not path.exists()


def train(folder: str, epochs: int, resume: bool) -> dict[str, Any]:
    """Trains on two processes."""
    return saving.run(folder, (1, 1), epochs, 2, folder if resume else None)


@pytest.mark.processes
@pytest.mark.slow
def test_several_processes(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/run"
    whole = processes.results(train, 2, str(tmp_path / "local"), 4, False)[0]
    processes.results(train, 2, url, 3, False)
    newest = tmp_path / "run" / folders.name_folder(15)
    assert sorted(path.name for path in newest.iterdir()) == [
        ".metadata",
        "__0_0.distcp",
        "__1_0.distcp",
        "checkpoint.json",
    ]
    losses = processes.results(train, 2, url, 4, True)[0]
    assert all(torch.equal(losses[name], whole[name]) for name in whole)
    assert names(url) == [folders.name_folder(15), folders.name_folder(20)]
    for failed in processes.launch(train, 2, "memory://of/one/process", 1, False):
        assert "rank 1 does not see what rank 0 has written" in str(failed.error)


def test_the_manifest_is_written_last(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    opened = RemotePath.open

    def recorded(self: RemotePath, mode: str) -> Any:
        if mode == "wb":
            order.append(self.name)
        return opened(self, mode)

    monkeypatch.setattr(RemotePath, "open", recorded)
    (path,) = saving.save(URL, epochs=1)
    assert order[-3:] == ["__0_0.distcp", ".metadata", folders.MANIFEST]
    assert json.loads((path / folders.MANIFEST).read_text())["minibatches"] == 5
