"""Runs whose method changes at a drain: how they are trained, and checked against plain PyTorch."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import reference
import torch
import zoo
from cases import FLUSHING, OPTIMIZERS, Fresh, assert_near
from tagged_runs import check_tags
from torch import Tensor
from torch.optim.lr_scheduler import StepLR

import pipedream as pd
from pipedream.core.plan.plan import Plan
from pipedream.core.schedule.phase import phase_at, read_phases
from pipedream.runtime.checkpoint import folders


@dataclass(frozen=True)
class Run:
    """A run in phases.

    Attributes:
        evaluate_at: minibatches after which the loop evaluates, and so drains.
        leave_at: minibatch after which the loop is left, and a second `train` goes on; negative for never.
    """

    phases: str
    replicas: tuple[int, ...] = (1, 1, 1)
    animal: str = "mlp"
    optimizer: str = "sgd"
    clip: float | None = None
    clip_by: str = "local"
    depth: Any = "noam"
    epochs: int = 11
    evaluate_at: tuple[int, ...] = (23,)
    leave_at: int = -1

    def __str__(self) -> str:
        clip = "" if self.clip is None else f" {self.clip_by} {self.clip}"
        return f"{self.animal} {'-'.join(map(str, self.replicas))} {self.phases} {self.optimizer}{clip}"

    @property
    def plan(self) -> Plan:
        """The plan."""
        return zoo.plan_of(zoo.make(self.animal), len(self.replicas), self.replicas, self.depth)


@dataclass
class Outcome:
    """Results of a run; `trained` and `late` are by phase."""

    losses: dict[int, float]
    rates: dict[int, float]
    state: dict[str, Tensor]
    ema: dict[str, Tensor]
    drains: list[int]
    trained: dict[int, tuple[int, int]]
    late: dict[int, dict[int, int]]


def go(run: Run, folder: Path | None = None, resume: Path | None = None, save_at: tuple[int, ...] = ()) -> Outcome:
    """Trains; saves at some minibatches, which drains."""
    animal = zoo.make(run.animal)
    losses, rates = {}, {}
    with pd.Pipeline(
        animal.model, run.plan, phases=run.phases, loss=animal.loss, optimizer=OPTIMIZERS[run.optimizer],
        scheduler=partial(StepLR, step_size=7, gamma=0.7), clip_grad_norm=run.clip, clip=run.clip_by, ema=0.9, seed=3,
        check=False,
    ) as pipeline:  # fmt: skip
        if resume is not None:
            pipeline.load(resume)
        first = pipeline.position[0] * len(animal.batches) + pipeline.position[1]
        for _ in range(1 if run.leave_at < 0 else 2):
            for done in pipeline.train(Fresh(animal.batches), epochs=run.epochs - pipeline.position[0]):
                losses[done.number], rates[done.number] = done.loss, done.rate
                if done.number in run.evaluate_at:
                    pipeline.evaluate(Fresh(animal.batches))
                if done.number + 1 in save_at:
                    pipeline.save(folder)
                if done.number == run.leave_at:
                    break
        for phase, (begin, end) in pipeline.trained.items():
            if end > first:
                tags, program = pipeline.timeline(phase).gradient_versions, pipeline.prepared[phase].program
                check_tags(tags, program, pipeline.drains, animal.batches, max(begin, first), end)
        late = {
            phase: {
                stage: max(
                    (tag.staleness for tag in pipeline.timeline(phase).gradient_versions if tag.stage == stage),
                    default=-1,
                )
                for stage in range(len(run.replicas))
            }
            for phase in pipeline.trained
        }
        return Outcome(
            losses, rates, pipeline.state_dict(), pipeline.state_dict(ema=True), pipeline.drains, pipeline.trained, late
        )


def rule(schedule: str, microbatches: int, plan: Plan, clip_by: str = "local") -> reference.Phase:
    """Returns a method's rule, as its paper writes it (see `cases`); any depth, all replica counts.

    A global norm is late by what the input stage holds in flight, in updates.
    """
    replicas, p = plan.replicas, len(plan.stages)
    late = None if clip_by == "local" else plan.in_flight[0] + plan.update_delay[0]
    if schedule in FLUSHING:
        return reference.Phase(microbatches=microbatches, norm_delay=None if late is None else 0)
    if schedule == "pipedream_2bw":
        late = None if late is None else -(-plan.in_flight[0] * replicas[0] // microbatches)
        return reference.Phase(lambda s, k: max(0, k - 1), microbatches, norm_delay=late)
    if schedule == "pipedream_vertical_sync":
        assert plan.workers == p
        return reference.Phase(lambda s, k: max(0, k - (p - 1)), 1, replicas, late)
    return reference.Phase(lambda s, k: max(0, k // replicas[s] - (plan.in_flight[s] - 1)), 1, replicas, late)


def check(run: Run, outcome: Outcome) -> None:
    """Checks a run against plain PyTorch: each loss, the whole state, the average of the weights."""
    animal, plan, chosen = zoo.make(run.animal), run.plan, read_phases(run.phases)
    owned = [
        [n for n, _ in animal.model.named_parameters() if any(n.startswith(f"{layer}.") for layer in stage.names)]
        for stage in plan.stages
    ]
    phases = {
        begin: rule(chosen[number].name, chosen[number].microbatches or 1, plan, run.clip_by)
        for number, (begin, _) in outcome.trained.items()
    }
    expected = reference.delayed(
        animal.model, list(chain.from_iterable(stage.names for stage in plan.stages)), animal.batches * run.epochs,
        animal.total, OPTIMIZERS[run.optimizer], stages=owned, phases=phases, drains=outcome.drains, seed=3, ema=0.9,
        clip=run.clip, scheduler=partial(StepLR, step_size=7, gamma=0.7),
    )  # fmt: skip
    for number, loss in outcome.losses.items():
        assert abs(loss - expected.losses[number]) <= 1e-10 * max(abs(loss), 1.0), number
    assert_near(outcome.state, expected.state, 1e-9)
    assert_near({name: outcome.ema[name] for name in expected.ema}, expected.ema, 1e-9)


SAVE_AT = (4, 12, 20, 27)


def check_resumed(run: Run, folder: Path, train: Callable[..., Outcome], save_at: tuple[int, ...] = SAVE_AT) -> None:
    """Trains without a stop, and again from each of its checkpoints; all save at the same minibatches."""
    whole = train(run, folder / "a", None, save_at)
    saved = folders.list_checkpoints(folder / "a")
    assert len(saved) >= len(save_at)
    for path in saved[:-1]:
        manifest = folders.read_manifest(path)
        assert manifest.phases == run.phases
        shutil.copytree(path, folder / "b" / path.name)
        rest = train(run, folder / "b", folder / "b", save_at)
        begin = int(path.name.split("-")[1])
        assert (
            manifest.schedule == read_phases(run.phases)[phase_at(read_phases(run.phases), begin, manifest.epoch)].name
        )
        assert rest.losses == {n: loss for n, loss in whole.losses.items() if n >= begin}
        assert rest.rates == {n: rate for n, rate in whole.rates.items() if n >= begin}
        assert rest.drains == whole.drains
        for actual, expected in ((rest.state, whole.state), (rest.ema, whole.ema)):
            assert all(torch.equal(actual[name], expected[name]) for name in expected)
        shutil.rmtree(folder / "b")
