"""Nouns as files: what is saved is what is loaded, and what is not the noun is refused with the place."""

import json
import math
import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import drawn
import pytest
from hypothesis import given, strategies as st
from marks import few
from programs import program_of

import pipedream as pd
from pipedream.apps.cli.options import read_profile
from pipedream.core import artifact
from pipedream.core.model.profile import RankProfile
from pipedream.core.schedule.timeline import GradientVersions, Span

counts = st.integers(1, 3)
sizes = st.integers(0, 2**60)
seconds = st.floats(0, 1e6, allow_nan=False)
words = st.text(max_size=8)
levels, runtime = st.builds(pd.Level, st.integers(1, 8), st.floats(1e-3, 1e12), seconds), drawn.runtime_costs()


def some(strategy: st.SearchStrategy[Any], most: int = 2, least: int = 0) -> st.SearchStrategy[Any]:
    return st.lists(strategy, min_size=least, max_size=most).map(tuple)


alike = st.builds(pd.Cluster, some(levels, 3, 1), st.none() | st.integers(1, 2**50), words)
clusters = alike | drawn.clusters(3)


@st.composite
def graphs(draw: st.DrawFn) -> pd.LayerGraph:
    n = draw(st.integers(1, 5))
    layers = tuple(pd.Layer(f"layer{i}", draw(words), draw(some(words))) for i in range(n))
    pairs = [(i, j) for i in range(n) for j in range(i + 1, n)]
    edges = tuple(draw(st.lists(st.sampled_from(pairs), unique=True))) if pairs else ()
    tie = st.lists(st.integers(0, n - 1), min_size=1, max_size=3, unique=True).map(tuple)
    return pd.LayerGraph(layers, edges, draw(some(tie)))


@st.composite
def profiles(draw: st.DrawFn) -> pd.Profile:
    graph = draw(graphs())
    cost = st.builds(pd.LayerProfile, seconds, seconds, sizes, sizes, sizes, seconds, seconds)
    layers, versions = tuple(draw(cost) for _ in graph.layers), draw(st.dictionaries(words, words, max_size=2))
    shapes, more = draw(some(st.lists(counts).map(tuple))), {"versions": versions, "runtime": draw(runtime)}
    return pd.Profile("Net", graph, layers, draw(counts), shapes, draw(words), runs=draw(counts), **more)


@st.composite
def plans(draw: st.DrawFn) -> pd.Plan:
    """Draws plans of any replicas, depth and update delay, whose stages have any costs."""
    plan = draw(drawn.straight()).plan
    costs = st.builds(pd.Stage, st.just(0), st.just(1), counts, *[seconds] * 3, *[sizes] * 5, names=some(words))
    rows = [replace(draw(costs), first=row.first, last=row.last, replicas=row.replicas) for row in plan.stages]
    cluster = draw(drawn.clusters(plan.workers))
    return replace(plan, stages=tuple(rows), cluster=cluster, model=draw(words), runtime=draw(runtime))


spans = st.builds(Span, st.integers(0, 3), st.sampled_from(["F", "wait"]), counts, counts, seconds, seconds)
tags = st.builds(GradientVersions, counts, counts, counts, counts, counts)
timelines = st.builds(
    pd.Timeline, st.just("gpipe"), st.just("simulated"), st.just(4), some(spans, 9), st.just(8),
    gradient_versions=some(tags, 9), peak_bytes=some(sizes, 4),
)  # fmt: skip
placements = some(counts, 4, 1).map(pd.schedules.Placement.replicated)
nouns = st.one_of(clusters, graphs(), profiles(), plans(), timelines, placements)


@few
@given(nouns)
def test_what_is_saved_is_what_is_loaded(noun: artifact.Artifact) -> None:
    check_round_trip(noun)
    assert str(noun)


@pytest.mark.parametrize("name", [*pd.schedules.METHODS, "evaluation"])
def test_programs_are_read_as_they_were_written(name: str) -> None:
    plan = pd.Plan.uniform(3, replicas=(2, 1, 1))
    if name in pd.schedules.STAGE_ORDERS:
        plan = pd.schedules.uniform(name, 2)
    schedule = pd.schedules.evaluation(plan) if name == "evaluation" else pd.schedules.build(name, plan)
    program = pd.lower(schedule)
    check_round_trip(program)
    assert pd.Program.from_json(program.to_json()).updates.compensation == schedule.updates.compensation


