"""`pipedream train --mesh` with a mesh for each stage, and `pipedream compare --mesh`."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import commands
import processes
import pytest
import torch
from torch import nn

import pipedream
from pipedream.core.errors import PlanError
from pipedream.core.variants import ONE_WORKER, Variant
from pipedream.options import TrainingOptions
from pipedream.recipe import load_recipe
from pipedream.training.compare_runs import RunFailed, Runs
from pipedream.training.compare_variants import LinkVariants

RECIPE = """
import pipedream, torch
from torch import nn

def recipe(seed=0):
    torch.manual_seed(seed)
    return pipedream.Recipe(
        model=nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 8), nn.Linear(8, 4)),
        loss=nn.functional.cross_entropy,
        train=[(torch.randn(16, 8), torch.randint(4, (16,))) for _ in range(4)],
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        epochs=1,
        layout=pipedream.Layout("d_ff:model", names={"0.weight": "d_ff d_model", "2.weight": "d_model d_ff"}),
    )
"""


@pytest.mark.processes
@pytest.mark.slow
def test_stages_with_different_meshes_are_trained(tmp_path: Path) -> None:
    (tmp_path / "recipe.py").write_text(RECIPE)
    options = ["--config", "1-1", "--mesh", "model:2/-", "--out", "run"]
    ended = commands.run("-m", "pipedream", "train", "recipe.py", *options, folder=tmp_path)
    assert ended.status == 0, ended.err
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["workers"], summary["ranks"], summary["minibatches"]) == (2, 3, 4)
    assert [(stage["mesh"], stage["layout"]) for stage in summary["stages"]] == [("model:2", "d_ff:model"), ("", "")]
    assert all(stage["bytes_sent"] > 0 for stage in summary["stages"])
    exchanged, none = (stage["collectives"] for stage in summary["stages"])
    assert exchanged["predicted"] == exchanged["measured"]
    assert [row["over"] for row in exchanged["measured"]["forward"]] == ["model"]
    assert none is None
    assert "collectives of stage 0: forward 1 all-" in ended.out
    assert "(as predicted)" in ended.out
    assert "Collectives of a microbatch and an update" in (tmp_path / "run" / "report.html").read_text()


@pytest.mark.processes
@pytest.mark.long
def test_methods_are_compared_on_meshes(tmp_path: Path) -> None:
    """Workers are ranks, also of what torch offers."""
    (tmp_path / "recipe.py").write_text(RECIPE)
    mesh = "--mesh data:2 --layout batch:data --shard-weights data --workers 2"
    options = f"{mesh} --schedule torch --schedule data-parallel --minibatches 2 --out run --json".split()
    ended = commands.run("-m", "pipedream", "compare", "recipe.py", *options, folder=tmp_path, timeout_s=200.0)
    assert ended.status == 0, ended.err
    (link,) = json.loads(ended.out)["links"]
    rows = {row["name"]: row for row in link["variants"]}
    assert [(name, rows[name]["workers"], rows[name]["plan"]) for name in ("DDP", "data parallel")] == [
        ("DDP", 2, ""),
        ("data parallel", 2, "1x2, noam"),
    ]
    assert rows["data parallel"]["samples_per_s"] > 0
    (file,) = (tmp_path / "run").glob("*/summary.json")
    summary = json.loads(file.read_text())
    assert [stage["mesh"] for stage in summary["stages"]] == ["data:2"]
    kinds = {row["kind"] for row in summary["stages"][0]["collectives"]["measured"]["forward"]}
    assert "all-gather" in kinds, "sharded weights"


@pytest.mark.slow
def test_each_method_of_a_comparison_is_planned_for_meshes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 8), nn.Linear(8, 4))
    layout = pipedream.Layout("d_ff:model", names={"0.weight": "d_ff d_model", "2.weight": "d_model d_ff"})
    profile = pipedream.profile(model, torch.randn(16, 8), layout=layout, meshes=("model:2",), runs=1)
    ran: list[tuple[int, str, str]] = []

    def run(self: Runs, ranks: int, arguments: Sequence[str], begun: Path) -> None:
        if "train" not in arguments:
            raise RunFailed(1, "not here")
        words = " ".join(arguments)
        plan = pipedream.Plan.load(words.partition("--plan ")[2].split()[0])
        ran.append((ranks, plan.config, words.partition("--layout ")[2].partition(" --plan")[0]))
        raise RunFailed(2, "enough")

    monkeypatch.setattr(Runs, "_run", run)
    options = TrainingOptions(workers=4, mesh="model:2", layout="d_ff:model", shard_weights="model")
    runs = Runs("recipe.py", options, tmp_path, None)
    for method in ("data-parallel", "1f1b", "pipedream", "auto"):
        link = LinkVariants(runs, profile, pipedream.Cluster.flat(4), 4, (method,), lambda line: None)
        with pytest.raises(PlanError, match="enough"):
            list(link.measure_all(Variant(ONE_WORKER, 1)))
    assert [ranks for ranks, _, _ in ran[:3]] == [4] * 3
    assert [config for _, config, _ in ran[:3]] == ["2x2", "1x2-1x2", "1x2-1x2"]
    assert {layout_text for *_, layout_text in ran} == {"d_ff:model --shard-weights model"}


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("train --config 1-1 --mesh model:2/-/-", "are for 3 stages, but there are 2"),
        ("train --config 1-1 --mesh model:2/- --workers 1", "with the mesh model:2/- is for 3 ranks, 1 were"),
        ("train --config 1-1 --mesh model:2/x", "the mesh 'x' has 'x', which is not a name and a size"),
        ("compare --mesh model:2/-", "the meshes model:2/- were asked for, but the methods that are compared"),
        ("compare --mesh model:2 --workers 3", "3 workers were asked for with the mesh model:2, so they are ranks"),
        ("compare --mesh model", "the mesh 'model' has 'model', which is not a name and a size"),
        ("profile --mesh model:2 --device meta", "a rank of a mesh can only be measured"),
    ],
)
def test_meshes_that_do_not_fit(tmp_path: Path, refused: Callable[..., str], command: str, words: str) -> None:
    (tmp_path / "recipe.py").write_text(RECIPE)
    verb, *options = command.split()
    assert words in refused(verb, tmp_path / "recipe.py", *options)
    assert [path.name for path in tmp_path.iterdir() if path.name != "__pycache__"] == ["recipe.py"]


def _train(recipe: Path, folder: Path, options: dict[str, Any]) -> dict[str, Any]:
    make_recipe = lambda seed: load_recipe(str(recipe), seed=seed)  # noqa: E731
    return pipedream.run(make_recipe, schedule="1f1b", out=folder, quiet=True, **options)


@pytest.mark.processes
@pytest.mark.slow
def test_planned_meshes_train_as_a_single_process(tmp_path: Path) -> None:
    """Two workers on four ranks."""
    (tmp_path / "recipe.py").write_text(RECIPE)
    options = {"workers": 4, "shape": "1-1", "mesh": "auto"}
    summary = processes.results(_train, 4, tmp_path / "recipe.py", tmp_path / "run", options)[0]
    assert summary["plan"]["note"].startswith("mixed, because the pipeline 1x2-1x2 on the mesh model:2 is the fastest")
    assert summary["ranks"] == 4
    assert [stage["mesh"] for stage in summary["stages"]] == ["model:2", "model:2"]
    _train(tmp_path / "recipe.py", tmp_path / "alone", {"workers": 1})
    planned, plain = (torch.load(tmp_path / run / "weights.pt", weights_only=True) for run in ("run", "alone"))
    for name, weights in plain.items():
        torch.testing.assert_close(planned[name], weights, rtol=1e-4, atol=1e-6)
