"""Each example is run as its reader would run it, and what it leaves is checked against plain PyTorch."""

import ast
import json
import math
import re
from dataclasses import replace
from itertools import cycle
from pathlib import Path
from typing import Any

import commands
import processes
import pytest
import torch

import pipedream
import pipedream as pd
from pipedream.apps import cli
from pipedream.apps.training.recipe import load_recipe
from pipedream.core.units import MUCH_SLOWER

FOLDER = Path(__file__).parents[2] / "examples"
DIGITS = str(FOLDER / "digits.py")
LLAMA = FOLDER / "llama70b.py"  # too large to be trained here: tests/test_without_running.py
TABLE = FOLDER / "partition_table.py"  # what two of them print, no recipe
PARTITIONED = [FOLDER / "rnn_partition.py", FOLDER / "wide_resnet.py"]
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
EXAMPLES = sorted(set(FOLDER.glob("*.py")) - {LLAMA, TABLE})
ALIKE = ("char_gpt", "gpt2_stdlib", "lora_gpt", "lstm_lm", "mesh_gpt", "muon_gpt", "resnet_digits", "soap_gpt")
"""Recipes as others are; continuous integration does not run them."""
SUMMARY_KEYS = {
    *("format", "recipe", "seed", "versions", "configuration", "plan", "schedule", "workers", "stages", "drains"),
    *("epochs", "minibatches", "metrics", "evaluations", "accuracy", "target", "seconds_to_target"),
    *("throughput", "bubble", "memory", "seconds", "train_seconds", "interrupted", "resumed_from", "phases"),
    *("skipped_updates", "slowness", "ranks", "command", "recipe_sha256", "failures", "checkpoints"),
}


def skip_without_package(example: Path) -> None:
    if example.stem == "soap_gpt":
        pytest.importorskip("pytorch_optimizer", reason="the example needs pytorch_optimizer, which is not installed")


def plainly(recipe: pd.Recipe, weights: dict[str, torch.Tensor]) -> dict[str, float]:
    """Returns loss and metrics of the plain model with these weights over the test data."""
    recipe.model.load_state_dict(weights)
    recipe.model.eval()
    sums: dict[str, list[float]] = {}
    for batch in recipe.test or ():
        inputs = recipe.inputs(batch) if recipe.inputs else batch if isinstance(batch, dict) else batch[0]
        targets = recipe.targets(batch) if recipe.targets else batch if isinstance(batch, dict) else batch[1]
        with torch.no_grad():
            output = recipe.model(**inputs) if isinstance(inputs, dict) else recipe.model(inputs)
            values = {"loss": output.loss if recipe.loss is None else recipe.loss(output, targets)}
            values |= {name: metric(output, targets) for name, metric in recipe.metrics.items()}
        targets = targets["labels"] if isinstance(targets, dict) else targets
        counted = targets != getattr(recipe.loss, "ignore_index", -100)
        for name, value in values.items():
            weight = float(counted.sum()) if name == "loss" else float(len(targets))
            pair = sums.setdefault(name, [0.0, 0.0])
            pair[0] += float(value) * weight
            pair[1] += weight
    return {name: total / weight for name, (total, weight) in sums.items()}


# -- in this process --------------------------------------------------------------------------------


@pytest.mark.parametrize("example", [*EXAMPLES, LLAMA], ids=lambda path: path.stem)
def test_is_short_and_plain(example: Path) -> None:
    text = example.read_text(encoding="utf-8")
    assert len(text.splitlines()) < 60
    classes = [node for node in ast.parse(text).body if isinstance(node, ast.ClassDef)]
    bases = {ast.unparse(base) for node in classes for base in node.bases}
    assert all(base.startswith(("nn.", "torch.optim.")) for base in bases), "a model is an ordinary module"
    command = "profile" if example == LLAMA else "train"
    assert f"pipedream {command} examples/{example.name} --" in text


