"""Run folders that cannot be written or read: one message, and no traceback."""

import json
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import sha256
from html import escape
from pathlib import Path

import pytest
import torch
from commands import Run

import pipedream as pd
from pipedream.services.weights.files import save_weights
from tests.apps.cli.test_data_runs_no_code import RECIPE


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Returns a recipe in the working directory, beside a plan and a file that is no folder."""
    monkeypatch.chdir(tmp_path)
    pd.Plan.uniform(1).save("plan.json")
    Path("file").touch()
    path = tmp_path / "recipe.py"
    path.write_text(RECIPE)
    return path


@contextmanager
def files_up_to(size_bytes: int) -> Iterator[None]:
    """As on a full disk, no file can grow beyond a size."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize(
    ("out", "words"),
    [
        ("file", "cannot write into the folder file: [Errno 17] File exists: 'file'; choose another one"),
        ("file/run", "Not a directory: 'file/run'"),
        ("x" * 300, "File name too long"),
        ("/proc/run", "cannot write into the folder /proc/run"),
    ],
)
def test_a_folder_that_cannot_be_written(out: str, words: str, recipe: Path, run_command: Run) -> None:
    for command in (("train", recipe, "--workers", 1), ("emulate", "plan.json")):
        status, trained, error = run_command(*command, "--out", out, "--json")
        assert (status, trained) == (2, "")
        assert (len(error.splitlines()), words in error) == (1, True), error


@pytest.mark.parametrize(
    ("size_bytes", "status", "words"),
    [
        (1000, 2, "pipedream: cannot write run/plan.json: File too large; free space, or choose a place with more"),
        (20_000, 1, "pipedream: rank 0, writing the run folder: cannot write run/report.html: File too large"),
    ],
)
def test_a_full_disk(size_bytes: int, status: int, words: str, recipe: Path, run_command: Run) -> None:
    with files_up_to(size_bytes):
        exit_status, _, error = run_command("train", recipe, "--workers", 1, "--checkpoint-every", 0, "--out", "run")
    assert (exit_status, len(error.splitlines()), words in error) == (status, 1, True), error
    assert not [*Path("run").glob(".*")], "nothing half written is left"
    assert (status == 1) == Path("run/weights.pt").exists(), "the weights are written first"


COMMANDS = {"/venv/bin/pipedream": "pipedream", "/site/pipedream/__main__.py": "pipedream"}  # a worker, or by torchrun


@pytest.mark.parametrize(("program", "shown"), [*COMMANDS.items(), ("my script.py", "python 'my script.py'")])
def test_a_run_names_its_command(
    program: str, shown: str, recipe: Path, run_command: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ("train", str(recipe), "--workers", "1", "--epochs", "1", "--checkpoint-every", "0", "--out", "run")
    monkeypatch.setattr("sys.argv", [program, *arguments])
    assert run_command(*arguments)[0] == 0
    summary, page = json.loads(Path("run/summary.json").read_text()), Path("run/report.html").read_text()
    assert summary["command"] == " ".join([shown, *arguments])
    digest = sha256(recipe.read_bytes()).hexdigest()[:12]
    assert escape(summary["command"]) in page
    assert f"recipe sha256 {digest}" in page


def test_a_full_disk_after_a_checkpoint(recipe: Path, run_command: Run) -> None:
    command = ("train", recipe, "--workers", 1)
    assert run_command(*command, "--out", "run")[0] == 0
    Path("run/report.html").unlink()
    Path("run/report.html").mkdir()
    status, _, error = run_command(*command, "--resume", "run")
    assert status == 1
    assert "rank 0, writing the run folder: cannot write run/report.html: Is a directory" in error
    assert "run/checkpoints/minibatch-00000004 is complete: with --resume run only what is missing is done" in error
    Path("run/report.html").rmdir()
    assert run_command(*command, "--resume", "run")[0] == 0
    assert Path("run/report.html").is_file()


def test_weights_on_a_full_disk(tmp_path: Path) -> None:
    path = tmp_path / "weights.pt"
    save_weights(path, {"first": torch.ones(2)})
    full = pytest.raises(pd.PipelineError, match=r"cannot write .*weights.pt: File too large; free space")
    with files_up_to(4096), full:
        save_weights(path, {"first": torch.ones(100_000)})
    assert torch.load(path)["first"].tolist() == [1.0, 1.0], "the file before is whole"
    assert [*tmp_path.iterdir()] == [path]
