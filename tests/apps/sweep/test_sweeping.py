"""Sweeps: rows agree with plan and simulate, crossovers are where the lead changes."""

import json
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from commands import Refused, Run

import pipedream as pd
from pipedream.apps.sweep import sweep
from pipedream.plan_request import PlanRequest
from pipedream.workflows.methods import score

LAYERS = tuple(
    pd.LayerProfile(1.0 + 0.3 * i, 2.0, output_bytes=1000, parameter_bytes=10_000, activation_bytes=960)
    for i in range(4)
)
CHAIN = pd.Profile.of_chain(LAYERS, batch=16)  # as many as the microbatches of 1F1B and GPipe on four stages


def sweep_pipelines(*schedules: str, memory_bytes: int | None = None, **how: Any) -> sweep.Sweep:
    """Sweeps pipelines over two workers and one fast network, if nothing else is asked for."""
    request = PlanRequest(
        pd.Cluster.flat(1, memory_bytes=memory_bytes), shape="pipeline", microbatches=how.pop("microbatches", None)
    )
    return sweep.sweep(CHAIN, request, **{"workers": (2,), "bandwidths": (3e6,), "schedules": schedules} | how)


@pytest.fixture(scope="module")
def swept() -> sweep.Sweep:
    return sweep_pipelines("pipedream", "gpipe", bandwidths=(300.0, 3e6))


@pytest.mark.slow
def test_rows_agree_with_plan_and_simulate(swept: sweep.Sweep) -> None:
    assert len(swept.points) == 2 * 3
    for point in swept.points:
        how = {"schedule": point.schedule, "shape": "pipeline"}
        how |= {"schedule": "pipedream", "shape": "data-parallel"} if point.schedule == sweep.DATA_PARALLEL else {}
        plan = pd.plan(CHAIN, pd.Cluster.flat(point.workers, point.bandwidth_bytes_per_s), **how)
        assert (point.config, point.microbatches) == (plan.config, plan.microbatches)
        assert point.samples_per_s == pytest.approx(CHAIN.batch / score(plan).period_s)
        assert point.peak_bytes == max(stage.peak_bytes for stage in plan.stages)


def test_a_split_is_for_the_methods_that_split() -> None:
    split = sweep_pipelines("pipedream", "gpipe", "auto", microbatches=2, crossovers=False)
    expected = {sweep.DATA_PARALLEL: 1, "pipedream": 1, "gpipe": 2, "auto": 2}
    assert {point.schedule: point.microbatches for point in split.points} == expected
    assert all(point.samples_per_s for point in split.points)


def test_a_method_without_a_plan_has_no_crossover() -> None:
    result = sweep_pipelines("pipedream", memory_bytes=CHAIN.parameter_bytes)
    assert [point.samples_per_s for point in result.points] == [None, None]
    assert result.crossovers == ()


@pytest.mark.slow
def test_a_crossover_by_hand() -> None:
    """Layers of 3 and 5 seconds and 8e5 bytes in all, on two workers, messages free, at B bytes per second.

    The pipeline of two takes 5 s. A ring of two moves 8e5 bytes each way, in one bucket that is ready with the
    backward's end: data parallelism takes (8 + 8e5 / B) / 2. They are equal at B = 4e5.
    """
    layers = (pd.LayerProfile(1.0, 2.0, 0, 400_000), pd.LayerProfile(2.0, 3.0, 0, 400_000))
    request, chosen = PlanRequest(pd.Cluster.flat(2), shape="pipeline"), {"workers": (2,), "bandwidths": (2e5,)}
    result = sweep.sweep(pd.Profile.of_chain(layers), request, schedules=("pipedream",), **chosen)
    rows = {point.schedule: point.samples_per_s for point in result.points}
    assert rows["pipedream"] == pytest.approx(1 / 5)
    assert rows[sweep.DATA_PARALLEL] == pytest.approx(1 / 6)
    (crossing,) = result.crossovers
    assert crossing.bandwidth_bytes_per_s == pytest.approx(4e5, rel=0.01)
    assert crossing.below
    assert str(crossing).startswith("2 workers: pipedream is faster than data parallelism below ")


def test_a_point_without_a_plan_is_a_row_with_the_reason() -> None:
    result = sweep_pipelines("1f1b", memory_bytes=45_000, workers=(2, 3), bandwidths=(1e3,), crossovers=False)
    assert [point.samples_per_s is None for point in result.points] == [True, False, True, False]
    assert "fits" in result.points[0].why
    assert "-  (none of the data-parallel plans fits" in str(result)
    for options, words in (({}, "not known"), ({"workers": ()}, "at least one worker count")):
        with pytest.raises(pd.PipelineError, match=words):
            sweep_pipelines("1f1b" if options else "dream", **options)


def test_the_command(tmp_path: Path, run_command: Run, refused: Refused) -> None:
    profile, csv = CHAIN.save(tmp_path / "profile.json"), tmp_path / "sweep.csv"
    options = ("--bandwidth", "300B/s,3kB/s", "--schedule", "pipedream,naive", "--json", "--csv", csv)
    summary = json.loads(run_command("sweep", profile, "--workers", "1,2", *options)[1])
    assert [(row["workers"], row["bandwidth_bytes_per_s"], row["schedule"]) for row in summary["rows"]] == [
        *product((1, 2), (300.0, 3e3), (sweep.DATA_PARALLEL, "pipedream", "naive"))
    ]
    assert {row["schedule"] for row in summary["crossovers"]} == {"pipedream", "naive"}
    head, *lines = csv.read_text().splitlines()
    assert head.split(",")[:3] == [*summary["rows"][0]][:3]
    assert len(lines) == 12
    assert "write --workers 2,4,8" in refused("sweep", profile, "--workers", 0)
