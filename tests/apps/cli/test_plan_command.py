"""What is asked for, on the command line and of `pipedream.plan`: shapes, cuts, depth, update delay."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import Answer, Refused, Run
from marks import slow
from torch import nn
from torch.nn import functional as F

import pipedream as pd
from tests.apps.cli.conftest import LAYER

pytestmark = pytest.mark.usefixtures("files")
PLAN = ("plan", "profile.json", "--workers")


def test_cuts_by_hand(answer: Answer, run_command: Run) -> None:
    planned = answer(*PLAN, 4, "--config", "2-1-1", "--cuts", "2,layer5", "--update-delay", 1, "-o", "out.json")
    assert (planned["config"], [row["first"] for row in planned["stages"]]) == ("2-1-1", [0, 2, 5])
    assert (planned["update_delay"], planned["note"]) == ([1, 0, 0], "cut by hand")
    request = {"shape": "2-1-1", "cuts": (2, "layer5"), "update_delay": 1}
    assert pd.Plan.load("out.json") == pd.plan(pd.Profile.load("profile.json"), pd.Cluster.flat(4), **request)
    assert answer(*PLAN, 2, "--cuts", 4)["config"] == "1-1"
    assert run_command("simulate", "out.json", "--schedule", "pipedream", "--minibatches", 8)[0] == 0


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("plan profile.json --workers 3 --straight --config 2-1", "but each of them sets the shape of the plan; give"),
        ("plan profile.json --workers 3 --in-flight deep", "write noam, full, auto or counts as in 3,2,1"),
        ("plan profile.json --workers 3 --update-delay 2", "Invalid value"),
        ("plan profile.json --workers 4 4 --bandwidth 1e9", "gives 2 levels of the network and --bandwidth 1"),
        ("plan profile.json --workers 4 --bandwidth 1e9 --memory 2.5", "--memory 2.5 is 2.00 B; did you mean 2.5GB?"),
        ("sweep profile.json --workers 4 --bandwidth 1e9,400", "--bandwidth 400 is 400 B/s; did you mean 400Mbit/s?"),
        ("plan profile.json --workers 4 --bandwidth 40+1ms", "--bandwidth 40 is 40.0 B/s; did you mean 40Mbit/s?"),
        ("plan profile.json --workers 4 --bandwidth 1e9+1ms --latency 1", "with --latency 1; leave one latency out"),
        ("sweep profile.json --workers 4 --bandwidth 1e9+1ms,1e9", "8 Gbit/s + 1 ms, 8 Gbit/s were asked for; sweep"),
        ("plan profile.json --workers two", "--workers two was asked for; give a whole number from 1 on"),
        ("plan profile.json --workers 1000000", "width must be between 1 and 100000, found 1000000"),
        ("plan profile.json --workers 2 --allow-asynchronous", "--allow-asynchronous was given with --schedule pipe"),
        ("plan profile.json --workers 2 --strategy 2bw --schedule 1f1b", "2bw was given with --schedule 1f1b"),
        ("train recipe.py --plan plan.json --config 1-1", "but a plan has its own stages, workers, links and update"),
        ("emulate plan.json --workers 7", "7 workers were asked for, the plan "),
        ("train recipe.py --cluster cluster.json --workers 2 --latency 1", "the cluster determines these"),
    ],
)
def test_refusals(command: str, message: str, refused: Refused) -> None:
    assert message in refused(*command.split())


def recipe(seed: int) -> pd.Recipe:
    torch.manual_seed(seed)
    batches = [(torch.randn(6, 4), torch.randint(2, (6,))) for _ in range(6)]
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    return pd.Recipe(model, F.cross_entropy, lambda named: torch.optim.SGD(named, lr=0.1), batches, epochs=2)


@pytest.mark.parametrize(
    ("options", "workers", "several"),
    [
        ({}, 2, True),
        ({"workers": 1}, 1, False),
        slow({"workers": 3, "shape": "any"}, 3, None),
        ({"shape": (1, 2), "update_delay": 1, "in_flight": "auto"}, 3, True),
    ],
)
def test_a_run_uses_every_worker(options: dict[str, Any], workers: int, several: bool | None) -> None:
    summary = pd.run(recipe, out="run", quiet=True, **options)
    plan = pd.Plan.load(Path("run", "plan.json"))
    assert plan.workers == workers == summary["configuration"]["workers"]
    assert several is None or (len(plan.stages) > 1) == several
    assert max(plan.update_delay) == options.get("update_delay", 0)
    assert options.get("shape") != (1, 2) or plan.replicas == (1, 2)
    assert summary["minibatches"] == 12


@pytest.mark.parametrize(
    "network", ["--workers 2,2 --bandwidth 2e9,1Gbit/s", "--workers=2 2 --bandwidth=2e9 --bandwidth 1Gbit/s"]
)
def test_levels_of_the_network(network: str, answer: Answer) -> None:
    levels = pd.Cluster((pd.Level(2, 2e9), pd.Level(2, 1.25e8)))
    described = answer("plan", "profile.json", *network.split(), "-o", "out.json")
    plan = pd.Plan.load("out.json")
    assert (plan.cluster, plan.model) == (levels, "chain")
    assert described["slowest_stage_s"] == plan.slowest_stage_s
    assert described["speedup_over_one_worker"] == pytest.approx(18.0 / described["simulated_s"])
    parallel_s = pd.plan(pd.Profile.load("profile.json"), levels, shape="data-parallel").slowest_stage_s
    assert described["speedup_over_data_parallel"] == pytest.approx(parallel_s / described["simulated_s"])
    again = answer("plan", *network.split(), "profile.json")  # the file may follow the values
    assert again | {"planning_s": 0} == described | {"planning_s": 0}


def test_levels_recomputation_and_the_bound(answer: Answer, refused: Refused) -> None:
    planned = answer(*PLAN, 2, 2, "--bandwidth", "1e9", "100B/s", "--strategy", "search")
    assert (planned["bound_s"], planned["gap"]) == (planned["slowest_stage_s"], 0.0)
    assert "on consecutive workers" in planned["note"]
    # Three layers at the input, two minibatches in flight: 36 kB, or 21 if only one of them keeps its activations.
    pd.Profile.of_chain((replace(LAYER, output_bytes=10, activation_bytes=5000),) * 6).save("heavy.json")
    fast = ("plan", "heavy.json", "--workers", 2, "--bandwidth", "1e9")
    tight = (*fast, "--straight", "--memory", 23000)
    assert "none of the straight pipelines" in refused(*tight)
    planned = answer(*tight, "--recompute", "auto")
    assert [row["recompute"] for row in planned["stages"]] == [True, False]
    assert [row["recompute"] for row in answer(*fast, "--cuts", 2, "--recompute", "always")["stages"]] == [True, True]


def test_what_a_peak_is_made_of(answer: Answer, run_command: Run) -> None:
    for stage in answer(*PLAN, 3, "--straight")["stages"]:
        assert sum(stage["memory"].values()) == stage["peak_bytes"] > 0 == stage["memory"]["host_bytes"]
    *_, plan, table = run_command(*PLAN, 3, "--straight", "--memory-table")[1].split("\n\n")
    assert ("update: no optimizer was profiled" in plan, " 0 s " in plan) == (True, False)
    head, first, *_ = table.splitlines()
    names = "weight, stash, optimizer, gradient, activation, message, temporary, peak"
    assert head.split() == ["stage", *names.split(", ")]
    # Three versions of 2 kB, and the gradients; three microbatches of 200 B; three messages of 1 kB.
    assert " ".join(first.split()) == "0 2.00 kB 4.00 kB - 2.00 kB 400 B 3.00 kB - 11.4 kB"
