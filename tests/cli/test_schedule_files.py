"""A schedule's file in PyTorch's notation, wherever the command takes a method's name."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from zoo import alike_layers

from pipedream.core.errors import PlanError, ScheduleError
from pipedream.core.hardware.cluster import Cluster
from pipedream.core.plan.plan import Plan
from pipedream.plan_request import PlanRequest
from pipedream.schedules import build, to_torch_csv, uniform
from pipedream.workflows.plan import plan_from_file
from pipedream.workflows.simulate import share_model

RunCommand = Callable[..., tuple[int, str, str]]


@pytest.fixture
def looped(tmp_path: Path) -> Path:
    """Returns a file of interleaved 1F1B: four stages on two ranks, four microbatches."""
    path = tmp_path / "looped.csv"
    path.write_text(to_torch_csv(build("interleaved_1f1b", uniform("interleaved_1f1b", 2), 4)))
    return path


def test_show_writes_and_reads(run_command: RunCommand, tmp_path: Path, refused: Callable[..., str]) -> None:
    file, svg = tmp_path / "mine.csv", tmp_path / "mine.svg"
    status, drawn, _ = run_command("show", "1f1b", "--stages", 3, "--microbatches", 4, "--csv", file)
    assert status == 0
    assert file.read_text().splitlines()[0] == "0F0,0F1,0F2,,,0B0,0F3,0B1,,0B2,,0B3"
    status, again, _ = run_command("show", file, "--verify", "--svg", svg)
    assert status == 0
    assert again.startswith(drawn.rstrip("\n"))
    assert f"Proof of {file}, plan 1-1-1" in again
    assert "3 stages" in svg.read_text()
    rows = json.loads(run_command("show", file, "--json", "--minibatches", 2)[1])
    assert rows["proof"]["peak_in_flight"] == [3, 2, 1]
    assert "F7" in rows["grid"][1], "a second minibatch"
    assert "updates without a flush" in refused("show", "pipedream", "--csv", file)
    assert run_command("show", file, "--stages", 2)[0] == 2
    assert "the file itself says which stages a worker has" in refused("show", file, "--chunks", 2)
    file.write_text("0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1\n")
    assert "wait for each other for ever" in refused("show", file)


def test_simulate(run_command: RunCommand, looped: Path, tmp_path: Path, refused: Callable[..., str]) -> None:
    by_name = json.loads(
        run_command("simulate", "--uniform", 2, "--schedule", "interleaved_1f1b", "--microbatches", 4, "--json")[1]
    )
    assert json.loads(run_command("simulate", "--uniform", 2, "--schedule", looped, "--json")[1]) == by_name
    twice = json.loads(run_command("simulate", "--uniform", 2, "--schedule", looped, "--minibatches", 2, "--json")[1])
    assert "the file has 4" in refused("simulate", "--uniform", 2, "--schedule", looped, "--microbatches", 8)
    assert twice["makespan_s"] == 2 * by_name["makespan_s"]
    plan = share_model(uniform("interleaved_1f1b", 2)).save(tmp_path / "plan.json")
    assert json.loads(run_command("simulate", plan, "--schedule", looped, "--json")[1]) == by_name
    straight = Plan.uniform(4).save(tmp_path / "straight.json")
    assert "4 stages on ranks 0, 1, 0, 1, the plan 1-1-1-1 on 0, 1, 2, 3" in refused(
        "simulate", straight, "--schedule", looped
    )


def test_plan(run_command: RunCommand, looped: Path, tmp_path: Path) -> None:
    saved, out = alike_layers(8).save(tmp_path / "profile.json"), tmp_path / "plan.json"
    assert run_command("plan", saved, "--workers", 2, "--schedule", looped, "-o", out)[0] == 0
    plan = Plan.load(out)
    assert [(stage.first, stage.last) for stage in plan.stages] == [(0, 2), (2, 4), (4, 6), (6, 8)]
    assert (plan.worker_order, plan.schedule, plan.microbatches) == ((0, 1, 0, 1), str(looped), 4)
    assert run_command("plan", "--check", out)[0] == 0
    assert run_command("simulate", out)[0] == 0
    for wrong in (("--workers", 3), ("--workers", 2, "--microbatches", 3), ("--workers", 2, "--data-parallel")):
        assert run_command("plan", saved, *wrong, "--schedule", looped, "-o", tmp_path / "none.json")[0] == 2


def test_plans_of_files(looped: Path, tmp_path: Path) -> None:
    manual_plan = plan_from_file(alike_layers(8), PlanRequest(Cluster.flat(2), schedule=str(looped), cuts=(1, 2, 5)))
    assert [(stage.first, stage.last) for stage in manual_plan.stages] == [(0, 1), (1, 2), (2, 5), (5, 8)]
    with pytest.raises(PlanError, match="has 4 stages, the cuts make 2"):
        plan_from_file(alike_layers(8), PlanRequest(Cluster.flat(2), schedule=str(looped), cuts=(1,)))
    with pytest.raises(PlanError, match=r"has 2 ranks, and a plan for 4 workers was asked for; ask for 2"):
        plan_from_file(alike_layers(8), PlanRequest(Cluster.flat(4), schedule=str(looped)))
    with pytest.raises(ScheduleError, match="with 8 microbatches a minibatch: the file has 4"):
        plan_from_file(alike_layers(8), PlanRequest(Cluster.flat(2), schedule=str(looped), microbatches=8))
    most = max(sum(stage.peak_bytes for stage in manual_plan.stages[rank::2]) for rank in (0, 1))
    assert plan_from_file(
        alike_layers(8), PlanRequest(Cluster.flat(2, memory_bytes=most), schedule=str(looped), cuts=(1, 2, 5))
    ).stages
    with pytest.raises(PlanError, match=r"stages \d, \d of worker \d need up to"):
        plan_from_file(
            alike_layers(8), PlanRequest(Cluster.flat(2, memory_bytes=most - 1), schedule=str(looped), cuts=(1, 2, 5))
        )
    # A straight file is planned as its method is.
    path = tmp_path / "straight.csv"
    path.write_text(to_torch_csv(build("gpipe", Plan.uniform(2), 4)))
    plan = plan_from_file(alike_layers(7), PlanRequest(Cluster.flat(2), schedule=str(path)))
    assert [(stage.first, stage.last) for stage in plan.stages] == [(0, 3), (3, 7)]
    assert plan.worker_order == ()


RECIPE = """
import torch
from torch import nn
import pipedream

def recipe():
    torch.manual_seed(0)
    data = [(torch.randn(8, 4), torch.randint(2, (8,))) for _ in range(5)]
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2))
    step = lambda named: torch.optim.SGD(named, lr=0.1)
    return pipedream.Recipe(model=model, loss=nn.CrossEntropyLoss(), optimizer=step, train=data)
"""


def test_train(looped: Path, tmp_path: Path, run_command: RunCommand, started: list[int]) -> None:
    recipe = tmp_path / "mine.py"
    recipe.write_text(RECIPE)
    options = ("--schedule", looped, "--epochs", 1, "--out", tmp_path / "run", "--json")
    status, out, error = run_command("train", recipe, *options)
    assert (status, started) == (0, [2]), error
    summary = json.loads(out)
    chosen = summary["configuration"]
    assert (chosen["workers"], chosen["microbatches"], chosen["schedule"]) == (2, 4, str(looped))
    assert [row["rank"] for row in summary["stages"]] == [0, 1, 0, 1]
