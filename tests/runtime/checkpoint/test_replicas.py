"""Checkpoints of replicas that differ: a resumed run is the same to the bit, another plan takes what they share."""

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import processes
import pytest
import torch
import zoo
from cases import OPTIMIZERS, Fresh, make_pipeline
from marks import thinned
from torch import Tensor

import pipedream as pd
from pipedream.schedules import LAYOUTS

SAVED_AFTER = 4
RUNS = [
    ("powersgd:2", "pipedream", (2,), "sgd"),
    ("every:3", "1f1b", (2,), "adamw"),
    ("diloco:3", "pipedream", (2,), "adamw"),
    ("diloco:2", "chimera", (2, 2), "sgd"),
    ("every:3", "pipedream_2bw", (2, 1), "adamw"),
]


def pipeline_of(sums: str, schedule: str, replicas: tuple[int, ...], optimizer: str, **options: Any) -> pd.Pipeline:
    animal = zoo.make("matrices")
    plan = zoo.plan_of(animal, len(replicas), replicas)
    if layout := LAYOUTS.get(schedule):
        plan = replace(plan, worker_order=layout.order(len(replicas), layout.replicas))
    options |= {"optimizer": OPTIMIZERS[optimizer], "ema": 0.8, "sums": None if sums == "full" else sums}
    parts = 4 if schedule in ("1f1b", "chimera") else None
    return make_pipeline(animal, plan, schedule=schedule, microbatches=parts, **options)


def run(kind: tuple[Any, ...], folder: Path | str, resume: bool) -> tuple[list[float], list[dict[str, Tensor]]]:
    """Trains two epochs, and saves in the first; or resumes there. Returns losses from then on, and weights."""
    batches, losses, states = zoo.make("matrices").batches, [], []
    with pipeline_of(*kind) as pipeline:
        if resume:
            pipeline.load(folder)
            states.append(pipeline.state_dict())
        for done in pipeline.train(Fresh(batches), until_epoch=3):
            if pipeline.drains:
                losses.append(done.loss)
            if done.number == SAVED_AFTER - 1 and not pipeline.drains:
                pipeline.save(folder)
                states.append(pipeline.state_dict())
        return losses, [*states, pipeline.state_dict(), pipeline.state_dict(ema=True)]


def check_same(actual: Any, expected: Any) -> None:
    (losses, states), (expected_losses, expected_states) = actual, expected
    assert len(losses) > 5
    assert losses == expected_losses[-len(losses) :]
    assert len(states) == len(expected_states) == 3
    for state, expected_state in zip(states, expected_states, strict=True):
        assert list(state) == list(expected_state)
        assert all(torch.equal(state[name], tensor) for name, tensor in expected_state.items())


@pytest.mark.parametrize("kind", thinned(RUNS), ids=lambda kind: f"{kind[0]} {kind[1]}")
def test_a_resumed_run_is_the_same_to_the_bit(kind: tuple[Any, ...], tmp_path: Path) -> None:
    through = run(kind, tmp_path, False)
    check_same(run(kind, tmp_path, True), through)


@pytest.mark.processes
@pytest.mark.parametrize(
    "kind",
    [pytest.param(kind, marks=[pytest.mark.slow] * (kind[0] != "diloco:3")) for kind in RUNS[:3]],
    ids=lambda kind: f"{kind[0]} {kind[1]}",
)
def test_processes_and_a_single_one_resume_each_others_checkpoints(kind: tuple[Any, ...], tmp_path: Path) -> None:
    through, _ = processes.team(2).results(run, kind, tmp_path, False)
    check_same(run(kind, tmp_path, True), through)
    resumed, _ = processes.team(2).results(run, kind, tmp_path, True)
    check_same(resumed, through)


@pytest.mark.parametrize(
    "other",
    [("every:2", "1f1b", (2,), "adamw"), ("diloco:3", "1f1b", (3,), "adamw"), ("full", "1f1b", (1, 1), "adamw")],
    ids=lambda kind: f"{kind[0]} {kind[2]}",
)
def test_another_plan_takes_what_the_replicas_share(
    other: tuple[Any, ...], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    _, (saved, *_) = run(RUNS[1], tmp_path, False)
    with caplog.at_level(logging.WARNING, "pipedream"):
        losses, (loaded, *_) = run(other, tmp_path, True)
    assert all(torch.equal(loaded[name], tensor) for name, tensor in saved.items())
    assert len(losses) > 5
    assert "the checkpoint's replicas (plan 2, sums='every:3') are not those of this run" in caplog.text


def test_sums_that_keep_nothing_save_nothing_of_replicas(tmp_path: Path) -> None:
    run(("bfloat16", "pipedream", (2,), "adamw"), tmp_path, False)
    (manifest,) = tmp_path.glob("*/checkpoint.json")
    assert "replica/" not in manifest.read_text()
