"""Nouns as files: what is saved is what is loaded, and what is not the noun is refused with the place."""

import json
import math
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, strategies as st

import pipedream as pd
from pipedream.cli.options import read_profile
from pipedream.core import artifact
from pipedream.core.artifact import Artifact
from pipedream.core.errors import ArtifactError, PlanError, ScheduleError
from pipedream.core.hardware.cluster import Cluster, Level
from pipedream.core.model.graph import Layer, LayerGraph
from pipedream.core.model.profile import LayerProfile, Profile, RankProfile
from pipedream.core.plan import depth
from pipedream.core.plan.placement import Placement
from pipedream.core.plan.stage import Stage
from pipedream.core.schedule.lowering import lower
from pipedream.core.schedule.program import Program
from pipedream.core.schedule.timeline import GradientVersions, Span, Timeline
from pipedream.schedules import METHODS, STAGE_ORDERS, build, evaluation, uniform
from pipedream.schedules.pytorch_csv import load_torch_csv

counts = st.integers(1, 3)
sizes = st.integers(0, 2**60)
seconds = st.floats(0, 1e6, allow_nan=False)
words = st.text(max_size=8)


@st.composite
def clusters(draw: st.DrawFn) -> Cluster:
    level = st.builds(Level, st.integers(1, 8), st.floats(1e-3, 1e12), seconds)
    levels = tuple(draw(st.lists(level, min_size=1, max_size=3)))
    return Cluster(levels, draw(st.none() | st.integers(1, 2**50)), draw(words))


@st.composite
def graphs(draw: st.DrawFn) -> LayerGraph:
    n = draw(st.integers(1, 5))
    layers = tuple(Layer(f"layer{i}", draw(words), tuple(draw(st.lists(words, max_size=2)))) for i in range(n))
    pairs = [(i, j) for i in range(n) for j in range(i + 1, n)]
    edges = tuple(draw(st.lists(st.sampled_from(pairs), unique=True))) if pairs else ()
    tie = st.lists(st.integers(0, n - 1), min_size=1, max_size=3, unique=True).map(tuple)
    return LayerGraph(layers, edges, tuple(draw(st.lists(tie, max_size=2))))


@st.composite
def profiles(draw: st.DrawFn) -> Profile:
    graph = draw(graphs())
    cost = st.builds(LayerProfile, seconds, seconds, sizes, sizes, sizes, seconds, seconds)
    layers = tuple(draw(cost) for _ in graph.layers)
    shapes = tuple(draw(st.lists(st.lists(counts).map(tuple), max_size=2)))
    versions = draw(st.dictionaries(words, words, max_size=2))
    return Profile("Net", graph, layers, draw(counts), shapes, draw(words), runs=draw(counts), versions=versions)


@st.composite
def plans(draw: st.DrawFn) -> pd.Plan:
    replicas = draw(st.lists(counts, min_size=1, max_size=4))
    stages, first = [], 0
    for count in replicas:
        last = first + draw(counts)
        numbers = [draw(sizes) for _ in range(5)]
        names = tuple(draw(st.lists(words, max_size=2)))
        stages.append(Stage(first, last, count, draw(seconds), draw(seconds), draw(seconds), *numbers, names=names))
        first = last
    update_delay = tuple(draw(st.integers(0, 1)) if r > 1 and len(replicas) > 1 else 0 for r in replicas)
    cluster = draw(
        clusters().filter(lambda cluster: cluster.workers >= sum(replicas)) | st.just(Cluster.flat(sum(replicas)))
    )
    return pd.Plan(
        tuple(stages), depth.noam(tuple(replicas), update_delay), cluster, update_delay, draw(words), draw(counts)
    )


@st.composite
def timelines(draw: st.DrawFn) -> Timeline:
    span = st.builds(Span, st.integers(0, 3), st.sampled_from(["F", "wait"]), counts, counts, seconds, seconds)
    tag = st.builds(GradientVersions, counts, counts, counts, counts, counts)
    spans, tags = tuple(draw(st.lists(span))), tuple(draw(st.lists(tag)))
    return Timeline(
        "gpipe", "simulated", 4, spans, 8, gradient_versions=tags, peak_bytes=tuple(draw(st.lists(sizes, max_size=4)))
    )


placements = st.lists(counts, min_size=1, max_size=4).map(lambda r: Placement.replicated(tuple(r)))
nouns = st.one_of(clusters(), graphs(), profiles(), plans(), timelines(), placements)