@pytest.mark.parametrize(
    "example",
    [
        pytest.param(path, id=path.stem, marks=pytest.mark.long if path.stem in ALIKE else pytest.mark.slow)
        for path in EXAMPLES
    ],
)
def test_runs_in_one_process(example: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    skip_without_package(example)
    recipe = load_recipe(str(example))
    recipe = replace(recipe, test=list(recipe.test or ())[:2])  # so that an evaluation is quick
    summary = pipedream.run(lambda seed: recipe, minibatches=12, out=tmp_path / "run")
    losses = [loss for _, loss in json.loads((tmp_path / "run" / "losses.json").read_text(encoding="utf-8"))]
    assert len(losses) == summary["minibatches"], "with those in flight"
    in_flight = 0 if recipe.phases else 1  # what was in flight is finished
    assert summary["minibatches"] == summary["drains"][-1] == 12 + in_flight
    assert losses[-1] < losses[0]
    for name, value in plainly(recipe, torch.load(tmp_path / "run" / "weights.pt", weights_only=True)).items():
        assert math.isclose(value, summary["metrics"][name], rel_tol=1e-5), name
    printed = capsys.readouterr().out
    assert "Plan 1-1" in printed
    is_late = any(stage["staleness"] for stage in summary["stages"])
    assert ("; the schedule 1f1b trains as one process does" in printed) >= is_late


# -- by the command ---------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.processes
@pytest.mark.parametrize(
    "command",
    ["rnn_partition.py --layers 1 --steps 2 --width 16 --batch 8", "wide_resnet.py --layers 14 --widen 1 --batch 4"],
)
def test_table_of_tofus_methods(command: str, tmp_path: Path) -> None:
    example, *sizes = command.split()
    options = (*sizes, "--ranks", "2", "4", "--methods", "recursive", "joint", "spartan", "data")
    ended = commands.run(str(FOLDER / example), *options, folder=tmp_path)
    assert (ended.status, commands.without_progress(ended.err)) == (0, "")
    rows = re.findall(r"^\| (\d) \| ([\w-]+) \| ([\d,]+) \| ([\d,]+) \| ([\d,]+) \| [\d.]+ s \|$", ended.out, re.M)
    elements = {(int(ranks), method): int(number.replace(",", "")) for ranks, method, number, *_ in rows}
    for ranks in (2, 4):
        assert {(ranks, "recursive"), (ranks, "data")} <= elements.keys()
        assert elements[ranks, "recursive"] <= elements.get((ranks, "spartan"), 10**18)
    assert "recursive, 4 ranks: the dimension of each weight" in ended.out


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("digits") / "run"
    processes.results(train_digits, 2, folder)
    return folder


def train_digits(folder: Path) -> None:
    pipedream.run(lambda seed: load_recipe(DIGITS, seed=seed), epochs=2, out=folder, quiet=True)


@pytest.mark.processes
def test_summary_says_it_all(trained: Path) -> None:
    summary = json.loads((trained / "summary.json").read_text(encoding="utf-8"))
    assert set(summary) == SUMMARY_KEYS
    assert {"python", "torch", "pipedream", "numpy"} <= set(summary["versions"])
    expected = {"workers": 2, "processes": 2, "schedule": "pipedream", "epochs": 2, "seed": 0, "device": "cpu"}
    assert expected.items() <= summary["configuration"].items()
    assert pipedream.Plan.from_json(json.dumps(summary["plan"])).config == "1-1"
    assert (summary["minibatches"], summary["recipe"], summary["interrupted"]) == (2 * 45, "digits", False)
    late = [drain - 45 * (epoch + 1) for epoch, drain in enumerate(summary["drains"])]
    assert len(late) == 2, "one drain for each evaluation"
    assert all(0 <= minibatches < 2 for minibatches in late), "what has been admitted is finished"
    assert [row["epoch"] for row in summary["evaluations"]] == [0, 1]
    assert summary["accuracy"] == summary["metrics"]["accuracy"] == summary["evaluations"][-1]["accuracy"] > 0.5
    reached = [row["seconds"] for row in summary["evaluations"] if row["accuracy"] >= summary["target"]["value"]]
    assert summary["seconds_to_target"] == (reached[0] if reached else None)
    throughput = summary["throughput"]
    assert min(throughput["measured_per_s"], throughput["predicted_per_s"]) > 0
    assert summary["slowness"] >= 1
    assert (throughput["predicted_slowed_per_s"] is not None) == (summary["slowness"] > MUCH_SLOWER)
    assert all(0 <= summary["bubble"][which] < 1 for which in ("predicted", "measured"))
    assert summary["train_seconds"] < summary["seconds"]
    first, second = summary["stages"]
    # The cosine was stepped before each update but the first, on one clock for both stages.
    rate = 0.05 * (1 + math.cos(math.pi * 89 / (12 * 45))) / 2
    assert first["learning_rate"] == second["learning_rate"] == pytest.approx(rate)
    for rank, row in enumerate((first, second)):
        assert (row["rank"], row["versions"], row["staleness"]) == (rank, 2 - rank, 1 - rank)
        assert row["bytes_sent"] > 0
        assert 0.2 < row["peak_bytes"] / row["predicted_peak_bytes"] < 5, "both are of tensors"
        assert row["reserved_bytes"] > 1e8, "of the process, with its libraries"
        assert 0 < row["busy_share"] <= 1
    names = {name for name, module in load_recipe(DIGITS).model.named_modules() if name and not list(module.children())}
    assert set(first["layers"] + second["layers"]) == names
    plain = plainly(load_recipe(DIGITS), torch.load(trained / "weights.pt", weights_only=True))
    assert plain["accuracy"] == pytest.approx(summary["accuracy"], abs=1e-6)
    assert plain["loss"] == pytest.approx(summary["metrics"]["loss"], rel=1e-5)


@pytest.mark.processes
@pytest.mark.long
@pytest.mark.parametrize(
    ("example", "how"),
    [*zip(sorted({*EXAMPLES} - {*PARTITIONED}), cycle(("python", "torchrun")), strict=False)],
    ids=lambda value: getattr(value, "stem", value),
)
def test_file_itself_reaches_its_target(example: Path, how: str, tmp_path: Path) -> None:
    skip_without_package(example)
    arguments = (str(example),) if how == "python" else (*TORCHRUN, str(example))
    ended = commands.run(*arguments, folder=tmp_path, timeout_s=900.0)
    assert ended.status == 0, ended.err
    assert not ended.orphans
    (folder,) = (tmp_path / "runs").iterdir()
    summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    assert summary["configuration"]["processes"] == (1 if how == "python" else 2)
    assert summary["seconds_to_target"] is not None


# -- one JSON object on standard output -------------------------------------------------------------


def test_json_of_profile_plan_and_simulate(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    def run_json(*arguments: str) -> dict[str, Any]:
        assert cli.main([*arguments, "--json"]) == 0
        out, err = capfd.readouterr()
        assert commands.without_progress(err) == ""
        return dict(json.loads(out))

    profile, plan = str(tmp_path / "profile.json"), str(tmp_path / "plan.json")
    answer = run_json("profile", DIGITS, "--runs", "2", "-o", profile)
    assert pipedream.Profile.from_json(json.dumps(answer)) == pipedream.Profile.load(profile)
    answer = run_json("plan", profile, "--workers", "2", "--straight", "-o", plan)
    assert {"slowest_stage_s", "speedup_over_data_parallel", "planning_s"} <= set(answer)
    assert answer["config"] == pipedream.Plan.load(plan).config == "1-1"
    assert all({"layers", "replicas", "compute_s", "peak_bytes"} <= set(stage) for stage in answer["stages"])
    assert 0 < answer["speedup_over_one_worker"] <= 2
    answer = run_json("simulate", plan, "--schedule", "1f1b", "--microbatches", "8")
    assert set(answer) == {"microbatches", "minibatches", "makespan_s", "bubble", "throughput_per_s", "per_rank"}
    columns = {"busy_s", "peak_in_flight", "peak_versions", "peak_bytes", "staleness"}
    assert [set(row) for row in answer["per_rank"]] == [columns] * 2
