"""Checkpoints of replicas that differ: a resumed run is the same to the bit, another plan takes what they share."""

import logging
from dataclasses import replace
from functools import partial
from pathlib import Path

import processes
import pytest
import torch
from marks import slow, thinned

from pipedream.testing import Trained, Training, assert_equal, tiny

ADAMW = partial(torch.optim.AdamW, lr=0.01, eps=1e-4, weight_decay=1e-2)


def summing(sums: str | None, schedule: str, plan: tuple[int, ...], optimizer: str = "adamw") -> Training:
    options = {"optimizer": ADAMW} if optimizer == "adamw" else {}
    parts = 4 if schedule in ("1f1b", "chimera") else None
    how = {"sums": sums, "schedule": schedule, "plan": plan, "microbatches": parts}
    return tiny(epochs=3, evaluate_at=(), ema=0.8, **how, **options)


TRAININGS = [
    summing("powersgd:2", "pipedream", (2,), "sgd"),
    summing("every:3", "1f1b", (2,)),
    summing("diloco:3", "pipedream", (2,)),
    summing("diloco:2", "chimera", (2, 2), "sgd"),
    summing("every:3", "pipedream_2bw", (2, 1)),
    summing("sparse:3,0.1", "1f1b", (2, 1), "sgd"),
    slow(summing("diloco:2,overlap=1", "1f1b", (2, 2))),
    slow(summing("sparse:2,0.1,overlap=1", "pipedream", (2,))),
]


def name(training: Training) -> str:
    return f"{training.sums} {training.schedule}"


@pytest.mark.parametrize("training", thinned(TRAININGS, 4), ids=name)
def test_a_resumed_run_is_the_same_to_the_bit(training: Training, tmp_path: Path) -> None:
    training.resumed(tmp_path, (4, 9))


@pytest.mark.processes
@pytest.mark.parametrize(
    "training", [pytest.param(t, id=name(t), marks=[pytest.mark.slow] * (t.sums != "diloco:3")) for t in TRAININGS[:3]]
)
def test_processes_and_a_single_one_resume_each_others_checkpoints(training: Training, tmp_path: Path) -> None:
    in_team = lambda training, **how: processes.team(2).results(partial(training.pipeline, **how))[0]  # noqa: E731
    whole = training.resumed(tmp_path, (4, 9), train=in_team)
    first = min((tmp_path / "whole").glob("minibatch-*"))
    alone = training.pipeline(folder=tmp_path / "alone", resume=first, save_at=(9,))
    losses = {number: whole.losses[number] for number in alone.losses}
    assert_equal(replace(alone, optimizer={}), replace(whole, losses=losses))


@pytest.mark.parametrize(
    "other",
    [
        slow(summing("every:2", "1f1b", (2,))),
        slow(summing("sparse:3,0.1", "1f1b", (3,))),
        summing(None, "1f1b", (1, 1)),
    ],
    ids=name,
)
def test_another_plan_takes_what_is_shared(other: Training, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    TRAININGS[1].pipeline(folder=tmp_path, save_at=(4,))
    states = []
    for training in (TRAININGS[1], other):
        with training.make_pipeline() as pipeline, caplog.at_level(logging.WARNING, "pipedream"):
            pipeline.load(tmp_path)
            states.append(pipeline.state_dict())
    assert_equal(Trained(state=states[1]), Trained(state=states[0]))
    assert "the checkpoint's replicas (plan 2, sums='every:3') are not those of this run" in caplog.text
    assert len(other.pipeline(resume=tmp_path).losses) > 5


def test_sums_that_keep_nothing_save_nothing_of_replicas(tmp_path: Path) -> None:
    summing("bfloat16", "pipedream", (2,)).pipeline(folder=tmp_path, save_at=(4,))
    (manifest,) = tmp_path.glob("*/checkpoint.json")
    assert "replica/" not in manifest.read_text()
