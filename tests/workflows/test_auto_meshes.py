"""`mesh="auto"`: profile, plan and why; the refusals; and that 'none' changes nothing."""

import json
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from drawn import meshed_cluster, meshed_profile
from torch import nn

import pipedream as pd
from pipedream import cli
from pipedream.core.errors import PlanError, ProfileError
from pipedream.core.model.profile import LayerProfile, Profile, RankProfile
from pipedream.plan_request import PlanRequest
from pipedream.planner import Comparison
from pipedream.workflows import meshes
from pipedream.workflows.plan import plan, plan_and_compare

LAYOUT = pd.Layout("batch:data,d_ff:model", names={"0.weight": "d_ff d_model", "2.weight": "d_model d_ff"})


def model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 24), nn.ReLU(), nn.Linear(24, 8), nn.Linear(8, 4))


def cut_in(parts: int, *, weights: int = 100, seconds: float = 4.0, layers: int = 2) -> tuple[LayerProfile, ...]:
    """Layers whose work and weights are divided; each doubling of the parts adds a quarter of the work."""
    share_s = seconds / parts * (1 + 0.25 * (parts.bit_length() - 1))
    return (LayerProfile(share_s, share_s, 4, weights // parts, 4),) * layers


def one_of(meshes: tuple[str, ...], **sizes: float) -> Profile:
    """A profile with a rank of each mesh that exchanges nothing."""
    none: tuple[tuple[()], ...] = ((),) * int(sizes.get("layers", 2))
    ranks = tuple(
        RankProfile(text, "d_ff:model", cut_in(pd.Mesh(text).size, **sizes), none, none)  # type: ignore[arg-type]
        for text in meshes
    )
    return Profile.of_chain(cut_in(1, **sizes), batch=8, ranks=ranks)  # type: ignore[arg-type]


def test_legal_meshes_are_measured() -> None:
    profile = pd.profile(model(), torch.randn(5, 8), layout=LAYOUT, meshes="auto:2", runs=1)
    assert [(rank.mesh, rank.layout) for rank in profile.ranks] == [("model:2", "batch:data,d_ff:model")]
    (note,) = (note for note in profile.notes if note.startswith("not measured"))
    assert note == "not measured, a rank of data:2: a minibatch of 5 samples cannot be sharded over data:2"
    assert profile.ranks[0].layers[0].parameter_bytes < profile.layers[0].parameter_bytes


@pytest.mark.parametrize(
    ("layout", "most", "legal", "why"),
    [
        ("batch:data,d_ff:model", 4, ["data:2", "model:2", "data:4", "model:4", "data:2,model:2"], ""),
        ("batch:data", 8, ["data:2", "data:4"], "a minibatch of 12 samples cannot be sharded over data:8"),
        ("d_ff:model", 16, ["model:2", "model:4", "model:8"], "has 24 of 'd_ff', which model:16 of the mesh does not"),
        ("d_ff:model,heads:seq", 2, ["model:2"], "nothing of the model is sharded over 'seq'"),
        ("", 8, [], ""),
    ],
)
def test_meshes_that_are_not_legal_are_left_out(layout: str, most: int, legal: list[str], why: str) -> None:
    shapes = {name: tuple(parameter.shape) for name, parameter in model().named_parameters()}
    candidates = pd.Layout(layout, LAYOUT.names).candidates(shapes, 12, most)
    assert [mesh.text for mesh, problem in candidates.items() if not problem] == legal
    assert any(why in problem for problem in candidates.values()) or not why


def test_the_dimension_of_sharded_weights_counts_too() -> None:
    candidates = pd.Layout("batch:data", shard_weights="shard").candidates({"weight": (4, 4)}, 8, 4)
    assert [mesh.text for mesh, why in candidates.items() if not why] == [
        "data:2", "shard:2", "data:4", "shard:4", "data:2,shard:2",
    ]  # fmt: skip


def test_none_is_the_plan_without_meshes() -> None:
    draw = random.Random(1)
    profile, cluster = meshed_profile(draw), meshed_cluster(draw, limited=False, levels=2)
    alone = plan(profile, cluster)
    assert plan(profile, cluster, mesh="none") == alone
    assert plan(profile, cluster, mesh="") == alone


@pytest.mark.parametrize(
    "schedule", ["pipedream", *(pytest.param(name, marks=pytest.mark.slow) for name in ("1f1b", "auto"))]
)
@pytest.mark.parametrize("seed", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_it_is_never_slower_than_a_mesh_by_hand(seed: int, schedule: str) -> None:
    """In simulation."""
    draw = random.Random(seed)
    profile, cluster = meshed_profile(draw), pd.Cluster.flat(4, draw.choice([4.0, 100.0]))
    comparison = plan_and_compare(profile, PlanRequest(cluster, schedule=schedule, mesh="auto"))
    best_s = comparison.candidates[0].period_s
    for mesh in ("none", *(rank.mesh for rank in profile.ranks)):
        by_hand = plan_and_compare(profile, PlanRequest(cluster, schedule=schedule, mesh=mesh)).candidates[0].period_s
        assert best_s <= by_hand * (1 + 1e-9), mesh


@pytest.mark.parametrize("seed", [8, 18, *(pytest.param(seed, marks=pytest.mark.long) for seed in range(19, 60))])
def test_plans_on_one_mesh_that_cannot_win_are_not_simulated(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same plan if all are compared."""
    draw = random.Random(seed)
    profile, cluster = meshed_profile(draw), meshed_cluster(draw, limited=seed % 2 == 1, levels=1 + seed // 2 % 2)

    def choose() -> pd.Plan | str:
        try:
            return replace(plan(profile, cluster, mesh="auto"), note="")
        except PlanError as error:
            return str(error)

    chosen, compare_on = choose(), meshes._SingleMesh.compare_on
    monkeypatch.setattr(meshes._SingleMesh, "compare_on", lambda *args, rival_s=0.0: compare_on(*args))
    monkeypatch.setattr(meshes._SingleMesh, "compute_bound_s", lambda *_: 0.0)
    assert choose() == chosen


def kinds_of(comparison: Comparison) -> dict[str, str]:
    return {kind: candidate.config for kind, candidate in comparison.kinds().items() if candidate is not None}


@pytest.mark.slow
def test_a_layer_that_no_rank_holds_is_planned() -> None:
    """And the plan says why it has meshes; so does its JSON."""
    profile, cluster = one_of(("model:2", "model:4")), pd.Cluster.flat(4, 1e9, memory_bytes=190)
    with pytest.raises(
        PlanError, match=r"a stage may also be sharded over several ranks: plan with mesh='auto' \(--mesh"
    ):
        plan(profile, cluster)
    comparison = plan_and_compare(profile, PlanRequest(cluster, schedule="pipedream", mesh="auto"))
    assert [str(mesh) for mesh in comparison.plan.meshes] == ["model:2", "model:2"]
    assert (comparison.plan.config, comparison.plan.ranks, comparison.candidates[0].kind) == ("1x2-1x2", 4, "mixed")
    assert kinds_of(comparison) == {"tensor": "1x4", "mixed": "1x2-1x2"}
    assert comparison.plan.note.startswith("mixed, because the pipeline 1x2-1x2 on the mesh model:2 is the fastest")
    assert "pipeline: no plan; data: no plan; tensor: one worker on the mesh model:4" in comparison.plan.note


def test_without_a_profile_of_meshes_the_refusal_says_how_to_get_one() -> None:
    with pytest.raises(PlanError, match=r"plan with mesh='auto' .*, from a profile with a layout and meshes='auto'"):
        plan(one_of(()), pd.Cluster.flat(4, 1e9, memory_bytes=190))
    with pytest.raises(PlanError, match=r"smaller minibatches") as alone:
        plan(one_of(()), pd.Cluster.flat(1, 1e9, memory_bytes=190))
    assert "auto" not in str(alone.value), "a mesh needs several ranks"


def test_when_nothing_fits_it_says_by_how_much_and_what_would() -> None:
    with pytest.raises(
        PlanError, match=r"no plan fits on any mesh; nearest are those .* more than a rank has"
    ) as short:
        plan(one_of(("model:2",)), pd.Cluster.flat(2, 1e9, memory_bytes=100), mesh="auto")
    assert "would fit" in str(short.value)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "layers", "weights", "kind", "config"),
    [
        ("model:2", 4, 10**9, "pipeline", "1-1-1-1"),
        ("model:2", 1, 4, "data", "4"),
        ("model:4", 1, 10**10, "tensor", "1x4"),
    ],
)
def test_each_kind_is_chosen_where_it_is_best(mesh: str, layers: int, weights: int, kind: str, config: str) -> None:
    request = PlanRequest(pd.Cluster.flat(4, 1e9), schedule="pipedream", mesh="auto")
    best = plan_and_compare(one_of((mesh,), layers=layers, weights=weights), request)
    assert (best.candidates[0].kind, best.plan.config) == (kind, config)
    assert kind != "tensor" or best.verdict.startswith("use one worker on the mesh model:4")


def test_meshes_are_unknown(tmp_path: Path, refused: Callable[..., str]) -> None:
    with pytest.raises(PlanError, match=r"the profile has no measurement of a rank of any mesh; profile with a layout"):
        plan(one_of(()), pd.Cluster.flat(4), mesh="auto")
    with pytest.raises(ProfileError, match=r"meshes='auto:x' was given; give 'auto', 'auto:4'"):
        pd.profile(model(), torch.randn(12, 8), layout=LAYOUT, meshes="auto:x")
    bare = pd.profile(model(), torch.randn(12, 8), meshes="auto", runs=1)
    with pytest.raises(PlanError, match=r"not measured, a rank of any mesh: the layout has no rule"):
        plan(bare, pd.Cluster.flat(4), mesh="auto")
    assert "--mesh auto was given with 1 other --mesh; give it alone" in refused(
        "profile", "recipe.py", "--mesh", "auto", "--mesh", "model:2"
    )


@pytest.mark.slow
def test_the_command_prints_kinds(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], refused: Callable[..., str]
) -> None:
    file = tmp_path / "cut.profile.json"
    one_of(("model:2", "model:4")).save(file)
    options = [str(file), "--workers", "4", "--bandwidth", "1e9", "--memory", "190", "--mesh", "auto"]
    assert cli.main(["plan", *options, "-o", str(tmp_path / "plan.json"), "--json"]) == 0
    answer = json.loads(capfd.readouterr().out)
    assert (answer["kind"], answer["config"], answer["ranks"]) == ("mixed", "1x2-1x2", 4)
    assert answer["kinds"]["pipeline"] is None
    assert answer["kinds"]["tensor"]["mesh"] == "model:4"
    assert [stage["mesh"] for stage in answer["stages"]] == ["model:2", "model:2"]
    assert pd.Plan.load(tmp_path / "plan.json").ranks == 4
    assert cli.main(["plan", *options]) == 0
    out = capfd.readouterr().out
    assert "verdict: use the pipeline 1x2-1x2 on the mesh model:2" in out
    assert "mixed, because" in out
    assert "--mesh auto" in refused("plan", *options[:-1], "none")
