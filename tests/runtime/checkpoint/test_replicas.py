"""Checkpoints of replicas that differ: a resumed run is the same to the bit, another plan takes what they share."""

import logging
from pathlib import Path

import processes
import pytest
import torch
from cases import Case, check_resumed, pipeline_of, run
from marks import thinned


def summing(sums: str | None, schedule: str, replicas: tuple[int, ...], optimizer: str) -> Case:
    parts = 4 if schedule in ("1f1b", "chimera") else None
    how = {"replicas": replicas, "sums": sums, "optimizer": optimizer, "microbatches": parts}
    return Case("matrices", schedule, len(replicas), epochs=3, evaluate_at=(), ema=0.8, **how)


CASES = [
    summing("powersgd:2", "pipedream", (2,), "sgd"),
    summing("every:3", "1f1b", (2,), "adamw"),
    summing("diloco:3", "pipedream", (2,), "adamw"),
    summing("diloco:2", "chimera", (2, 2), "sgd"),
    summing("every:3", "pipedream_2bw", (2, 1), "adamw"),
]


@pytest.mark.parametrize("case", thinned(CASES), ids=str)
def test_a_resumed_run_is_the_same_to_the_bit(case: Case, tmp_path: Path) -> None:
    check_resumed(case, tmp_path, (4, 9))


@pytest.mark.processes
@pytest.mark.parametrize(
    "case", [pytest.param(c, id=str(c), marks=[pytest.mark.slow] * (c.sums != "diloco:3")) for c in CASES[:3]]
)
def test_processes_and_a_single_one_resume_each_others_checkpoints(case: Case, tmp_path: Path) -> None:
    in_team = lambda *how: processes.team(2).results(run, *how)[0]  # noqa: E731
    whole = check_resumed(case, tmp_path / "team", (4, 9), in_team)
    alone = run(case, tmp_path / "alone", min((tmp_path / "team" / "a").glob("minibatch-*")), (9,))
    assert alone.dones == whole.dones[-len(alone.dones) :]
    for actual, expected in ((alone.state, whole.state), (alone.ema, whole.ema)):
        assert all(torch.equal(actual[name], tensor) for name, tensor in expected.items())


@pytest.mark.parametrize(
    "other",
    [
        summing("every:2", "1f1b", (2,), "adamw"),
        summing("diloco:3", "1f1b", (3,), "adamw"),
        summing(None, "1f1b", (1, 1), "adamw"),
    ],
    ids=str,
)
def test_another_plan_takes_what_the_replicas_share(
    other: Case, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run(CASES[1], tmp_path, None, (4,))
    states = []
    for case in (CASES[1], other):
        with pipeline_of(case) as pipeline, caplog.at_level(logging.WARNING, "pipedream"):
            pipeline.load(tmp_path)
            states.append(pipeline.state_dict())
    assert all(torch.equal(states[1][name], tensor) for name, tensor in states[0].items())
    assert "the checkpoint's replicas (plan 2, sums='every:3') are not those of this run" in caplog.text
    assert len(run(other, resume=tmp_path).dones) > 5


def test_sums_that_keep_nothing_save_nothing_of_replicas(tmp_path: Path) -> None:
    run(summing("bfloat16", "pipedream", (2,), "adamw"), tmp_path, None, (4,))
    (manifest,) = tmp_path.glob("*/checkpoint.json")
    assert "replica/" not in manifest.read_text()
