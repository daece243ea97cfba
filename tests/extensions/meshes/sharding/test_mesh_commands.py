"""`pipedream train --mesh` with a mesh for each stage."""

import json
from collections.abc import Callable
from pathlib import Path

import commands
import pytest

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


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("train --config 1-1 --mesh model:2/-/-", "are for 3 stages, but there are 2"),
        ("train --config 1-1 --mesh model:2/- --workers 1", "with the mesh model:2/- is for 3 ranks, 1 were"),
        ("train --config 1-1 --mesh model:2/x", "the mesh 'x' has 'x', which is not a name and a size"),
        ("profile --mesh model:2 --device meta", "a rank of a mesh can only be measured"),
    ],
)
def test_meshes_that_do_not_fit(tmp_path: Path, refused: Callable[..., str], command: str, words: str) -> None:
    (tmp_path / "recipe.py").write_text(RECIPE)
    verb, *options = command.split()
    assert words in refused(verb, tmp_path / "recipe.py", *options)
    assert [path.name for path in tmp_path.iterdir() if path.name != "__pycache__"] == ["recipe.py"]
