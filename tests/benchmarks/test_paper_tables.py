"""`pipedream plan` of graphs with branches: stages, files with stages, the published profiles, and damaged files."""

from __future__ import annotations

import random
import time
from pathlib import Path

import pytest
import torch
from published import published
from torch import nn

import pipedream as pd
from pipedream.core.errors import PlanError
from pipedream.core.model.graph import Layer, LayerGraph
from pipedream.core.model.graph_txt import GraphText
from pipedream.core.model.profile import LayerProfile
from pipedream.workflows import plan as planning
from pipedream.workflows.methods import score
from pipedream.workflows.profile import find_plan_layers
from tests.cli.test_plan_command import plan_json


def _write_node(name: str, kind: str, milliseconds: float, size_bytes: float, held_bytes: float = 0.0) -> str:
    return (
        f"{name} -- {kind} -- forward_compute_time={milliseconds}, backward_compute_time={milliseconds}, "
        f"activation_size={size_bytes}, parameter_size={held_bytes}"
    )


# Two branches of 6 ms between a stem and a sum: fastest with a branch on each of two workers, cut across both.
NODES = [
    _write_node("stem", "Conv2d", 0.5, 1000.0),
    _write_node("left", "Conv2d", 3.0, 1000.0),
    _write_node("right", "Conv2d", 3.0, 1000.0),
    _write_node("sum", "Add", 0.0, 1000.0),
    _write_node("head", "Linear", 0.5, 10.0, 4e9),
]
EDGES = ["stem -- left", "stem -- right", "left -- sum", "right -- sum", "sum -- head"]


def text(nodes: list[str]) -> str:
    return "\n".join([*nodes, *(f"\t{edge}" for edge in EDGES)])


@pytest.fixture
def graph(tmp_path: Path) -> Path:
    path = tmp_path / "net.txt"
    path.write_text(text(NODES))
    return path


def test_cuts_across_branches(graph: Path, capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    out = tmp_path / "staged.txt"
    options = ["--workers", "2", "--bandwidth", "1e9", "--strategy", "search", "-o", str(out)]
    answer = plan_json(capfd, str(graph), *options)
    assert (answer["config"], answer["slowest_stage_s"]) == ("1-1", 0.007)
    assert answer["planning_s"] > 0
    assert "optimal" in answer["note"]
    stages = {node.name: node.stage for node in GraphText.load(out).nodes}
    assert (stages["stem"], stages["sum"], stages["head"]) == (0, 1, 1)
    assert stages["left"] != stages["right"]
    for edge in EDGES:
        source, target = edge.split(" -- ")
        assert (stages[source] or 0) <= (stages[target] or 0)


def test_the_order_of_the_lines_does_not_matter(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    draw = random.Random(0)
    seconds = set()
    nodes = list(NODES)
    for number in range(3):
        path = tmp_path / f"net{number}.txt"
        path.write_text(text(nodes))
        answer = plan_json(capfd, str(path), "--workers", "3", "--bandwidth", "1e9")
        seconds.add(answer["slowest_stage_s"])
        draw.shuffle(nodes)
    again = plan_json(capfd, str(path), "--workers", "3", "--bandwidth", "1e9")
    assert answer | {"planning_s": 0} == again | {"planning_s": 0}
    assert len(seconds) == 1


def test_a_pipeline_refuses_an_order_that_is_not_the_models() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))
    sample = torch.zeros(1, 2)
    cost = LayerProfile(1.0, 1.0, 1, 1)
    names = [layer.name for layer in find_plan_layers(model, pd.Plan.uniform(3), sample).graph.layers]
    layers = tuple(Layer(name, "Layer") for name in reversed(names))
    chain = LayerGraph.chain(layers)
    plan = planning.plan(pd.Profile("Sequential", chain, (cost,) * 3, batch=1), pd.Cluster.flat(3), shape="straight")
    with pytest.raises(PlanError, match=r"the plan runs layer '2' where the model runs '0': .* plan again from a"):
        find_plan_layers(model, plan, sample)


EXACT = ["alexnet", "densenet121", "gnmt", "gnmt_large", "resnet18", "resnet50", "resnet101", "resnext50", "resnext101"]
QUICK = ["alexnet", "gnmt", "vgg16"]
WIDE = ["inception_v3", "nasnetalarge", "nasnetamobile"]


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in QUICK else pytest.mark.slow)
        for name in (*EXACT, "squeezenet1_0", "vgg16", *WIDE)
    ],
)
def test_published_profiles(name: str) -> None:
    """At 16 workers: those with few cuts are solved, the three with very many nearly; each in seconds."""
    profile = GraphText.load(published(name)).profile(name)
    began = time.process_time()
    plan = planning.plan(profile, pd.Cluster.flat(16, 1.25e9), strategy="search")
    assert time.process_time() - began < 30  # ten times what it takes, for machines differ
    gap = plan.slowest_stage_s / plan.bound_s - 1
    assert 0 <= gap <= (0.02 if name in WIDE else 0.0)
    owner = {layer: s for s, stage in enumerate(plan.stages) for layer in stage.names}
    names = [layer.name for layer in profile.graph.layers]
    assert sorted(owner) == sorted(names)
    assert all(owner[names[a]] <= owner[names[b]] for a, b in profile.graph.edges)
    if name not in WIDE:
        simulated = planning.plan(profile, pd.Cluster.flat(16, 1.25e9))
        assert score(simulated).period_s <= score(plan).period_s * (1 + 1e-9)
