"""A plan or a checkpoint that names a method's Python file does not run it; only the user does, by naming it."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import pipedream as pd
from pipedream.core.errors import ScheduleError
from pipedream.schedules import registry
from pipedream.training.train import train_recipe

RunCommand = Callable[..., tuple[int, str, str]]

METHOD = """
from pathlib import Path
from pipedream.schedules import Method, build

Path(__file__).with_suffix(".ran").touch()

def mine(plan, microbatches=None):
    return build("gpipe", plan, microbatches)

METHODS = (Method(mine),)
"""

RECIPE = """
import torch
from torch import nn
import pipedream

def recipe():
    torch.manual_seed(0)
    data = [(torch.randn(4, 3), torch.randint(2, (4,))) for _ in range(4)]
    step = lambda named: torch.optim.SGD(named, lr=0.1)
    return pipedream.Recipe(model=nn.Linear(3, 2), loss=nn.CrossEntropyLoss(), optimizer=step, train=data)
"""


@pytest.fixture
def method(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Returns a method's file, in the working directory, that leaves a file beside itself when it is run."""
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "mine.py"
    path.write_text(f"{METHOD}\n# {tmp_path}")  # of each test alone: a file runs again only if its bytes have changed
    return path


def ran(method: Path) -> bool:
    return method.with_suffix(".ran").exists()


@pytest.mark.parametrize(
    ("command", "name"),
    [
        *(("simulate", name) for name in ("mine.py", "mine.py:mine", "mine.py[a=1]", "./mine.PY", " mine.py [a=1]")),
        *((command, "mine.py") for command in ("plan --check", "emulate", "show")),
    ],
)
def test_a_plan_in_a_command(command: str, name: str, method: Path, run_command: RunCommand) -> None:
    method.with_suffix(".PY").write_bytes(method.read_bytes())
    replace(pd.Plan.uniform(1), schedule=name).save("plan.json")
    status, out, error = run_command(*command.split(), "plan.json")
    assert (status, out) == (2, "")
    assert f"names the method {name!r}, a Python file" in error
    assert f"--schedule {name!r} on the command line" in error
    assert not ran(method)


def test_the_user_may_name_it(method: Path, run_command: RunCommand) -> None:
    replace(pd.Plan.uniform(2), schedule="mine.py", microbatches=4).save("plan.json")
    status, by_name, _ = run_command("simulate", "plan.json", "--schedule", "mine.py", "--json")
    assert (status, ran(method)) == (0, True)
    replace(pd.Plan.uniform(2), schedule="gpipe", microbatches=4).save("plan.json")
    assert run_command("simulate", "plan.json", "--json")[1] == by_name, "with the plan's microbatches"


def test_a_plan_in_python(method: Path) -> None:
    replace(pd.Plan.uniform(1), schedule="mine.py").save("plan.json")
    plan = pd.Plan.load("plan.json")
    options = {"loss": nn.CrossEntropyLoss(), "optimizer": torch.optim.SGD, "sample": torch.zeros(4, 3)}
    for verb in (pd.simulate, partial(pd.Pipeline, nn.Sequential(nn.Linear(3, 2)), **options)):
        with pytest.raises(ScheduleError, match=r"read the file and, if you trust it, .* schedule='mine.py' in Python"):
            verb(plan)


def test_train_with_a_plan(method: Path, refused: Callable[..., str]) -> None:
    Path("recipe.py").write_text(RECIPE)
    replace(pd.Plan.uniform(1), schedule="mine.py").save("plan.json")
    for more in ([], ["--schedule", "auto"]):
        assert "the plan 1 names the method 'mine.py', a Python file" in refused(
            "train", "recipe.py", "--plan", "plan.json", *more
        )
    assert not ran(method)


@pytest.mark.parametrize(
    "phases",
    [pytest.param(None, marks=pytest.mark.slow), [pd.Phase("gpipe", until=1), pd.Phase("mine.py")]],
    ids=["schedule", "phases"],
)
def test_train_from_a_checkpoint(
    phases: list[pd.Phase] | None, method: Path, run_command: RunCommand, refused: Callable[..., str]
) -> None:
    Path("recipe.py").write_text(RECIPE)
    arguments: dict[str, Any] = {}
    exec(RECIPE, arguments)
    options = {"schedule": None if phases else "mine.py", "phases": phases, "workers": 1, "minibatches": 2}
    train_recipe(lambda seed: arguments["recipe"](), out="run", quiet=True, **options)
    method.with_suffix(".ran").unlink()
    registry._run_file.cache_clear()
    assert "the checkpoint run/checkpoints/minibatch-00000002 names the method 'mine.py', a Python file" in refused(
        "train", "recipe.py", "--resume", "run"
    )
    assert "names the method 'mine.py', a Python file" in refused(
        "train", "recipe.py", "--resume", "run", "--schedule", "auto"
    )
    assert not ran(method)
    again = ("--phases", "gpipe:1,mine.py") if phases else ("--schedule", "mine.py")
    assert run_command("train", "recipe.py", "--resume", "run", *again)[0] == 0
