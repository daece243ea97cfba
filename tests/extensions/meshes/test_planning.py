"""`mesh="auto"`: profile, plan and why; the refusals; and that 'none' changes nothing."""

import json
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import Refused, Run
from drawn import meshed_cluster, meshed_profile
from marks import long, slow
from torch import nn

import pipedream as pd
from pipedream.core.model.profile import RankProfile
from pipedream.extensions.meshes import planning
from tests.planner.planned import compare

LAYOUT = pd.Layout("batch:data,d_ff:model", names={"0.weight": "d_ff d_model", "2.weight": "d_model d_ff"})


def model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 24), nn.ReLU(), nn.Linear(24, 8), nn.Linear(8, 4))


MESHES, SMALL = ("model:2", "model:4"), pd.Cluster.flat(4, 1e9, memory_bytes=190)


def cut_in(parts: int, *, weights: int = 100, seconds: float = 4.0, layers: int = 2) -> tuple[pd.LayerProfile, ...]:
    """Layers whose work and weights are divided; each doubling of the parts adds a quarter of the work."""
    share_s = seconds / parts * (1 + 0.25 * (parts.bit_length() - 1))
    return (pd.LayerProfile(share_s, share_s, 4, weights // parts, 4),) * layers


def one_of(meshes: tuple[str, ...], **sizes: Any) -> pd.Profile:
    """A profile with a rank of each mesh that exchanges nothing."""
    none: tuple[tuple[()], ...] = ((),) * int(sizes.get("layers", 2))
    ranks = (RankProfile(text, "d_ff:model", cut_in(pd.Mesh(text).size, **sizes), none, none) for text in meshes)
    return pd.Profile.of_chain(cut_in(1, **sizes), batch=8, ranks=tuple(ranks))


def test_legal_meshes_are_measured() -> None:
    profile = pd.profile(model(), torch.randn(5, 8), layout=LAYOUT, meshes="auto:2", runs=1)
    assert [(rank.mesh, rank.layout) for rank in profile.ranks] == [("model:2", "batch:data,d_ff:model")]
    (note,) = (note for note in profile.notes if note.startswith("not measured"))
    assert note == "not measured, a rank of data:2: a minibatch of 5 samples cannot be sharded over data:2"
    assert profile.ranks[0].layers[0].parameter_bytes < profile.layers[0].parameter_bytes


@pytest.mark.parametrize(
    ("layout", "shard", "most", "legal", "why"),
    [
        ("batch:data,d_ff:model", "", 4, "data:2 model:2 data:4 model:4 data:2,model:2", ""),
        ("batch:data", "", 8, "data:2 data:4", "a minibatch of 12 samples cannot be sharded over data:8"),
        ("batch:data", "shard", 4, "data:2 shard:2 data:4 shard:4 data:2,shard:2", ""),
        ("d_ff:model", "", 16, "model:2 model:4 model:8", "has 24 of 'd_ff', which model:16 of the mesh does not"),
        ("d_ff:model,heads:seq", "", 2, "model:2", "nothing of the model is sharded over 'seq'"),
        ("", "", 8, "", ""),
    ],
)
def test_meshes_that_are_not_legal_are_left_out(layout: str, shard: str, most: int, legal: str, why: str) -> None:
    shapes = {name: tuple(parameter.shape) for name, parameter in model().named_parameters()}
    candidates = pd.Layout(layout, LAYOUT.names, shard_weights=shard).candidates(shapes, 12, most)
    assert [mesh.text for mesh, problem in candidates.items() if not problem] == legal.split()
    assert any(why in problem for problem in candidates.values()) or not why


@pytest.mark.parametrize("schedule", ["pipedream", *(slow(name) for name in ("1f1b", "auto"))])
@pytest.mark.parametrize("seed", [slow(0), 1])
def test_it_is_never_slower_than_a_mesh_by_hand(seed: int, schedule: str) -> None:
    """In simulation."""
    draw = random.Random(seed)
    profile, cluster = meshed_profile(draw), pd.Cluster.flat(4, draw.choice([4.0, 100.0]))
    best_s = compare(profile, cluster, schedule=schedule, mesh="auto").candidates[0].period_s
    for mesh in ("none", *(rank.mesh for rank in profile.ranks)):
        by_hand = compare(profile, cluster, schedule=schedule, mesh=mesh).candidates[0].period_s
        assert best_s <= by_hand * (1 + 1e-9), mesh


@pytest.mark.parametrize("seed", [8, 18, *(long(seed) for seed in range(19, 60))])
def test_plans_on_one_mesh_that_cannot_win_are_not_simulated(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same plan if all are compared."""
    draw = random.Random(seed)
    profile, cluster = meshed_profile(draw), meshed_cluster(draw, limited=seed % 2 == 1, levels=1 + seed // 2 % 2)

    def choose() -> pd.Plan | str:
        try:
            return replace(pd.plan(profile, cluster, mesh="auto"), note="")
        except pd.errors.PlanError as error:
            return str(error)

    chosen, compare_on = choose(), planning._MeshChoice.compare_on
    monkeypatch.setattr(planning._MeshChoice, "compare_on", lambda *args, rival_s=0.0: compare_on(*args))
    monkeypatch.setattr(planning._MeshChoice, "compute_bound_s", lambda *_: 0.0)
    assert choose() == chosen


@pytest.mark.slow
def test_a_layer_that_no_rank_holds_is_planned(tmp_path: Path, run_command: Run, refused: Refused) -> None:
    """And the plan says why it has meshes; so does the command."""
    file, out = one_of(MESHES).save(tmp_path / "cut.profile.json"), tmp_path / "plan.json"
    options = ("plan", file, "--workers", 4, "--bandwidth", "1e9", "--memory", "190B", "--mesh")
    answer = json.loads(run_command(*options, "auto", "-o", out, "--json")[1])
    assert (answer["kind"], answer["config"], answer["ranks"]) == ("mixed", "1x2-1x2", 4)
    assert (answer["kinds"]["pipeline"], answer["kinds"]["tensor"]["mesh"]) == (None, "model:4")
    assert [stage["mesh"] for stage in answer["stages"]] == ["model:2", "model:2"]
    plan = pd.Plan.load(out)
    assert plan.ranks == 4
    assert plan.note.startswith("mixed, because the pipeline 1x2-1x2 on the mesh model:2 is the fastest")
    assert "pipeline: no plan; data: no plan; tensor: one worker on the mesh model:4" in plan.note
    assert "verdict: use the pipeline 1x2-1x2 on the mesh model:2" in run_command(*options, "auto")[1]
    assert "--mesh auto" in refused(*options, "none")


FOUR = pd.Cluster.flat(4)


def bare() -> pd.Profile:
    return pd.profile(model(), torch.randn(12, 8), meshes="auto", runs=1)


@pytest.mark.parametrize(
    ("ask", "words"),
    [
        (lambda: pd.plan(one_of(MESHES), SMALL), r"also be sharded over several ranks: plan with mesh='auto' \(--m"),
        (lambda: pd.plan(one_of(()), SMALL), "plan with mesh='auto' .*, from a profile with a layout and meshes='"),
        (
            lambda: pd.plan(one_of(("model:2",)), pd.Cluster.flat(2, 1e9, memory_bytes=100), mesh="auto"),
            "(?s)no plan fits on any mesh; nearest are those .* more than a rank has.*would fit",
        ),
        (lambda: pd.plan(one_of(()), FOUR, mesh="auto"), "has no measurement of a rank of any mesh; prof"),
        (lambda: pd.plan(bare(), FOUR, mesh="auto"), "not measured, a rank of any mesh: the layout has no"),
        (lambda: pd.profile(model(), torch.randn(12, 8), layout=LAYOUT, meshes="auto:x"), "give 'auto', 'auto:4'"),
    ],
)
def test_what_cannot_be_planned_says_what_would_do(ask: Callable[[], Any], words: str) -> None:
    with pytest.raises(pd.PipelineError, match=words):
        ask()


def test_a_mesh_needs_several_ranks(refused: Refused) -> None:
    with pytest.raises(pd.PipelineError, match="smaller minibatches") as alone:
        pd.plan(one_of(()), pd.Cluster.flat(1, 1e9, memory_bytes=190))
    assert "auto" not in str(alone.value)
    error = refused("profile", "recipe.py", "--mesh", "auto", "--mesh", "model:2")
    assert "--mesh auto was given with 1 other --mesh; give it alone" in error
