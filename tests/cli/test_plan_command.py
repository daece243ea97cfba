"""What is asked for, on the command line and of `pipedream.plan`: shapes, cuts, depth, update delay."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import pipedream as pd
from pipedream import cli
from pipedream.core.errors import PlanError
from pipedream.core.hardware.cluster import Level
from pipedream.core.model.profile import LayerProfile

LAYER = LayerProfile(1.0, 2.0, output_bytes=1000, parameter_bytes=1000, activation_bytes=100)


@pytest.fixture
def profile(tmp_path: Path) -> str:
    pd.Profile.of_chain((LAYER,) * 6).save(tmp_path / "profile.json")
    return str(tmp_path / "profile.json")


def plan_json(capfd: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    """Returns the one object that a command prints with --json."""
    assert cli.main(["plan", *arguments, "--json"]) == 0
    return json.loads(capfd.readouterr().out)


SHAPES = {"--straight": "1-1-1", "--data-parallel": "3", "--config 2-1": "2-1", "--config 1-1": "1-1", "": "1-1-1"}


@pytest.mark.parametrize(("options", "config"), SHAPES.items())
def test_shapes(profile: str, capfd: pytest.CaptureFixture[str], options: str, config: str) -> None:
    answer = plan_json(capfd, profile, "--workers", "3", "--bandwidth", "500", *options.split())
    assert answer["config"] == config
    assert [row["replicas"] for row in answer["stages"]] == [int(part) for part in config.split("-")]


def test_cuts_by_hand(profile: str, capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    out = str(tmp_path / "plan.json")
    answer = plan_json(
        capfd, profile, "--workers", "4", "--config", "2-1-1", "--cuts", "2,layer5", "--update-delay", "1", "-o", out
    )
    assert (answer["config"], [row["first"] for row in answer["stages"]]) == ("2-1-1", [0, 2, 5])
    assert (answer["update_delay"], answer["note"]) == ([1, 0, 0], "cut by hand")
    plan = pd.Plan.load(out)
    assert plan.update_delay == (1, 0, 0)
    request = {"shape": "2-1-1", "cuts": (2, "layer5"), "update_delay": 1}
    assert plan == pd.plan(pd.Profile.load(profile), pd.Cluster.flat(4), **request)
    assert plan_json(capfd, profile, "--workers", "2", "--cuts", "4")["config"] == "1-1"
    assert cli.main(["simulate", out, "--schedule", "pipedream", "--minibatches", "8"]) == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            "--workers 3 --straight --config 2-1",
            "--straight was given with --config 2-1, but each of them sets the shape of the plan; give one",
        ),
        ("--workers 3 --in-flight deep", "write noam, full, auto or counts as in 3,2,1"),
        ("--workers 3 --update-delay 2", "Invalid value"),
        ("--workers 4 4 --bandwidth 1e9", "--workers gives 2 levels of the network and --bandwidth 1"),
        ("--workers 4 --bandwidth 1e9 2e9", "--workers gives 1 levels of the network and --bandwidth 2"),
        ("--workers 4 --bandwidth 0", "'0' is not a bandwidth; write for example 1e9"),
        ("--workers two", "--workers two was asked for; give a whole number from 1 on"),
        ("--workers 1000000", "width must be between 1 and 100000, found 1000000"),
        ("", "the number of workers is missing; give --workers N"),
        ("--workers 2 --plot a.svg", "No such option: --plot"),
        ("--workers 2 --explain", "--explain was given with --schedule pipedream"),
        ("--workers 2 --allow-asynchronous", "--allow-asynchronous was given with --schedule pipedream"),
        ("--workers 2 --strategy 2bw --schedule 1f1b", "--strategy 2bw was given with --schedule 1f1b"),
        ("--workers 2 --strategy 2bw --config 1-1", "PipeDream-2BW's planner chooses the stages and the depth itself"),
    ],
)
def test_refusals(profile: str, options: str, message: str, refused: Callable[..., str]) -> None:
    assert message in refused("plan", profile, *options.split())


def test_train_takes_a_plan_or_a_shape(
    profile: str, capfd: pytest.CaptureFixture[str], tmp_path: Path, refused: Callable[..., str]
) -> None:
    plan = str(tmp_path / "plan.json")
    plan_json(capfd, profile, "--workers", "2", "-o", plan)
    for option in (["--config", "1-1"], ["--straight"], ["--update-delay", "1"]):
        assert "but a plan has its own stages, workers, links and update delay" in refused(
            "train", "recipe.py", "--plan", plan, *option
        )


def recipe(seed: int) -> pd.Recipe:
    torch.manual_seed(seed)
    batches = [(torch.randn(6, 4), torch.randint(2, (6,))) for _ in range(6)]
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    return pd.Recipe(model, F.cross_entropy, lambda named: torch.optim.SGD(named, lr=0.1), batches, epochs=2)


def test_a_run_that_moves_the_optimizer_of_a_plan_predicts_so(tmp_path: Path) -> None:
    profile = pd.profile(recipe(0).model, torch.randn(6, 4), optimizer=recipe(0).optimizer, warmup=0, runs=1)
    plan = pd.plan(profile, pd.Cluster.flat(2), schedule="1f1b", microbatches=2, shape="straight")
    pd.run(recipe, plan=plan, optimizer_state="host", minibatches=1, out=tmp_path / "run", quiet=True)
    ran = pd.Plan.load(tmp_path / "run" / "plan.json")
    assert ran.choices.optimizer_state == "host"
    for before, stage in zip(plan.stages, ran.stages, strict=True):
        assert stage.peak_bytes == before.peak_bytes + before.trained_bytes


@pytest.mark.parametrize(
    ("options", "workers", "several"),
    [
        ({}, 2, True),
        pytest.param({"workers": 3}, 3, True, marks=pytest.mark.slow),
        ({"workers": 1}, 1, False),
        pytest.param({"workers": 3, "shape": "data-parallel"}, 3, False, marks=pytest.mark.slow),
        pytest.param({"workers": 3, "shape": "any"}, 3, None, marks=pytest.mark.slow),
        pytest.param({"shape": "2-1"}, 3, True, marks=pytest.mark.slow),
        ({"shape": (1, 2), "update_delay": 1, "in_flight": "auto"}, 3, True),
    ],
)
def test_a_run_uses_every_worker(options: dict[str, Any], workers: int, several: bool | None, tmp_path: Path) -> None:
    summary = pd.run(recipe, out=tmp_path / "run", quiet=True, **options)
    plan = pd.Plan.load(tmp_path / "run" / "plan.json")
    assert plan.workers == workers == summary["configuration"]["workers"]
    assert several is None or (len(plan.stages) > 1) == several
    assert max(plan.update_delay) == options.get("update_delay", 0)
    if options.get("shape") in ("2-1", (1, 2)):
        assert plan.replicas in ((2, 1), (1, 2))
    assert summary["minibatches"] == 12


def test_a_run_refuses_counts_for_other_workers(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="the plan 2-1 is for 3 workers, 2 were asked for"):
        pd.run(recipe, workers=2, shape="2-1", out=tmp_path / "run", quiet=True)


@pytest.mark.parametrize(
    "network",
    [
        ["--workers", "2", "2", "--bandwidth", "2e9", "1Gbit/s"],
        ["--workers", "2,2", "--bandwidth", "2e9,1Gbit/s"],
        ["--workers=2", "2", "--bandwidth=2e9", "--bandwidth", "1Gbit/s"],
    ],
)
def test_levels_of_the_network(
    profile: str, capfd: pytest.CaptureFixture[str], tmp_path: Path, network: list[str]
) -> None:
    levels = pd.Cluster((Level(2, 2e9), Level(2, 1.25e8)))
    described = plan_json(capfd, profile, *network, "-o", str(tmp_path / "plan.json"))
    plan = pd.Plan.load(tmp_path / "plan.json")
    assert (plan.cluster, plan.model) == (levels, "chain")
    assert described["slowest_stage_s"] == plan.slowest_stage_s
    assert described["speedup_over_one_worker"] == pytest.approx(18.0 / described["simulated_s"])
    parallel_s = pd.plan(pd.Profile.load(profile), levels, shape="data-parallel").slowest_stage_s
    assert described["speedup_over_data_parallel"] == pytest.approx(parallel_s / described["simulated_s"])
    again = plan_json(capfd, *network, profile)  # the file may follow the values
    assert again | {"planning_s": 0} == described | {"planning_s": 0}


def test_the_methods_own_seconds_are_told(profile: str, capfd: pytest.CaptureFixture[str]) -> None:
    for options in ([], ["--schedule", "1f1b", "--microbatches", "2"], ["--strategy", "2bw"]):
        answer = plan_json(capfd, profile, "--workers", "4", "--bandwidth", "100", *options)
        assert answer["simulated_s"] >= answer["slowest_stage_s"] * (1 - 1e-9)
        alone_s = answer["speedup_over_one_worker"] * answer["simulated_s"]
        assert alone_s == pytest.approx(plan_json(capfd, profile, "--workers", "1")["simulated_s"])


def test_levels_recomputation_and_the_bound(
    profile: str, tmp_path: Path, capfd: pytest.CaptureFixture[str], refused: Callable[..., str]
) -> None:
    answer = plan_json(capfd, profile, "--workers", "2", "2", "--bandwidth", "1e9", "100", "--strategy", "search")
    assert (answer["bound_s"], answer["gap"]) == (answer["slowest_stage_s"], 0.0)
    assert "on consecutive workers" in answer["note"]
    # Three layers at the input, two minibatches in flight: 36 kB, or 21 if only one of them keeps its activations.
    heavy = str(pd.Profile.of_chain((replace(LAYER, output_bytes=10, activation_bytes=5000),) * 6).save(tmp_path / "h"))
    tight = ["--workers", "2", "--bandwidth", "1e9", "--straight", "--memory", "23000"]
    assert "none of the straight pipelines" in refused("plan", heavy, *tight)
    answer = plan_json(capfd, heavy, *tight, "--recompute", "auto")
    assert [row["recompute"] for row in answer["stages"]] == [True, False]
    manual_plan = plan_json(capfd, heavy, *tight[:4], "--cuts", "2", "--recompute", "always")
    assert [row["recompute"] for row in manual_plan["stages"]] == [True, True]


def test_what_a_peak_is_made_of(profile: str, capfd: pytest.CaptureFixture[str]) -> None:
    options = (profile, "--workers", "3", "--straight")
    for stage in plan_json(capfd, *options)["stages"]:
        assert sum(stage["memory"].values()) == stage["peak_bytes"] > 0 == stage["memory"]["host_bytes"]
    assert cli.main(["plan", *options, "--memory-table"]) == 0
    head, first, *_ = capfd.readouterr().out.split("\n\n")[-1].splitlines()
    names = "weight, stash, optimizer, gradient, activation, message, temporary, peak"
    assert head.split() == ["stage", *names.split(", ")]
    # Three versions of 2 kB, and the gradients; three microbatches of 200 B; three messages of 1 kB.
    assert " ".join(first.split()) == "0 2.00 kB 4.00 kB - 2.00 kB 400 B 3.00 kB - 11.4 kB"
