"""The choice among finalists by simulation: never slower than any of them, at a batch that is said."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
from drawn import runtime_costs
from hypothesis import assume, example, given, strategies as st
from marks import few

import pipedream as pd
from pipedream.plan_request import PlanRequest
from pipedream.planner import list_finalists
from pipedream.workflows import methods, stage_search
from tests.planner.planned import compare

US = 1e-6
ROWS = (
    (150, 250, 131_072, 640, 131_072), (50, 100, 131_072, 128, 131_072), (20, 30, 131_072, 0, 131_072),
    (450, 800, 262_144, 18_600, 0), (80, 150, 262_144, 256, 262_144), (30, 50, 262_144, 0, 262_144),
    (150, 100, 65_536, 0, 131_072), (20, 20, 65_536, 0, 65_536),
    (50, 100, 8_192, 131_000, 65_536), (8, 12, 1_280, 2_600, 0),
)  # fmt: skip
LAYERS = tuple(pd.LayerProfile(f * US, b * US, *sizes) for f, b, *sizes in ROWS)
DIGITS = pd.Profile.of_chain(LAYERS, batch=32, update_s=200 * US, update_fixed_s=100 * US, loss_s=30 * US)
"""The layers of examples/digits.py, with the bytes that it has and seconds of their order."""
EIGHT = pd.Cluster.flat(8, 1.25e9, 1e-4)
FOUR = pd.Cluster.flat(4, 1.25e9, 1e-4)


def with_fixed_seconds(layer: pd.LayerProfile, fraction: float) -> pd.LayerProfile:
    """Returns a layer of which each microbatch takes this fraction, however small."""
    return replace(layer, forward_fixed_s=fraction * layer.forward_s, backward_fixed_s=fraction / 2 * layer.backward_s)


@st.composite
def profiles(draw: st.DrawFn) -> pd.Profile:
    seconds, size = st.floats(1e-4, 1e-2), st.integers(0, 10**7)
    layer = st.builds(pd.LayerProfile, seconds, seconds, output_bytes=size, parameter_bytes=size, activation_bytes=size)
    layers, fixed = draw(st.lists(layer, min_size=1, max_size=8)), draw(st.sampled_from([0.0, 0.25, 1.0]))
    return pd.Profile.of_chain(
        tuple(with_fixed_seconds(layer, fixed) for layer in layers),
        batch=draw(st.sampled_from([1, 8, 32])),
        update_s=1e-3,
        update_fixed_s=draw(st.sampled_from([0.0, 1e-3])),
        runtime=draw(runtime_costs(1e-3)),
    )


@st.composite
def clusters(draw: st.DrawFn) -> pd.Cluster:
    rate, latency_s = st.floats(7, 11).map(lambda power: 10**power), st.sampled_from([0.0, 1e-5, 1e-3])
    memory = draw(st.sampled_from([None, None, 10**8]))
    levels = [pd.Level(draw(st.integers(1, 5)), draw(rate), draw(latency_s))]
    if draw(st.booleans()):
        levels = [pd.Level(2, draw(rate), draw(latency_s)), pd.Level(2, draw(rate), draw(latency_s))]
    return pd.Cluster(tuple(levels), memory)


BOUNDED_METHODS = ("pipedream", "pipedream_2bw", "xpipe", "pipemare", "1f1b", "gpipe", "zb_h1")
HIDDEN_LATENCY = pd.Profile.of_chain((pd.LayerProfile(0.0078125, 0.0078125, 0, 0, 0),) * 3, batch=1, update_s=1e-3)
HIDDEN_LATENCY = replace(HIDDEN_LATENCY, runtime=replace(HIDDEN_LATENCY.runtime, message_s=2e-5))
"""Messages keep the first stage of 2-2 busy for longer than the latency of its sum, which they hide."""


@given(profiles(), clusters(), st.sampled_from([*BOUNDED_METHODS]), st.data())
def test_no_plan_beats_its_bound(profile: pd.Profile, cluster: pd.Cluster, schedule: str, data: st.DataObject) -> None:
    """Replica counts, depth, update delay and which stages recompute are drawn, too."""
    free, counts = min(cluster.workers, 8), []
    while free and len(counts) < len(profile.layers):
        counts.append(data.draw(st.integers(1, free)))
        free -= counts[-1]
    depth = data.draw(st.sampled_from(["noam", "full"]))
    delay = data.draw(st.sampled_from([0, 1])) if schedule == "pipedream" else 0
    try:
        plan = pd.plan(profile, cluster, schedule=schedule, shape=tuple(counts), in_flight=depth, update_delay=delay)
        again = tuple(replace(stage, recompute=data.draw(st.booleans())) for stage in plan.stages)
        plan = replace(plan, stages=again)
        period_s = methods.score(plan).period_s
    except pd.PipelineError:
        assume(False)
    assert stage_search.make_candidate(plan, "").least_s <= period_s * (1 + 1e-9)


@few
@given(
    profiles(),
    clusters(),
    st.sampled_from(["pipedream", "pipedream", "1f1b"]),
    st.sampled_from([0, 1]),
    st.sampled_from([1.0, 1.5, float("inf")]),
)
@example(HIDDEN_LATENCY, pd.Cluster((pd.Level(2, 1e7, 1e-5), pd.Level(2, 1e7))), "pipedream", 0, 1.0)
def test_searches_that_are_left_out_find_nothing_faster(
    profile: pd.Profile, cluster: pd.Cluster, schedule: str, update_delay: int, link_factor: float
) -> None:
    """All finalists, searched for and simulated one by one; beside a rival that is not faster than they."""
    request = PlanRequest(cluster, schedule=schedule, update_delay=update_delay if schedule == "pipedream" else 0)
    search, seconds = stage_search.StageSearch(profile, request), []
    for finalist in list_finalists("any", profile, cluster.workers):
        with suppress(pd.PipelineError):
            plan = search.plan_best(*finalist)
            if profile.batch == 1 or plan.microbatches <= profile.batch:
                seconds.append(methods.score(plan).period_s)
    assume(seconds)
    chosen = stage_search.StageSearch(profile, request).compare(methods.score, link_factor * min(seconds)).candidates[0]
    assert chosen.period_s is not None
    assert chosen.period_s <= min(seconds) * (1 + 1e-9)


LATE_ROWS = (
    (0.00232, 0.005141, 0), (0.007663, 0.008265, 1733911), (0.009959, 0.0001, 2362892), (0.005869, 0.002428, 0),
    (0.0001, 0.01, 0), (0.009959, 0.0001, 2362892), (0.008866, 0.007244, 182691), (0.00232, 0.005141, 19826),
)  # fmt: skip
DELAYED_SUMS = pd.Profile.of_chain(tuple(pd.LayerProfile(f, b, 0, size, 0) for f, b, size in LATE_ROWS), update_s=1e-3)
"""A straight pipeline is fastest by its slowest stage, but 2-2 hides its sums if updates are delayed."""


@few
@given(profiles(), clusters(), st.sampled_from(["pipedream", "pipedream", "1f1b"]), st.sampled_from([0, 1]))
@example(DELAYED_SUMS, pd.Cluster((pd.Level(2, 4.75e8), pd.Level(2, 1e7))), "pipedream", 1)
def test_losing_plans_need_no_bytes(profile: pd.Profile, cluster: pd.Cluster, schedule: str, update_delay: int) -> None:
    """The same plan with those that are slower than a simulated pipeline, and with all of them, planned in full."""
    request = PlanRequest(cluster, schedule=schedule, update_delay=update_delay if schedule == "pipedream" else 0)

    def choose(measured_share: float) -> pd.Plan | str:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(stage_search, "MEASURED_SHARE", measured_share)
            try:
                return replace(stage_search.StageSearch(profile, request).compare(methods.score).plan, note="")
            except pd.PipelineError as error:
                return str(error)

    assert choose(stage_search.MEASURED_SHARE) == choose(1e-9)


def test_fixed_seconds_of_microbatches_are_counted_and_shown() -> None:
    """The bound of a worker alone is exact with them; plan and comparison have a column for them."""
    layer = with_fixed_seconds(pd.LayerProfile(1.0, 2.0, 8, 0, 0), 0.5)
    profile = pd.Profile.of_chain((layer,) * 4, batch=8, update_s=0.0)
    comparison = compare(profile, pd.Cluster.flat(2, 1e9), "1f1b", schedule="auto", microbatches=4)
    alone = next(candidate for candidate in comparison.candidates if candidate.config == "1")
    assert (alone.fixed_s, alone.least_s) == (4 * 4 * 1.0, 4 * (3.0 + 3 * 1.0))
    assert alone.period_s in (None, pytest.approx(alone.least_s))
    assert "  minibatch      fixed  samples/s" in str(comparison)
    assert "backward   fixed  update" in str(comparison.plan)
    assert "fixed" not in str(compare(DIGITS, FOUR, schedule="pipedream"))


def test_a_larger_batch_is_no_reason_to_leave_the_asked_one() -> None:
    """With 128 samples per update data parallelism is faster than any way with 32, and is not named the best."""
    comparison = compare(DIGITS, FOUR, "1f1b", schedule="auto", microbatches=8)
    assert {candidate.samples_per_update for candidate in comparison.candidates} == {32, None}
    parallel = next(candidate for candidate in comparison.references if candidate.is_data_parallel)
    assert parallel.period_s < comparison.candidates[0].period_s
    assert comparison.verdict.startswith("use the pipeline 2-2 with 1f1b: ")
    assert "(128 samples per update)" in comparison.verdict


def test_equal_plans_are_one_row() -> None:
    """A worker alone runs one program under all methods that do not split; of other microbatches it is another row."""
    comparison = compare(DIGITS, EIGHT, "naive", "pipedream", "1f1b", schedule="auto", shape="1")
    rows = [row for row in str(comparison).splitlines() if row.split()[1:3] == ["1", "1"]]
    assert len(rows) == 1
    assert {rows[0].split()[0], *rows[0].partition("also: ")[2].split(", ")} == {"naive", "pipedream", "1f1b"}
    shared = [candidate.words for candidate in comparison.references if candidate.microbatches == 8]
    assert shared == ["DDP on 8 workers, sharing each minibatch"]


def test_what_does_not_fit_is_named() -> None:
    heavy = pd.Profile.of_chain((pd.LayerProfile(1.0, 1.0, 1, 1000),) * 4, batch=8)
    comparison = compare(heavy, pd.Cluster.flat(4, memory_bytes=7000), schedule="1f1b")
    whys = {candidate.shape: candidate.why for candidate in comparison.references}
    assert "fits" in whys["data-parallel"]
    assert "DDP on 4 workers: none of the data-parallel plans fits" in str(comparison)
    assert "this would fit" not in str(comparison), "a rival gets no search of its own"
    short = str(comparison.keep_best())
    assert re.search(r"^DDP on 4 workers: none of [^;]*, a worker has 7.00 kB$", short, re.MULTILINE)
    with pytest.raises(pd.PipelineError, match="none of the plans"):
        compare(heavy, pd.Cluster.flat(4, memory_bytes=1000), schedule="1f1b")


def test_a_faster_plan_that_does_not_fit_is_named() -> None:
    """The verdict says so, with its seconds by simulation; with as much memory as it needs, the plan is chosen."""
    layers = (pd.LayerProfile(1.0, 2.0, 1000, 10, 60_000),) * 2 + (pd.LayerProfile(0.1, 0.2, 10, 30_000, 10),)
    profile, links = pd.Profile.of_chain(layers, batch=8), pd.Cluster.flat(4, 1e4)
    free, tight = (compare(profile, replace(links, memory_bytes=limit)) for limit in (None, 230_000))
    large, fastest = tight.too_large, free.candidates[0]
    assert large is not None
    assert (large.config, large.seconds, free.too_large) == (fastest.config, fastest.seconds, None)
    assert "; the pipeline 3-1 would take 2.00 s (24 samples per update), but does not fit" in tight.verdict
    assert compare(profile, replace(links, memory_bytes=large.peak_bytes)).candidates[0].config == large.config


def test_the_first_line_is_the_verdict(tmp_path: Path, run_command: Callable[..., tuple[int, str, str]]) -> None:
    DIGITS.save(tmp_path / "digits.json")
    command = ("plan", tmp_path / "digits.json", "--workers", 8, "--bandwidth", "1.25e9", "--latency", "1e-4")
    plain, as_json, searched = (run_command(*command, *more)[1] for more in ((), ("--json",), ("--strategy", "search")))
    verdict, _, head, *rest = plain.splitlines()
    assert verdict.startswith("verdict: use DDP on 8 workers: ")
    assert "(256 samples per update)" in verdict
    assert head.split()[:2] == ["method", "plan"]
    assert "for comparison:" in rest
    output = json.loads(as_json)
    assert (f"verdict: {output['verdict']}", output["samples_per_update"]) == (verdict, 256)
    assert output["simulated_s"] == output["candidates"][0]["period_s"]
    assert {row["samples_per_update"] for row in output["references"]} == {32, 8 * 256}
    assert searched.startswith("verdict: use DDP on 8 workers: ")
    assert "\nPlan 1-5-2 " in searched


@pytest.mark.parametrize("schedule", ["pipedream", "1f1b"])
def test_gpus_planned_from_a_cpus_profile_give_a_warning(schedule: str) -> None:
    cluster = pd.Cluster.flat(1, 1e9, device="V100")
    with pytest.warns(UserWarning, match="workers have V100, but the profile was measured on cpu"):
        pd.plan(DIGITS, cluster, schedule=schedule)
    for device in ("V100-16GB", "unknown"):
        pd.plan(replace(DIGITS, device=device), cluster, schedule=schedule)
