"""A plan or a checkpoint that names a method's Python file does not run it; only the user does, by naming it."""

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import Answer, Refused, Run
from marks import slow
from torch import nn

import pipedream as pd
from pipedream.core.artifact import decode
from pipedream.core.door import _run_bytes
from pipedream.core.schedule.delay_compensation import Compensation
from pipedream.services.phases.phases import read_phases

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
NAMED = "names the method 'mine.py', a Python file"


@pytest.fixture
def method(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Returns a method's file that leaves a file beside itself when it is run; with a recipe, and a plan by it."""
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "mine.py"
    path.write_text(f"{METHOD}\n# {tmp_path}")  # of each test alone: a file runs again only if its bytes have changed
    Path("recipe.py").write_text(RECIPE)
    replace(pd.Plan.uniform(1), schedule="mine.py").save("plan.json")
    return path


def ran(method: Path) -> bool:
    return method.with_suffix(".ran").exists()


@pytest.mark.parametrize(
    ("command", "name"),
    [
        *(("simulate", name) for name in ("mine.py", "mine.py:mine", "mine.py[a=1]", "./mine.PY", " mine.py [a=1]")),
        *((command, "mine.py") for command in ("plan --check", "emulate", "show", "train recipe.py --plan")),
        ("train recipe.py --schedule auto --plan", "mine.py"),
    ],
)
def test_a_plan_in_a_command(command: str, name: str, method: Path, refused: Refused) -> None:
    method.with_suffix(".PY").write_bytes(method.read_bytes())
    replace(pd.Plan.uniform(1), schedule=name).save("plan.json")
    error = refused(*command.split(), "plan.json")
    assert f"names the method {name!r}, a Python file" in error
    assert f"--schedule {name!r} on the command line" in error
    assert not ran(method)


def test_the_user_may_name_it(method: Path, answer: Answer) -> None:
    replace(pd.Plan.uniform(2), schedule="mine.py", microbatches=4).save("plan.json")
    by_name = answer("simulate", "plan.json", "--schedule", "mine.py")
    assert ran(method)
    replace(pd.Plan.uniform(2), schedule="gpipe", microbatches=4).save("plan.json")
    assert answer("simulate", "plan.json") == by_name, "with the plan's microbatches"


@pytest.mark.parametrize(
    "texts", [{"messages": {"activations": "mine.py"}}, {"messages": "mine.py"}, {"sums": "mine.py:4"}]
)
def test_a_choice_of_a_plan(texts: dict[str, Any], method: Path, refused: Refused) -> None:
    data = json.loads(pd.Plan.uniform(2, replicas=(2, 1)).to_json())
    Path("plan.json").write_text(json.dumps(data | texts))
    assert "'mine.py' is a Python file, which is not run because a plan or" in refused("simulate", "plan.json")
    with pytest.raises(pd.PipelineError, match="name it yourself"):
        pd.Plan.load("plan.json").choosing(activations="host")
    assert not ran(method)


def test_a_compensation_of_a_checkpoint(method: Path) -> None:
    saved = {"compensation": "mine.py"}
    for read in (partial(read_phases, "pipedream+mine.py"), partial(decode, Compensation, saved, "the checkpoint")):
        with pytest.raises(pd.PipelineError, match=r"'mine\.py' is a Python file, which is not run because"):
            read()
    assert not ran(method)


def test_a_plan_in_python(method: Path) -> None:
    options = {"loss": nn.CrossEntropyLoss(), "optimizer": torch.optim.SGD, "sample": torch.zeros(4, 3)}
    for verb in (pd.simulate, partial(pd.Pipeline, nn.Sequential(nn.Linear(3, 2)), **options)):
        with pytest.raises(pd.PipelineError, match=r"read the file and, if you trust it, .* schedule='mine.py' in Pyt"):
            verb(pd.Plan.load("plan.json"))


@pytest.mark.parametrize(
    "phases", [slow(None), [pd.Phase("gpipe", until=1), pd.Phase("mine.py")]], ids=["schedule", "phases"]
)
def test_train_from_a_checkpoint(phases: Any, method: Path, run_command: Run, refused: Refused) -> None:
    space: dict[str, Any] = {}
    exec(RECIPE, space)
    options: dict[str, Any] = {"schedule": None if phases else "mine.py", "phases": phases, "workers": 1}
    pd.run(space["recipe"], out="run", quiet=True, minibatches=2, **options)
    method.with_suffix(".ran").unlink()
    _run_bytes.cache_clear()
    resume = ("train", "recipe.py", "--resume", "run")
    assert f"the checkpoint run/checkpoints/minibatch-00000002 {NAMED}" in refused(*resume)
    assert NAMED in refused(*resume, "--schedule", "auto")
    assert not ran(method)
    again = ("--phases", "gpipe:1,mine.py") if phases else ("--schedule", "mine.py")
    assert run_command(*resume, *again)[0] == 0