def check_round_trip(noun: artifact.Artifact) -> None:
    text = noun.to_json()
    again = type(noun).from_json(text)
    assert again == noun
    assert again.to_json() == text
    assert json.loads(text)["artifact"] == type(noun).__name__


def test_save_and_load(tmp_path: Path) -> None:
    plan = pd.Plan.uniform(3, replicas=(2, 1, 1))
    path = plan.save(tmp_path / "deep" / "plan.json")
    assert pd.Plan.load(path) == plan
    assert [item.name for item in path.parent.iterdir()] == ["plan.json"]


def lacking(name: str) -> Callable[[dict[str, Any]], Any]:
    return lambda d: {key: value for key, value in d.items() if key != name}


def with_stage(**changes: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda d: d | {"stages": [d["stages"][0] | changes, *d["stages"][1:]]}


def with_ranks(*ranks: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda d: d | {"ranks": list(ranks)}


PLAN, PROGRAM = pd.Plan.uniform(2), program_of("1f1b", pd.Plan.uniform(2), 2)
FORWARD = r"Plan.stages\[0\].forward_s should be a number up to 1e60"
REFUSED: list[tuple[artifact.Artifact, Callable[[dict[str, Any]], Any], str]] = [
    (PLAN, lambda d: d | {"artifact": "Profile"}, "should hold a Plan, but holds 'Profile'"),
    (PLAN, lambda d: {"stages": []}, "should hold a Plan, but holds None"),
    (PLAN, lambda d: [d], "should hold a Plan, but holds 'list'"),
    (PLAN, lambda d: d | {"format": 99}, "format 99, this library reads format 1"),
    (PLAN, lacking("format"), "format None"),
    (PLAN, lambda d: d | {"colour": "red"}, r"Plan has unknown fields \['colour'\]"),
    (PLAN, lacking("cluster"), "Plan lacks the field 'cluster'"),
    (PLAN, lambda d: d | {"batch": "8"}, "Plan.batch should be a whole number, found '8'"),
    (PLAN, lambda d: d | {"batch": True}, "Plan.batch should be a whole number, found True"),
    (PLAN, lambda d: d | {"in_flight": 3}, "Plan.in_flight should be a list, found 3"),
    (PLAN, lambda d: d | {"note": 3}, "Plan.note should be a str, found 3"),
    (PLAN, with_stage(mesh="model"), r"Plan.stages\[0\]: the mesh 'model' has 'model', which is not a name"),
    *((PLAN, with_stage(forward_s=value), FORWARD) for value in (math.nan, math.inf, -math.inf)),
    (PLAN, lambda d: d | {"in_flight": [1, 2]}, "Plan: .*must not grow towards the output"),
    (PROGRAM, lambda d: d | {"weights": {"rule": "newest"}}, "weights.rule should be one of"),
    (PROGRAM, lambda d: d | {"weights": {"rule": "flush"}}, "lacks the field 'per_update'"),
    (PROGRAM, lambda d: d | {"kinds": ["F", "X"]}, r"Program.kinds\[1\] should be one of"),
    (PROGRAM, with_ranks({"warmup": "0F0 0G1", "period": ""}), r"ranks\[0\].warmup: '0G1' is not"),
    (PROGRAM, with_ranks({"warmup": "1F0", "period": ""}), "'1F0' is not an instruction of this rank"),
    (PROGRAM, with_ranks({"warmup": 3, "period": ""}), r"Program.ranks\[0\]\['warmup'\] should be a str"),
    (PROGRAM, with_ranks(3), r"Program.ranks\[0\] should be an object"),
    (PROGRAM, lambda d: d | {"ranks": 3}, "Program.ranks should be a list"),
    (PROGRAM, lambda d: d | {"ranks": d["ranks"][:1]}, "the placement has 2 ranks, the program is for 1"),
    (PROGRAM, lambda d: d | {"cycle": 3}, r"minibatches \(2\) and updates \(2, 2\), found 3"),
    (PROGRAM, lambda d: d | {"microbatches": 0}, r"minibatches \(0\)"),
    (PROGRAM, lambda d: d | {"updates": {"per_update": [2]}}, "has 2 stages, the plan 2, the update rule 1"),
    (PROGRAM, lacking("cycle"), r"lacks the fields \['cycle'\]"),
    (PROGRAM, lambda d: d | {"colour": 1}, r"unknown fields \['colour'\]"),
    (PROGRAM, lambda d: d | {"channels": [d["channels"][0] | {"carries": "water"}]}, r"channels\[0\].carries .*water"),
]


@pytest.mark.parametrize(("noun", "change", "words"), REFUSED, ids=[words for *_, words in REFUSED])
def test_what_is_not_the_noun_is_refused_with_the_file_and_the_place(
    noun: artifact.Artifact, change: Callable[[dict[str, Any]], Any], words: str, tmp_path: Path
) -> None:
    path = tmp_path / "noun.json"
    path.write_text(json.dumps(change(json.loads(noun.to_json()))), encoding="utf-8")
    with pytest.raises(pd.errors.ArtifactError, match=words) as caught:
        type(noun).load(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("text", [b"", b"{", b"plan", b"[" * 100_000, b"\xff\xfe\x00"])
def test_what_is_no_json(text: bytes, tmp_path: Path) -> None:
    path = tmp_path / "nowhere.json"
    with pytest.raises(pd.errors.ArtifactError, match=r"nowhere\.json does not exist; give the file of a Plan"):
        pd.Plan.load(path)
    path.write_bytes(text)
    with pytest.raises(pd.errors.ArtifactError, match="cannot read the Plan" if b"\xff" in text else "is not JSON"):
        pd.Plan.load(path)


def test_what_does_not_end_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    os.mkfifo(tmp_path / "pipe.csv")
    (tmp_path / "link.csv").symlink_to("/dev/zero")
    (tmp_path / "large.csv").write_text("{}" * 100)
    monkeypatch.setattr(artifact, "MAX_TEXT_BYTES", 100)
    for name, words in (
        ("pipe.csv", "a pipe or a device"),
        ("link.csv", "a pipe or a device"),
        ("large.csv", "has 200 bytes"),
    ):
        for read in (pd.Plan.load, read_profile, pd.schedules.load_schedule):
            with pytest.raises(pd.PipelineError, match=words):
                read(tmp_path / name)


def test_what_is_no_file_is_not_replaced(tmp_path: Path) -> None:
    """As root, a rename would replace the device by a file."""
    device, link = tmp_path / "null", tmp_path / "link.json"
    os.mkfifo(device)
    reader = os.open(device, os.O_RDONLY | os.O_NONBLOCK)
    artifact.write_text(device, "text")
    assert os.read(reader, 9) == b"text"
    os.close(reader)
    link.symlink_to("file.json")
    artifact.write_text(link, "text")
    assert link.is_symlink()
    assert (tmp_path / "file.json").read_text() == "text"
    with pytest.raises(pd.errors.ArtifactError, match=r"cannot write \.: Is a directory; choose another place"):
        artifact.write_text(".", "text")


@pytest.mark.parametrize("wrong", ["copy_s", "loss_s", "update_temporary_bytes", "optimizer_bytes"])
def test_costs_are_not_negative(wrong: str) -> None:
    layers: Any = (pd.LayerProfile(1.0, 2.0, 3, 4),)
    for make in (partial(pd.Profile.of_chain, layers), partial(RankProfile, "model:2", "", layers, ((),), ((),))):
        with pytest.raises(ValueError, match=f"{wrong} cannot be negative, found -1"):
            make(**{wrong: -1})


def test_the_name_of_a_file_is_no_plan() -> None:
    words = r"expected a Plan, got a str; read the file: pipedream.Plan.load\('plan.json'\)"
    plan: Any = "plan.json"
    for call in [lambda: pd.simulate(plan), lambda: pd.Pipeline(None, plan, loss=None, optimizer=list)]:
        with pytest.raises(pd.errors.PlanError, match=words):
            call()
    with pytest.raises(pd.errors.PlanError, match=r"expected a Profile, got a PosixPath; read the file"):
        pd.plan(Path("profile.json"), pd.Cluster.flat(2))  # type: ignore[arg-type]
