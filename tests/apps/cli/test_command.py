"""The command as a whole: what it loads, its help, its version, how it is started."""

import dataclasses
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import NoReturn
from unittest import mock

import processes
import pytest
import typer
from commands import Refused, Run

import pipedream as pd
from pipedream.apps import cli
from pipedream.apps.training.options import TrainingOptions
from pipedream.runtime.activity import Terminated


def test_commands_load_only_what_they_need(files: Path) -> None:
    """In one process, one after another: whatever the first of them loads, the others have loaded."""
    pd.Operators({"x": (4, 6), "y": (4,)}, "y[a] += x[a, b]").save("step.json")
    rows = [(command, ("torch", "numpy", "rich")) for command in ("--help", "--version")]
    for command in (
        *("train --help", "show", "show 1f1b", "plan profile.json --workers 2", "layout step.json --mesh m:2"),
        *("layout step.json --ranks 2", "simulate plan.json", "plan --check plan.json"),
        "sweep profile.json --workers 2 --schedule naive",
    ):
        rows.append((command, ("torch",)))
    program = (
        "import sys\n"
        "from pipedream.apps.cli import main\n"
        f"for arguments, absent in {rows!r}:\n"
        "    assert main(arguments.split()) == 0\n"
        "    assert not (loaded := sys.modules.keys() & {*absent}), (arguments, loaded)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def list_modules() -> set[str]:
    return set(sys.modules)


@pytest.mark.processes
def test_workers_load_only_what_they_need() -> None:
    """Their fork server has imported the pipeline."""
    (modules,) = processes.results(list_modules, 1)
    assert "pipedream.pipeline" in modules
    assert not modules & {f"torch.distributed.{name}" for name in ("checkpoint", "elastic", "launcher", "pipelining")}
    assert not modules & {"IPython", "fsspec", "matplotlib", "pandas", "rich.live", "scipy", "sklearn", "tensorboard"}
    assert not modules & {"pipedream.extensions.meshes.layouts.layer", "pipedream.apps.report"}


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_the_list_of_commands_has_the_first_line_of_their_help(name: str, run_command: Run) -> None:
    """And each option is described by a sentence."""
    summary = cli.COMMANDS[name]
    assert (cli.load(name).help or "").partition("\n")[0] == summary
    status, out, _ = run_command(name, "-h")
    assert (status, summary in out) == (0, True)
    assert f"  {name:<{max(map(len, cli.COMMANDS))}}  {summary}\n" in run_command("--help")[1], "in full"
    for param in cli.load(name).params:
        text = param.help or ""
        assert text.endswith("."), f"{param.name}: {text!r}"
        assert text[0].isupper() or text[0].isdigit(), f"{param.name}: {text!r}"
        assert not text.startswith("Of "), f"{param.name}: {text!r}"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("plan mine.py --workers 2", "measure one first: pipedream profile mine.py -o mine.profile.json"),
        ("plan profile.json", "the number of workers is missing; give --workers N"),
        ("plan profile.json --workers 9 --straight", "ask for at most 6 stages"),
        ("simulate none.json", "none.json does not exist; give the file of a Plan"),
        ("simulate profile.json", "should hold a Plan, but holds 'Profile'"),
        ("simulate plan.json --svg out.gif", "write name.svg, .pdf or .png"),
        ("simulate", "give a plan's file or --uniform P"),
        ("plan --check mine.py", "so it is not a Plan; give the right file"),
        ("show 1fb1", "; did you mean 1f1b?"),
        ("train none.py", "the recipe none.py does not exist"),
        ("train imports.py --workers 1", "No module named 'nothing_of_that_name' (at imports.py:1"),
        ("train plan.json --workers 2", "the recipe plan.json is not a Python file; give one that ends in .py"),
        ("train wrong.py --workers 2", "does not import: SyntaxError: '(' was never closed (wrong.py, line 1)"),
        ("checkpoint verify nowhere", "there is no complete checkpoint in nowhere"),
    ],
)
def test_first_mistakes(files: Path, arguments: str, message: str, refused: Refused) -> None:
    Path("mine.py").write_text("def recipe(): ...", encoding="utf-8")
    Path("wrong.py").write_text("def recipe(", encoding="utf-8")
    Path("imports.py").write_text("import nothing_of_that_name\n", encoding="utf-8")
    error = refused(*arguments.split())
    assert message in error
    assert error.startswith("pipedream: ")
    assert error.count("\n") == 1, "one line"


def test_train_has_a_flag_for_each_training_option() -> None:
    """Of the others it takes flags of shape, --memory, or --json."""
    flags = {param.name for param in cli.load("train").params}
    assert {field.name for field in dataclasses.fields(TrainingOptions)} - flags == {"shape", "memory_bytes", "quiet"}


@pytest.mark.parametrize(("error", "status"), [(KeyboardInterrupt, 130), (Terminated, 143), (MemoryError, 1)])
def test_the_status_of_an_interrupt(error: type[BaseException], status: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "load", mock.Mock(side_effect=error))
    assert cli.main(["show"]) == status


