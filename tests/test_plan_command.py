"""What is asked for, on the command line and of `pipedream.plan`: shapes, cuts, depth, lag."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import pipedream as pd
from pipedream import cli
from pipedream.api import versions_of
from pipedream.core.errors import PlanError
from pipedream.core.profile import LayerProfile
from pipedream.recipe import Recipe

LAYER = LayerProfile(1.0, 2.0, output_bytes=1000, parameter_bytes=1000, activation_bytes=100)


@pytest.fixture
def profile(tmp_path: Path) -> str:
    pd.Profile.of_chain((LAYER,) * 6).save(tmp_path / "profile.json")
    return str(tmp_path / "profile.json")


def asked(capfd: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    """Returns the one object that a command prints with --json."""
    assert cli.main(["plan", *arguments, "--json"]) == 0
    found = json.loads(capfd.readouterr().out)
    assert isinstance(found, dict)
    return found


def refused(capfd: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert cli.main([*arguments]) == 2
    return " ".join(capfd.readouterr().err.split())


@pytest.mark.parametrize(
    ("options", "config"),
    [
        (["--straight"], "1-1-1"),
        (["--data-parallel"], "3"),
        (["--config", "2-1"], "2-1"),
        (["--config", "1-1"], "1-1"),
        ([], "1-1-1"),
    ],
)
def test_shapes(profile: str, capfd: pytest.CaptureFixture[str], options: list[str], config: str) -> None:
    found = asked(capfd, profile, "--workers", "3", "--bandwidth", "500", *options)
    assert found["config"] == config
    assert [row["replicas"] for row in found["stages"]] == [int(part) for part in config.split("-")]


def test_cuts_by_hand(profile: str, capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    out = str(tmp_path / "plan.json")
    found = asked(capfd, profile, "--workers", "4", "--config", "2-1-1", "--cuts", "2,layer5", "--lag", "1", "-o", out)
    assert (found["config"], [row["first"] for row in found["stages"]]) == ("2-1-1", [0, 2, 5])
    assert (found["lag"], found["note"]) == ([1, 0, 0], "cut by hand")
    plan = pd.Plan.load(out)
    assert plan.lag == (1, 0, 0)
    assert plan == pd.plan(pd.Profile.load(profile), pd.Cluster.flat(4), shape="2-1-1", cuts=(2, "layer5"), lag=1)
    assert asked(capfd, profile, "--workers", "2", "--cuts", "4")["config"] == "1-1"
    assert cli.main(["simulate", out, "--schedule", "pipedream", "--microbatches", "8"]) == 0


def test_depth_auto(profile: str, capfd: pytest.CaptureFixture[str]) -> None:
    command = (profile, "--workers", "2", "--bandwidth", "100", "--straight")
    full = asked(capfd, *command, "--in-flight", "full")
    assert asked(capfd, *command, "--in-flight", "auto")["in_flight"] == full["in_flight"]
    limit = ("--memory", str(full["stages"][0]["peak_bytes"] - 1))
    between = asked(capfd, *command, "--in-flight", "auto", *limit)["in_flight"]
    noam = asked(capfd, *command, *limit)["in_flight"]
    assert noam < between < full["in_flight"]
    assert "ask for --in-flight auto" in refused(capfd, "plan", *command, "--in-flight", "full", *limit)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--straight", "--config", "2-1"], "--straight and --config exclude each other; give one or none"),
        (["--data-parallel", "--cuts", "2"], "--cuts already says the stages"),
        (["--config", "2+1"], "shape '2+1' is not known"),
        (["--config", "2-2"], "it takes 4 workers, the cluster has 3"),
        (["--config", "2-1", "--cuts", "1,2"], "name 2 stages, cuts (1, 2) make 3"),
        (["--in-flight", "deep"], "write noam, full, auto or counts as in 3,2,1"),
        (["--lag", "2"], "Invalid value"),
    ],
)
def test_refusals(profile: str, capfd: pytest.CaptureFixture[str], options: list[str], says: str) -> None:
    assert says in refused(capfd, "plan", profile, "--workers", "3", *options)


def test_train_takes_a_plan_or_a_shape(profile: str, capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    plan = str(tmp_path / "plan.json")
    asked(capfd, profile, "--workers", "2", "-o", plan)
    for option in (["--config", "1-1"], ["--straight"], ["--lag", "1"]):
        assert "--plan already says stages" in refused(capfd, "train", "recipe.py", "--plan", plan, *option)


def test_versions_of_methods_count_a_lag() -> None:
    """Under stashing W_s + 1, and one more where the update comes behind the next forward."""
    assert [versions_of("pipedream")(held, lag) for held in (1, 4) for lag in (0, 1)] == [1, 2, 4, 5]
    assert [versions_of("pipedream_2bw")(held, lag) for held in (1, 4) for lag in (0, 1)] == [2, 2, 2, 2]
    assert [versions_of("1f1b")(held, lag) for held in (1, 4) for lag in (0, 1)] == [1, 1, 1, 1]


def recipe(seed: int) -> Recipe:
    torch.manual_seed(seed)
    batches = [(torch.randn(6, 4), torch.randint(2, (6,))) for _ in range(6)]
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    return Recipe(model, F.cross_entropy, lambda named: torch.optim.SGD(named, lr=0.1), batches, epochs=2)


@pytest.mark.parametrize(
    ("options", "workers", "several"),
    [
        ({}, 2, True),
        ({"workers": 3}, 3, True),
        ({"workers": 1}, 1, False),
        ({"workers": 3, "shape": "data-parallel"}, 3, False),
        ({"workers": 3, "shape": "any"}, 3, None),
        ({"shape": "2-1"}, 3, True),
        ({"shape": (1, 2), "lag": 1, "in_flight": "auto"}, 3, True),
    ],
)
def test_a_run_uses_every_worker(options: dict[str, Any], workers: int, several: bool | None, tmp_path: Path) -> None:
    summary = pd.run(recipe, out=tmp_path / "run", quiet=True, **options)
    plan = pd.Plan.load(tmp_path / "run" / "plan.json")
    assert plan.workers == workers == summary["configuration"]["workers"]
    assert several is None or (len(plan.stages) > 1) == several
    assert max(plan.lag) == options.get("lag", 0)
    if options.get("shape") in ("2-1", (1, 2)):
        assert plan.replicas in ((2, 1), (1, 2))
    assert summary["minibatches"] == 12


def test_a_run_refuses_counts_for_other_workers(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="the plan 2-1 is for 3 workers, 2 were asked for"):
        pd.run(recipe, workers=2, shape="2-1", out=tmp_path / "run", quiet=True)