@given(nouns)
def test_round_trip(noun: Artifact) -> None:
    check_round_trip(noun)


@pytest.mark.parametrize("name", [*METHODS, "evaluation"])
def test_programs_are_read_as_they_were_written(name: str) -> None:
    if name in STAGE_ORDERS:
        schedule = build(name, uniform(name, 2))
    else:
        plan = pd.Plan.uniform(3, replicas=(2, 1, 1))
        schedule = evaluation(plan) if name == "evaluation" else build(name, plan)
    program = lower(schedule)
    check_round_trip(program)
    assert Program.from_json(program.to_json()).updates.compensation == schedule.updates.compensation


def check_round_trip(noun: Artifact) -> None:
    text = noun.to_json()
    again = type(noun).from_json(text)
    assert again == noun
    assert again.to_json() == text
    assert json.loads(text)["artifact"] == type(noun).__name__


@given(nouns)
def test_prints(noun: Artifact) -> None:
    assert str(noun)


def test_save_and_load(tmp_path: Path) -> None:
    plan = pd.Plan.uniform(3, replicas=(2, 1, 1))
    path = plan.save(tmp_path / "deep" / "plan.json")
    assert pd.Plan.load(path) == plan
    assert [item.name for item in path.parent.iterdir()] == ["plan.json"]


Change = Callable[[dict[str, Any]], Any]
REFUSED: dict[str, tuple[Change, str]] = {
    "another noun": (lambda d: d | {"artifact": "Profile"}, "should hold a Plan, but holds 'Profile'"),
    "no noun": (lambda d: {"stages": []}, "should hold a Plan, but holds None"),
    "a list": (lambda d: [d], "should hold a Plan, but holds 'list'"),
    "another format": (lambda d: d | {"format": 99}, "format 99, this library reads format 1"),
    "no format": (lambda d: {k: v for k, v in d.items() if k != "format"}, "format None"),
    "an unknown field": (lambda d: d | {"colour": "red"}, r"Plan has unknown fields \['colour'\]"),
    "a lacking field": (lambda d: {k: v for k, v in d.items() if k != "cluster"}, "Plan lacks the field 'cluster'"),
    "a word for a number": (lambda d: d | {"batch": "8"}, "Plan.batch should be a whole number, found '8'"),
    "a truth for a number": (lambda d: d | {"batch": True}, "Plan.batch should be a whole number, found True"),
    "half a sample": (lambda d: d | {"batch": 1.5}, "Plan.batch should be a whole number, found 1.5"),
    "a number for a list": (lambda d: d | {"in_flight": 3}, "Plan.in_flight should be a list, found 3"),
    "a word in a list": (lambda d: d | {"in_flight": [2, "x"]}, r"Plan.in_flight\[1\] should be a whole number"),
    "a number for a word": (lambda d: d | {"note": 3}, "Plan.note should be a str, found 3"),
    "a mesh without a size": (
        lambda d: d | {"stages": [d["stages"][0] | {"mesh": "model"}, d["stages"][1]]},
        r"Plan.stages\[0\]: the mesh 'model' has 'model', which is not a name",
    ),
    "what the noun forbids": (lambda d: d | {"in_flight": [1, 2]}, "Plan: .*must not grow towards the output"),
}


