"""CONTRIBUTING.md's sections on a new schedule, encoding and others, followed step by step with the files they show."""

import os
import re
import shlex
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from marks import slow, spread
from torch import nn
from torch.nn import functional as F
from training import assert_equal, batches, loop, mse, piped

import pipedream as pd
from pipedream.apps import cli
from pipedream.services.checkpoint.stores import open_store
from pipedream.services.checkpoint.stores.store import CheckpointStore
from tests.services.checkpoint import saving

ROOT = Path(__file__).parents[2]
SCHEDULE = "A new schedule"


def steps(section: str = SCHEDULE) -> str:
    return (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").split(f"## {section}\n")[1].split("\n## ")[0]


def blocks(language: str, section: str = SCHEDULE) -> list[str]:
    """Returns the fenced blocks of a language within a section's steps, where they are indented."""
    texts = re.findall(rf"^ *```{language}\n(.*?)^ *```$", steps(section), re.M | re.S)
    return [textwrap.dedent(block) for block in texts]


def commands(block: str) -> list[list[str]]:
    return [shlex.split(line)[1:] for line in block.splitlines()]


def move_to_a_copy(file: Path, place: str, section: str = SCHEDULE) -> Path:
    """Moves the file to the folder of this pattern that the steps name, in a copy of the sources; returns the copy."""
    (folder,) = re.findall(f"`({place})`", steps(section))
    copy = file.parent / "copy" / "src"
    shutil.copytree(ROOT / "src", copy, ignore=shutil.ignore_patterns("__pycache__"))
    file.rename(copy.parent / folder / file.name)
    return copy


FILES = {
    "A new instruction": "barrier.py",
    "A new encoding of messages": "cut.py",
    "A new way for replicas to agree": "scaled.py",
    "A new compensation of delay": "fading.py",
}
"""Section -> the file that it shows."""


def write_file(section: str) -> str:
    """Step 1: the file, in the working directory. Returns the check of step 2."""
    assert f"Write the file `{FILES[section]}`" in steps(section)
    text, check = blocks("python", section)
    Path(FILES[section]).write_text(text, encoding="utf-8")
    return check


@pytest.mark.parametrize("section", [slow(s, id=s) if s == "A new instruction" else s for s in FILES])
def test_what_a_file_adds_is_checked(section: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    exec(compile(write_file(section), "step 2", "exec"), {})


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize("section", spread(map(slow, FILES), every=6))
def test_what_a_file_adds_is_trained_with(section: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_file(section)
    ((_, recipe, *options),) = commands(blocks("sh", section)[0])
    train = [sys.executable, "-m", "pipedream", "train", str(ROOT / recipe), "--minibatches", "3"]
    assert subprocess.run([*train, *options, "--out", "run"]).returncode == 0
    resumed = subprocess.run([*train, "--resume", "run"], capture_output=True, text=True)
    assert resumed.returncode, "a checkpoint alone runs no file"
    assert f"'{FILES[section]}" in resumed.stderr


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Step 1: the file, in a folder that becomes the working directory."""
    (path := tmp_path / "last_first.py").write_text(blocks("python")[0], encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    return path


def test_step_2_runs_the_file_where_it_is(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shown, simulated, trained = commands(blocks("sh")[0])
    assert cli.main(shown) == 0
    printed = capsys.readouterr().out
    (grid,) = re.findall(r"^ *rank 0 .*\n *rank 1 .*$", file.read_text(encoding="utf-8"), re.M)
    drawn = [line.rstrip() for line in printed.splitlines()[1:3]]
    assert drawn == textwrap.dedent(grid).splitlines(), "the docstring draws what is run"
    assert "no deadlock" in printed
    assert cli.main(simulated) == 0
    assert "bubble 27.3%" in capsys.readouterr().out  # (p - 1) / (m + p - 1)
    assert [trained[0], *trained[-2:]] == ["train", "--schedule", file.name]


def test_step_2_trains_as_one_process_does(file: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 4)).double()
    trained = piped(model, mse, batches(5, 12), cuts=(2,), schedule=str(file), microbatches=3)
    assert_equal(trained, loop(model, batches(5, 12), loss=F.mse_loss).state)


@pytest.mark.slow
def test_steps_3_and_4_give_it_a_name_and_a_picture(file: Path) -> None:
    """In a copy of the package, with the file moved to the folder that step 3 names."""
    copy = move_to_a_copy(file, "src/pipedream/schedules/synchronous/")
    program = f"""
import importlib.util, sys
sys.path.insert(0, {str(copy)!r})
from pipedream import schedules
from pipedream.apps import cli
for command in {commands(blocks("sh")[1])!r}:
    assert cli.main(command) == 0, command
spec = importlib.util.spec_from_file_location("make_docs", {str(ROOT / "scripts" / "make_docs.py")!r})
make_docs = sys.modules["make_docs"] = importlib.util.module_from_spec(spec)  # its dataclasses look it up
spec.loader.exec_module(make_docs)
make_docs.SCHEDULES, make_docs.COMPENSATED = {{"last_first": schedules.SCHEDULES["last_first"]}}, {{}}
for path, text in make_docs.make_pages().items():
    print(path.name, text)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=file.parent)
    assert done.returncode == 0, done.stderr
    listed = next(line.split() for line in done.stdout.splitlines() if line.startswith("last_first "))
    assert listed[:8] == ["last_first", "yes", "8", "0.273", "8", "8", "8", "8"]
    assert (file.parent / "last_first.svg").read_text(encoding="utf-8").startswith("<svg")
    assert "last_first.svg <svg" in done.stdout
    assert "| bubble, over one minibatch | 0.2727 | 0.2727 |" in done.stdout
    assert "It shows what a method's file contains." in done.stdout


@pytest.mark.slow
def test_a_part_is_one_file_in_a_folder(tmp_path: Path) -> None:
    text, check = blocks("python", "A new part of a stage")
    (folder := tmp_path / "clamped").mkdir()
    for name, content in (("__init__.py", ""), ("parts.py", text)):
        (folder / name).write_text(content, encoding="utf-8")
    subprocess.run([sys.executable, "-c", check], check=True, cwd=tmp_path)


@pytest.mark.slow
def test_a_choice_is_one_file_in_its_folder(tmp_path: Path) -> None:
    """In a copy of the package: it is an option, saves memory, is suggested, and is kept with the plan."""
    section = "A new choice of a plan"
    (path := tmp_path / "packing.py").write_text(blocks("python", section)[0], encoding="utf-8")
    program = """
import pipedream as pd
from pipedream.apps import cli
profile = pd.Profile.of_chain((pd.LayerProfile(1.0, 2.0, 10, 1000, 100_000),) * 4)
plan, packed = (pd.plan(profile, cluster=pd.Cluster.flat(2), cuts=(2,), packing=how) for how in ("none", "half"))
assert (read := pd.Plan.from_json(packed.to_json())) == packed and read.choices.words == {"packing": "half"}
assert [made.stages[0].backward_s for made in (plan, packed, plan.choosing(packing="half"))] == [4.0, 5.0, 5.0]
try:
    pd.plan(profile, cluster=pd.Cluster.flat(2, memory_bytes=packed.stages[0].peak_bytes), cuts=(2,))
    raise SystemExit("it should not fit")
except pd.PipelineError as error:
    assert "--packing half saves" in str(error)
profile.save("digits.profile.json")
"""
    program += f"assert cli.main({commands(blocks('sh', section)[0])[0]}) == 0"
    environment = os.environ | {"PYTHONPATH": str(move_to_a_copy(path, r"src/pipedream/\S+/choices/", section))}
    subprocess.run([sys.executable, "-c", program], check=True, env=environment, cwd=tmp_path)


STORE = "A new checkpoint store"


@pytest.fixture
def database(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Step 1: the file, in a folder that becomes the working directory."""
    (path := tmp_path / "database.py").write_text(blocks("python", STORE)[0], encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(CheckpointStore, "kinds", [*CheckpointStore.kinds])
    monkeypatch.delitem(sys.modules, "database", raising=False)
    return path


def test_a_store_keeps_checkpoints_where_it_is_imported(database: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Step 2: they are whole, pruned, resumed from exactly, set aside by a run that goes back, and never shared."""
    whole = saving.run("folder", epochs=3)
    names = {
        "pd": pd,
        "model": nn.Sequential(nn.Linear(4, 4)),
        "plan": pd.Plan.uniform(1, 1.0, 1.0, 0.0),
        "options": {"loss": F.mse_loss, "optimizer": torch.optim.SGD, "sample": torch.ones(2, 4)},
        "batches": [(torch.ones(2, 4), torch.ones(2, 4))] * 5,
    }
    exec(blocks("python", STORE)[1], names)
    assert saving.names("run.sqlite") == ["minibatch-00000010"]
    assert Path("run.sqlite").is_file(), "and no folder"
    saving.run("other.sqlite", epochs=2)
    state = saving.run("other.sqlite", epochs=3, resume="other.sqlite")
    assert all(torch.equal(state[name], whole[name]) for name in whole)
    assert cli.main(["checkpoint", "verify", "other.sqlite"]) == 0
    assert capsys.readouterr().out.count("intact") == 3
    saving.run("other.sqlite", epochs=2, resume="other.sqlite/minibatch-00000005")
    assert saving.names("other.sqlite")[-1] == "minibatch-00000015.replaced"
    assert saving.load("other.sqlite") == (2, 0)
    files = sorted(path.name for path in database.parent.iterdir() if path.name != "__pycache__")
    assert files == ["database.py", "folder", "other.sqlite", "run.sqlite"]
    local = [str(open_store(f"{where}run.sqlite").choose_local_folder()) for where in ("", "/a/", "../")]
    assert local == ["runs/run.sqlite", "runs/a/run.sqlite", "runs/run.sqlite"]


@pytest.mark.long
@pytest.mark.processes
def test_a_store_is_found_in_its_folder(database: Path) -> None:
    """Step 3, in a copy of the package."""
    environment = os.environ | {"PYTHONPATH": str(move_to_a_copy(database, r"src/pipedream/\S+/stores/", STORE))}
    (database.parent / "examples").symlink_to(ROOT / "examples")
    for command in commands(blocks("sh", STORE)[0]):
        program = [sys.executable, "-m", "pipedream", *command]
        done = subprocess.run(program, capture_output=True, text=True, cwd=database.parent, env=environment)
        assert done.returncode == 0, done.stderr
    assert "resum" in done.stdout
