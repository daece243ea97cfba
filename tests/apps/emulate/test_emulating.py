"""Emulation: a plan, scaled or not, is the same plan; its run looks like its simulation."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import processes
import pytest
from hypothesis import given, strategies as st

import pipedream as pd
from pipedream.apps.emulate.emulate import scale_plan


def plan_of(*counts: int, seconds: float = 0.03) -> pd.Plan:
    shares = {"forward_s": seconds / 3, "backward_s": seconds * 2 / 3, "update_s": seconds / 30}
    sizes = {"parameter_bytes": 2_000_000}
    stages = tuple(
        pd.Stage(s, s + 1, count, output_bytes=1_000_000 + 1000 * s, names=(f"layer{s}",), **shares, **sizes)
        for s, count in enumerate(counts)
    )
    plan = pd.Plan.uniform(len(counts), replicas=counts)
    return replace(plan, stages=stages, cluster=pd.Cluster.flat(sum(counts), 1e9, 1e-4))


def check_measured_rate(summary: dict[str, Any], folder: Path) -> None:
    """Checks that the rate is that of the measured timeline, however late a busy machine wakes those that wait."""
    measured = pd.metrics.steady_metrics(pd.Timeline.load(folder / "measured.json"))
    assert summary["throughput"]["measured_per_s"] == pytest.approx(measured.samples_per_s)


@given(
    counts=st.sampled_from([(1,), (1, 1), (2, 1), (1, 2, 1), (3,)]),
    dilation=st.sampled_from([0.5, 1.0, 2.0, 8.0]),
    byte_scale=st.sampled_from([0.25, 1.0, 2.0]),
)
def test_dilated_plan_takes_the_dilated_seconds(counts: tuple[int, ...], dilation: float, byte_scale: float) -> None:
    plan = plan_of(*counts)
    # Buckets of sums have a size of their own, so only whole sums scale with the bytes.
    after = pd.simulate(scale_plan(plan, dilation, byte_scale), minibatches=12, overlap=False).makespan_s
    assert after == pytest.approx(dilation * pd.simulate(plan, minibatches=12, overlap=False).makespan_s, rel=1e-6)


def test_layers_of_a_stage_become_one_that_is_not_of_the_model() -> None:
    first, second = plan_of(1, 1).stages
    graph = pd.LayerGraph.chain((pd.Layer("transformer.h.0", "Block"), pd.Layer("lm_head", "Linear")))
    wide = replace(plan_of(1, 1), stages=(replace(first, last=3), replace(second, first=3, last=9)))
    rows = [(stage.first, stage.last, stage.names) for stage in scale_plan(wide).stages]
    assert rows == [(0, 1, ("stage0",)), (1, 2, ("stage1",))]
    assert scale_plan(replace(plan_of(1, 1), graph=graph)).graph is None


@pytest.mark.parametrize(
    ("scale", "words"),
    [
        (lambda: scale_plan(plan_of(1), dilation=0.0), "give a positive number"),
        (lambda: scale_plan(plan_of(1), byte_scale=-1.0), "give a positive number"),
        (lambda: pd.emulate(plan_of(1, 1)), r"2 workers, found 1 process.*pipedream emulate"),
    ],
)
def test_what_makes_no_sense_is_refused(scale: Any, words: str) -> None:
    with pytest.raises(pd.PipelineError, match=words):
        scale()


@pytest.mark.parametrize(
    ("plan", "options"),
    [
        (replace(plan_of(1), schedule="gpipe", microbatches=2), {}),
        (plan_of(1), {"schedule": "spectrain_v2"}),  # what waits in place of stepping has no velocity
    ],
)
def test_one_worker_needs_no_others(plan: pd.Plan, options: dict[str, Any], tmp_path: Path) -> None:
    summary = pd.emulate(plan, minibatches=6, out=tmp_path / "run", quiet=True, **options)
    assert summary["configuration"]["schedule"] == options.get("schedule", plan.schedule or "pipedream")
    assert summary["configuration"]["microbatches"] == (plan.microbatches or 1)
    check_measured_rate(summary, tmp_path / "run")
    assert (tmp_path / "run" / "report.html").exists()
    assert not (tmp_path / "run" / "weights.pt").exists()
    assert plan.schedule or summary["throughput"]["predicted_per_s"] == pytest.approx(1 / 0.031)


def _emulate(plan: pd.Plan, folder: Path, options: dict[str, Any]) -> dict[str, Any]:
    return pd.emulate(plan, minibatches=8, dilation=2.0, byte_scale=0.5, out=folder, quiet=True, **options)


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.parametrize("unit", ["minibatch", "microbatch"])
def test_more_workers_than_cores(tmp_path: Path, unit: str) -> None:
    options = {"schedule": "pipedream"} if unit == "minibatch" else {"schedule": "1f1b", "microbatches": 4}
    summary = processes.results(_emulate, 3, replace(plan_of(2, 1), unit=unit), tmp_path / "run", options)[0]
    rate = summary["throughput"]
    check_measured_rate(summary, tmp_path / "run")
    assert rate["measured_per_s"] / rate["predicted_per_s"] < 1.05
    measured = pd.Timeline.load(tmp_path / "run" / "measured.json")
    assert {span.rank for span in measured.spans} == {0, 1, 2}
    for kind, seconds in (("F", 0.02), ("B", 0.04), ("U", 0.002)):
        spans_s = [span.end_s - span.start_s for span in measured.spans if span.kind == kind]
        assert len(spans_s) >= 8
        assert min(spans_s) >= seconds * 0.999, f"{kind} is shorter than it was planned"
    sent = sum(stage["bytes_sent"] for stage in summary["stages"] if stage["stage"] == 1)
    assert sent == (8 if unit == "minibatch" else 32) * 500_000, "gradients of half of 1 MB each"