@pytest.mark.parametrize("story", sorted(REFUSED))
def test_refused(story: str, tmp_path: Path) -> None:
    change, message = REFUSED[story]
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(change(json.loads(pd.Plan.uniform(2).to_json()))), encoding="utf-8")
    with pytest.raises(ArtifactError, match=message) as caught:
        pd.Plan.load(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_numbers_are_finite(value: float) -> None:
    plan = replace(pd.Plan.uniform(1), cluster=Cluster((Level(1, 1.0),)))
    data = json.loads(plan.to_json())
    data["stages"][0]["forward_s"] = value
    with pytest.raises(ArtifactError, match=r"Plan.stages\[0\].forward_s should be a number up to 1e60"):
        pd.Plan.from_json(json.dumps(data))


@pytest.mark.parametrize("text", ["", "{", "plan", "[" * 100_000])
def test_what_is_not_json(text: str) -> None:
    with pytest.raises(ArtifactError, match="is not JSON"):
        pd.Plan.from_json(text)


def test_no_file(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match=r"nowhere\.json does not exist; give the file of a Plan"):
        pd.Plan.load(tmp_path / "nowhere.json")
    (tmp_path / "bytes").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ArtifactError, match="cannot read the Plan"):
        pd.Plan.load(tmp_path / "bytes")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d | {"weights": {"rule": "newest"}}, "weights.rule should be one of"),
        (lambda d: d | {"weights": {"rule": "flush"}}, "lacks the field 'per_update'"),
        (lambda d: d | {"weights": 3}, "weights should be an object"),
        (lambda d: d | {"kinds": ["F", "X"]}, r"Program.kinds\[1\] should be one of"),
        (lambda d: d | {"ranks": [{"warmup": "0F0 0G1", "period": ""}]}, r"ranks\[0\].warmup: '0G1' is not"),
        (lambda d: d | {"ranks": [{"warmup": "1F0", "period": ""}]}, "'1F0' is not an instruction of this rank"),
        (lambda d: d | {"ranks": [{"warmup": 3, "period": ""}]}, r"Program.ranks\[0\]\['warmup'\] should be a str"),
        (lambda d: d | {"ranks": [3]}, r"Program.ranks\[0\] should be an object"),
        (lambda d: d | {"ranks": 3}, "Program.ranks should be a list"),
        (lambda d: d | {"ranks": d["ranks"][:1]}, "the placement has 2 ranks, the program is for 1"),
        (lambda d: d | {"cycle": 3}, r"minibatches \(2\) and updates \(2, 2\), found 3"),
        (lambda d: d | {"microbatches": 0}, r"minibatches \(0\)"),
        (lambda d: d | {"updates": {"per_update": [2]}}, "the placement has 2 stages, the plan 2, the update rule 1"),
        (lambda d: {k: v for k, v in d.items() if k != "cycle"}, r"lacks the fields \['cycle'\]"),
        (lambda d: d | {"colour": 1}, r"unknown fields \['colour'\]"),
        (lambda d: d | {"channels": [d["channels"][0] | {"carries": "water"}]}, r"channels\[0\].carries .*'water'"),
    ],
)
def test_programs_refused(change: Change, message: str) -> None:
    data = json.loads(lower(build("1f1b", pd.Plan.uniform(2), 2)).to_json())
    with pytest.raises(ArtifactError, match=message):
        Program.from_json(json.dumps(change(data)))


def test_a_plan_keeps_the_keys_of_earlier_files() -> None:
    plan = pd.Plan.uniform(4, order=(0, 1, 0, 1))
    data = json.loads(plan.to_json())
    assert (data["order"], data["tied"]) == ([0, 1, 0, 1], [])
    assert not {"worker_order", "tied_weights"} & data.keys()
    assert pd.Plan.from_json(json.dumps(data)) == plan


def test_what_does_not_end_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("/dev/zero")
    (tmp_path / "large").write_text("{}" * 100)
    monkeypatch.setattr(artifact, "MAX_TEXT_BYTES", 100)
    for name, words in (("pipe", "a pipe or a device"), ("link", "a pipe or a device"), ("large", "has 200 bytes")):
        with pytest.raises(ArtifactError, match=words):
            pd.Plan.load(tmp_path / name)
        with pytest.raises(ArtifactError, match=words):
            read_profile(tmp_path / name)
        with pytest.raises(ScheduleError, match=words):
            load_torch_csv(tmp_path / name)


def test_costs_are_not_negative() -> None:
    layer = LayerProfile(1.0, 2.0, 3, 4)
    graph = LayerGraph.chain((Layer("0", "Linear", ()),))
    for wrong in ("copy_s", "loss_s", "update_temporary_bytes", "optimizer_bytes"):
        with pytest.raises(ValueError, match=f"{wrong} cannot be negative, found -1"):
            Profile("model", graph, (layer,), 8, **{wrong: -1})
        with pytest.raises(ValueError, match=f"{wrong} cannot be negative, found -1"):
            RankProfile("model:2", "", (layer,), ((),), ((),), **{wrong: -1})


def test_the_name_of_a_file_is_no_plan() -> None:
    words = r"expected a Plan, got a str; read the file: pipedream.Plan.load\('plan.json'\)"
    plan: Any = "plan.json"
    calls = [lambda: pd.simulate(plan), lambda: pd.Pipeline(None, plan, loss=None, optimizer=list)]
    for call in calls:
        with pytest.raises(PlanError, match=words):
            call()
    with pytest.raises(PlanError, match=r"expected a Profile, got a PosixPath; read the file"):
        pd.plan(Path("profile.json"), pd.Cluster.flat(2))  # type: ignore[arg-type]
