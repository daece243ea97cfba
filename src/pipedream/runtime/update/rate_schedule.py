"""The learning rate of a stage's optimizer. All schedulers run on one clock, the rounds of the input stage."""

from __future__ import annotations

import warnings
from contextlib import nullcontext
from typing import Any, NamedTuple, Self

import torch
from torch.optim.lr_scheduler import ReduceLROnPlateau

from pipedream.core.schedule.program import Program
from pipedream.core.schedule.rules import UpdateRule


class StageUpdates(NamedTuple):
    """A program's rule of the updates at one stage.

    Attributes:
        updates: with the stage's own compensation.
        staleness: the greatest of the gradients.
        mean_staleness: None if all gradients are equally stale.
        replicas: r_s.
        counted_elsewhere: names of the weights that another stage counts in the norm, and saves.
    """

    updates: UpdateRule = UpdateRule((1,))
    stage: int = 0
    staleness: int = 0
    mean_staleness: float | None = None
    replicas: int = 1
    counted_elsewhere: frozenset[str] = frozenset()

    @classmethod
    def of(cls, program: Program, stage: int) -> Self:
        weights, plan = program.weights, program.plan
        delays = [weights.staleness(at) for at in range(program.placement.stages)]
        later_holders = (tied.names for tied in plan.tied_weights if stage in tied.stages[1:])
        return cls(
            program.updates.at_stage(stage, delays),
            stage,
            delays[stage],
            weights.mean_staleness(stage),
            program.placement.replicas[stage],
            frozenset(name for names in later_holders for name in names),
        )


class RateSchedule:
    """The user's optimizer of one stage and its scheduler, if any, under one program.

    Attributes:
        updates: made or skipped with this program.
        has_stepped: the optimizer has made a step.
        scheduled: scheduler steps with this program.
        rounds_before: rounds of the input stage before this program.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, scheduler: Any = None, rule: StageUpdates | None = None
    ) -> None:
        self.optimizer = optimizer
        self.scheduler = scheduler
        self.rule = rule or StageUpdates()
        self.has_stepped = False
        self.scheduled = self.updates = self.rounds_before = 0

    def take_over(self, former: RateSchedule, input_updates: int) -> None:
        """Continues after another program, in which the input stage has made `input_updates`."""
        former.step_scheduler(input_updates - former.scheduled)
        self.rounds_before = former.rounds_before + input_updates
        self.has_stepped = former.has_stepped

    @property
    def rate(self) -> float:
        """The first parameter group's, before the stage's factor."""
        return float(self.optimizer.param_groups[0]["lr"])

    @property
    def factor(self) -> float:
        """Factor on the next update's learning rate: the stage's times T1's."""
        rule = self.rule
        staleness = rule.staleness if rule.mean_staleness is None else rule.mean_staleness
        return rule.updates.rate_factor(rule.stage, staleness, self.rounds)

    @property
    def rounds(self) -> int:
        """Rounds of the input stage before the next update."""
        return self.rounds_before + self._finished_rounds

    @property
    def steps_due(self) -> int:
        """Steps of the scheduler due before the next update.

        One clock for all stages: update n of this stage belongs to round (n - 1) r_s / r_0 of the input stage.
        """
        return self._finished_rounds - self.scheduled

    @property
    def _finished_rounds(self) -> int:
        per_update = self.rule.updates.per_update
        return self.updates * per_update[self.rule.stage] // per_update[0]

    @property
    def follows_evaluations(self) -> bool:
        """Whether the scheduler steps at evaluations instead of updates."""
        return isinstance(self.scheduler, ReduceLROnPlateau)

    def step_after_evaluation(self, value: float) -> None:
        """Steps a scheduler that follows evaluations; the value is the same at all stages."""
        if self.follows_evaluations:
            self.scheduler.step(value)

    def step(self) -> None:
        """Sets the learning rate of the next update, unless that is done."""
        self.step_scheduler(self.steps_due)

    def step_scheduler(self, steps: int) -> None:
        if self.scheduler is None or steps <= 0:
            return
        if self.follows_evaluations:
            self.scheduled += steps
            return
        with nullcontext() if self.has_stepped else warnings.catch_warnings():
            if not self.has_stepped:  # skipped updates, and those before a checkpoint, count too
                warnings.filterwarnings("ignore", "Detected call of `lr_scheduler.step")
            for _ in range(steps):
                self.scheduler.step()
                self.scheduled += 1
