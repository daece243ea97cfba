"""Checkpoints at URLs: as exact as those on disk, and whole wherever a save is killed."""

import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import fsspec
import processes
import pytest
import torch
import torch.distributed.checkpoint as dcp
import zoo
from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader

import pipedream as pd
from pipedream.services.checkpoint import folders, pieces, stores
from tests.services.checkpoint import saving


@pytest.fixture
def url(tmp_path: Path) -> str:
    """A folder of a store that is empty."""
    return f"memory://{tmp_path.name}/run"


def test_a_run_continues_exactly(url: str, tmp_path: Path) -> None:
    whole = saving.run(tmp_path, epochs=4)
    saving.run(url, epochs=2)
    state = saving.run(url, epochs=4, resume=url)
    assert all(torch.equal(state[name], whole[name]) for name in whole)
    assert saving.names(url) == saving.names(tmp_path)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_torchs_reader_reads_it(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pieces, "_PIECE_BYTES", 512)
    (path,) = saving.save(url, (2, 1), epochs=1)
    with saving.pipeline(zoo.make("mlp"), (2, 1)) as trained:
        trained.load(url)
        expected = {f"model/{name}": tensor for name, tensor in trained.state_dict().items()}
    tensors = {name: torch.zeros_like(tensor) for name, tensor in expected.items()}
    dcp.load(tensors, storage_reader=FsspecReader(str(path)), no_dist=True)
    assert all(torch.equal(tensors[name], expected[name]) for name in expected)


def limited(operation: Callable[..., Any], budget: Iterator[int]) -> Callable[..., Any]:
    """Returns an operation of a store that fails once the budget, which it shares with others, is spent."""

    def call(*args: Any, **options: Any) -> Any:
        if next(budget, None) is None:
            raise ConnectionResetError("killed")
        return operation(*args, **options)

    return call


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.* but has no checkpoint.json")
def test_a_killed_save_leaves_the_checkpoint_before(url: str) -> None:
    """Killed after any of the store's operations, the folder resumes from a checkpoint that is whole."""
    saving.run(url, epochs=1)
    assert len(saving.names(f"{url}/minibatch-00000005")) == 3
    files = type(fsspec.filesystem("memory"))
    position, allowed = (1, 0), 0
    while position != (2, 0):
        budget = iter(range(allowed))
        with pytest.MonkeyPatch.context() as patch, suppress(pd.PipelineError, OSError):
            for name in ("open", "rm", "rm_file"):
                patch.setattr(files, name, limited(getattr(files, name), budget))
            saving.run(url, epochs=2, keep=1, resume=url)
        position = saving.load(url)
        assert position in ((1, 0), (2, 0)), allowed
        for checkpoint in folders.list_checkpoints(url):
            pieces.verify_checkpoint(checkpoint)
        allowed += 1
    assert allowed > 5


def test_gather_copies_between_disk_and_store(
    run_command: Callable[..., tuple[int, str, str]], refused: Callable[..., str], url: str, tmp_path: Path
) -> None:
    saving.run(f"{url}/checkpoints", epochs=1)
    assert run_command("checkpoint", "gather", url, "-o", tmp_path)[0] == 0
    assert saving.load(tmp_path / "checkpoints") == (1, 0)
    assert run_command("checkpoint", "gather", tmp_path, "-o", f"{url}/copy")[0] == 0
    assert saving.load(f"{url}/copy/checkpoints") == (1, 0)
    assert "exists already" in refused("checkpoint", "gather", tmp_path, "-o", f"{url}/copy")


def test_a_second_run_takes_the_folder(url: str) -> None:
    animal = zoo.make("mlp")
    with saving.pipeline(animal) as first:
        batches = first.train(animal.batches)
        next(batches)
        first.save(url)
        saving.run(url, epochs=2, resume=url)
        next(batches)
        with pytest.raises(pd.PipelineError, match=f"another run has begun to write into the folder {url}"):
            first.save(url)
        list(batches)


class Unreachable(fsspec.AbstractFileSystem):
    """A store whose network is gone; its error is no OSError, as those of some packages."""

    protocol = "unreachable"

    def info(self, path: str, **options: Any) -> Any:
        raise RuntimeError("no route to host")

    ls = info
    _open = info


@pytest.mark.parametrize(("attempt", "kind"), [(saving.load, OSError), (saving.run, pd.PipelineError)])
def test_a_store_that_cannot_be_reached_is_no_empty_folder(attempt: Callable[[str], Any], kind: Any) -> None:
    fsspec.register_implementation("unreachable", Unreachable, clobber=True)
    with pytest.raises(kind, match=r"unreachable://run.*no route to host.*credentials"):
        attempt("unreachable://run")


@pytest.mark.parametrize(
    ("folder", "words"),
    [
        ("nothing://bucket/run", r"nothing://.*protocol"),
        ("s3://bucket/run", r"pip install 'torch-pipedream\[s3\]'"),
        (Path("s3://bucket/run"), "has lost a slash"),
    ],
)
def test_urls_that_cannot_be_used_are_refused(folder: str | Path, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "s3fs", None)
    with pytest.raises(pd.PipelineError, match=words):
        stores.open_store(folder)


def train(folder: str, epochs: int, resume: bool) -> dict[str, Any]:
    return saving.run(folder, (1, 1), epochs, 2, folder if resume else None)


@pytest.mark.processes
@pytest.mark.slow
def test_several_processes(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/run"
    whole = processes.results(train, 2, str(tmp_path / "local"), 4, False)[0]
    processes.results(train, 2, url, 3, False)
    written = [".metadata", "__0_0.distcp", "__1_0.distcp", "checkpoint.json"]
    assert saving.names(tmp_path / "run" / "minibatch-00000015") == written
    state = processes.results(train, 2, url, 4, True)[0]
    assert all(torch.equal(state[name], whole[name]) for name in whole)
    assert saving.names(url) == ["minibatch-00000015", "minibatch-00000020"]
    for failed in processes.launch(train, 2, "memory://of/one/process", 1, False):
        assert "rank 1 does not see what rank 0 has written" in str(failed.error)