@pytest.mark.parametrize("local_rank", ["0", "1"])
def test_each_machine_prints_what_it_lacks(
    local_rank: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    variables = {"TORCHELASTIC_ERROR_FILE": str(tmp_path / "error.json"), "RANK": "3", "LOCAL_RANK": local_rank}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert cli.main(["simulate", "nothing.json"]) == 2
    assert ("nothing.json does not exist" in capsys.readouterr().err) == (local_rank == "0")


def test_a_misspelt_command_is_corrected(refused: Refused) -> None:
    assert "No such command 'simulat'. Did you mean 'simulate'" in refused("simulat")


def test_it_is_also_a_module(run_command: Run) -> None:
    assert run_command("--version") == (0, f"pipedream {pd.__version__}\n", "")
    done = subprocess.run([sys.executable, "-m", "pipedream", "--version"], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, f"pipedream {pd.__version__}\n")


def test_the_shell_completes_commands() -> None:
    words = {"_PIPEDREAM_COMPLETE": "complete_bash", "COMP_WORDS": "pipedream s", "COMP_CWORD": "1"}
    program = "from pipedream.apps.cli import script; script()"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=words)
    assert done.stdout.split() == ["sweep", "simulate", "show"], done.stderr


@pytest.mark.parametrize("out", ["folder", "plan.json/file", "x" * 300, "/proc/file"])
@pytest.mark.parametrize("command", ["plan profile.json --workers 2 -o", "show 1f1b --svg", "show 1f1b --csv"])
def test_what_cannot_be_written_is_one_message(command: str, out: str, files: Path, refused: Refused) -> None:
    Path("folder").mkdir()
    error = refused(*command.split(), out)
    assert (error.count("\n"), out in error) == (1, True), error
    assert not [*files.rglob(".*")], "nothing half written is left"


@pytest.mark.parametrize(("command", "to"), [("show", "a pipe that nobody reads"), ("--version", "/dev/full")])
def test_output_that_nobody_takes(command: str, to: str) -> None:
    program = f"import sys; from pipedream.apps.cli import script; sys.argv = ['pipedream', {command!r}]; script()"
    shell = f"'{sys.executable}' -c \"{program}\" " + (f"> {to}" if to[0] == "/" else "| true; exit ${PIPESTATUS[0]}")
    done = subprocess.run(["bash", "-c", shell], capture_output=True, text=True)
    assert done.stderr == ("pipedream: cannot write to /dev/full: No space left on device\n" if to[0] == "/" else "")
    assert done.returncode == 1 or (done.returncode == 141 and to[0] != "/")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--workers 2 --schedule chimera", "--elastic may leave 1 worker, "),
        ("--workers 4 --schedule chimera --min-workers 4", ""),
        ("--workers 3 --schedule interleaved", ""),
        ("--workers 3 --phases 1f1b:10,chimera", "--elastic may leave 1 worker, "),
        ("--plan chimera.json", "--elastic may leave 1 worker, "),
        ("--plan code.json", "the plan names the method 'code.py'"),
    ],
)
def test_elastic_runs_need_a_method_for_fewer_workers(
    options: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run_command: Run
) -> None:
    for name in ("TORCHELASTIC_RUN_ID", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    started: list[int] = []

    def start_workers(count: int, *modules: str, **rest: object) -> NoReturn:
        started.append(count)
        raise typer.Exit(0)

    monkeypatch.setattr("pipedream.apps.cli.train.start_workers", start_workers)
    monkeypatch.chdir(tmp_path)
    Path("recipe.py").touch()
    Path("code.py").write_text("raise AssertionError('a plan is data')")
    replace(pd.schedules.uniform("chimera", 2), schedule="chimera").save("chimera.json")
    replace(pd.schedules.uniform("1f1b", 2), schedule="code.py").save("code.json")
    status, _, error = run_command("train", "recipe.py", "--elastic", *options.split())
    assert (status, len(started)) == ((2, 0) if message else (0, 1))
    assert message in error if message else not error


def test_many_more_workers_than_cores_are_warned_of(monkeypatch: pytest.MonkeyPatch, run_command: Run) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0})
    for name in ("launch", "import_for_workers"):
        monkeypatch.setattr(f"pipedream.services.failure.launch.{name}", lambda *_, **__: 0)
    for count, words in ((8, ""), (9, "pipedream: 9 workers take turns on 1 core, each with memory for torch; give ")):
        assert run_command("train", __file__, "--workers", count)[2].partition("fewer")[0] == words


def test_elastic_runs_check_all_phases(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: Refused) -> None:
    monkeypatch.chdir(tmp_path)
    model = "torch.nn.Linear(1, 1), loss=None, train=[], optimizer=torch.optim.SGD"
    Path("recipe.py").write_text(
        f"import torch, pipedream\ndef recipe(): return pipedream.Recipe(model={model}, phases='chimera:10,1f1b')\n"
    )
    saved = SimpleNamespace(phases="1f1b:10,chimera", schedule="1f1b", plan=pd.schedules.uniform("1f1b", 2))
    checkpoint = SimpleNamespace(path="run", manifest=saved)
    monkeypatch.setattr(
        "pipedream.apps.training.train.train_recipe", lambda make, **_: make(0)
    )  # imports find_resume_point
    monkeypatch.setattr("pipedream.apps.training.run_folder.find_resume_point", lambda *_: checkpoint)
    for name in ("TORCHELASTIC_RUN_ID", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    message = "--elastic may leave 1 worker, with which 'chimera' does not work"
    assert message in refused("train", "recipe.py", "--elastic", "--resume", "run")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert message in refused("train", "recipe.py", "--elastic")
