"""The serial emulation of benchmarks/convergence trains as the running pipeline does, and as written out by hand.

An arm whose method this version of the library does not have yet is skipped, and says what is missing.
"""

from __future__ import annotations

import inspect
import math
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pipedream as pd
from pipedream.capture import capture
from pipedream.core.cluster import Cluster
from pipedream.core.plan import Plan
from pipedream.core.profile import LayerProfile, Profile
from pipedream.core.schedule import Schedule
from pipedream.planner import by_hand
from pipedream.schedules import SCHEDULES

sys.path.append(str(Path(__file__).parents[1] / "benchmarks" / "convergence"))

import arms
import serial
import steppers
import tasks
from arms import Arm, Method

BOUND = 1e-9
UPDATES = 20
RATES = {"sgd": 0.05, "adamw": 0.01, "nadam": 0.01, "muon": 0.02}
Batches = list[tuple[Tensor, Tensor]]


# -- the running pipeline --------------------------------------------------------------------------


def _small(task: str, count: int) -> tuple[list[nn.Module], Batches, Callable[[Tensor, Tensor], Tensor]]:
    """Returns a narrow model of the task, of so many layers, in double precision, and minibatches."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        if task == "digits":
            units = tasks.digits_units(channels=4, count=count)
            batches = [(torch.randn(24, 1, 8, 8).double(), torch.randint(10, (24,))) for _ in range(UPDATES)]
        else:
            units = tasks.char_gpt_units(width=8, context=6, symbols=11, count=count)
            batches = [(torch.randint(11, (24, 6)), torch.randint(11, (24, 6))) for _ in range(UPDATES)]
    return [unit.double() for unit in units], batches, tasks.TASKS[task].loss


def _factor(update: int) -> float:
    return 0.2 + 0.8 * math.cos(update / UPDATES)


def _emulated(task: str, arm: Arm, stages: int) -> tuple[list[float], Tensor]:
    units, batches, loss = _small(task, stages)
    optimizer = partial(steppers.STEPPERS[arm.optimizer], lr=RATES[arm.optimizer])
    emulation = serial.Emulation(units, stages, optimizer, loss, updates=UPDATES // 2)
    losses: list[float] = []
    serial.train(emulation, arm, batches, _factor, lambda n, found: not losses.append(found))  # type: ignore[func-returns-value]
    return losses, emulation.state()


def _plan(units: list[nn.Module], sample: Tensor, stages: int) -> Plan:
    """Returns the plan of equal stages; nothing is timed."""
    graph = capture(nn.Sequential(*units), (sample,)).graph
    begins = [
        next(i for i, layer in enumerate(graph.layers) if layer.name.split(".")[0] == str(s)) for s in range(stages)
    ]
    profile = Profile("small", graph, tuple(LayerProfile(1.0, 2.0, 8, 8) for _ in graph.layers), len(sample))
    return by_hand(profile, Cluster.flat(stages), tuple(begins[1:]), (1,) * stages)


def _schedule(method: Method, plan: Plan) -> Schedule:
    p = len(plan.stages)
    options: dict[str, Any] = {"backward_rule": "recompute"} if method.rule == "recompute" else {}
    built = SCHEDULES[method.schedule](plan, method.microbatches(p), **options)
    asked = tuple(text.format(updates=UPDATES // 2) for text in method.compensation)
    return built.compensated(asked) if asked else built  # type: ignore[attr-defined, no-any-return]


def _run(task: str, arm: Arm, stages: int) -> tuple[list[float], Tensor]:
    units, batches, loss = _small(task, stages)
    model = nn.Sequential(*units)
    plan = _plan(units, batches[0][0], stages)
    built = [_schedule(turn.method, plan) for turn in arm.turns]
    asked: dict[str, Any] = {"schedule": built[0]}
    if len(built) > 1:
        ends = [round(turn.until * UPDATES) for turn in arm.turns[:-1]]
        asked = {"phases": [pd.Phase(*pair) for pair in zip(built, [*ends, None], strict=True)]}  # type: ignore[attr-defined]
    with pd.Pipeline(
        model,
        plan,
        loss=lambda output, batch: loss(output, batch[1]),
        weight=lambda batch: float(len(batch[1])),
        optimizer=partial(steppers.STEPPERS[arm.optimizer], lr=RATES[arm.optimizer]),
        scheduler=partial(torch.optim.lr_scheduler.LambdaLR, lr_lambda=_factor),
        **asked,
    ) as pipeline:
        losses = [done.loss for done in pipeline.train(batches)]
        state = pipeline.state_dict()
    return losses, torch.cat([state[name].reshape(-1) for name, _ in model.named_parameters()])


def _lacking(arm: Arm) -> str:
    """Returns what this version of the library lacks for an arm."""
    methods = [turn.method for turn in arm.turns]
    lacking = sorted({method.schedule for method in methods} - set(SCHEDULES))
    if any(method.compensation for method in methods) and not hasattr(Schedule, "compensated"):
        lacking.append("compensations")
    if len(methods) > 1 and "phases" not in inspect.signature(pd.Pipeline).parameters:
        lacking.append("phases")
    return ", ".join(lacking)


def _cases() -> list[Any]:
    """Returns each arm of each task; the first with a method, or with an optimizer, at three stages is quick."""
    found, seen = [], set()
    for arm in arms.ARMS:
        for stages in (3,) if arm.synchronous else (3, 2, 8):
            new = {str(arm.turns), arm.optimizer} - seen if stages == 3 else {}
            seen |= set(new)
            marks = () if new else pytest.mark.slow
            (task,) = arm.tasks
            found.append(pytest.param(task, arm, stages, id=f"{task} {arm} {stages}", marks=marks))
    return found


@pytest.mark.parametrize(("task", "arm", "stages"), _cases())
def test_the_emulation_equals_the_running_pipeline(task: str, arm: Arm, stages: int) -> None:
    if lacking := _lacking(arm):
        pytest.skip(f"this version of the library lacks {lacking}")
    losses, state = _emulated(task, arm, stages)
    wanted, weights = _run(task, arm, stages)
    assert len(wanted) == UPDATES
    assert losses == pytest.approx(wanted, rel=BOUND)
    assert (state - weights).norm() <= BOUND * weights.norm()


def test_the_comparison_can_fail() -> None:
    """Methods differ by far more than the bound after so few updates."""
    of = arms.arms_of("digits")
    ends = {name: _emulated("digits", of[name], 3) for name in of if of[name].optimizer == "sgd"}
    names = list(ends)
    for i, name in enumerate(names):
        for other in names[i + 1 :]:
            assert (ends[name][1] - ends[other][1]).norm() > 1e4 * BOUND * ends[name][1].norm(), (name, other)
