"""An update: sum over replicas, normalise, clip, set the learning rate, step, average the weights.

Compensations of delay act on the clipped gradients, the learning rate and the step. The optimizer is the user's, one
per stage. All schedulers run on one clock, the rounds of the input stage.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Mapping
from contextlib import nullcontext
from typing import Any, Literal, NamedTuple, Self

import torch
from torch.optim.lr_scheduler import ReduceLROnPlateau

from pipedream.core.errors import ScheduleError
from pipedream.core.schedule.program import Program
from pipedream.core.schedule.rules import UpdateRule
from pipedream.runtime.comm.channel import Waiting
from pipedream.runtime.division import Division
from pipedream.runtime.update.compensator import Compensator, check_optimizer
from pipedream.runtime.update.gradients import Gradients, ReducedGradients
from pipedream.runtime.update.reducer import Reducer
from pipedream.runtime.update.stepped import LossFactor, SteppedWeights


class StageUpdates(NamedTuple):
    """A program's rule of the updates at one stage.

    Attributes:
        rule: with the stage's own compensation.
        staleness: the greatest of the gradients.
        mean_staleness: None if all gradients are equally stale.
    """

    rule: UpdateRule = UpdateRule((1,))
    stage: int = 0
    staleness: int = 0
    mean_staleness: float | None = None

    @classmethod
    def of(cls, program: Program, stage: int) -> Self:
        weights = program.weights
        delays = [weights.staleness(at) for at in range(program.placement.stages)]
        return cls(program.updates.at_stage(stage, delays), stage, delays[stage], weights.mean_staleness(stage))

    @property
    def clock_rate(self) -> tuple[int, int]:
        """Microbatches of an update here, and at the input stage."""
        return self.rule.per_update[self.stage], self.rule.per_update[0]

    def rate_factor(self, rounds: int) -> float:
        staleness = self.staleness if self.mean_staleness is None else self.mean_staleness
        return self.rule.rate_factor(self.stage, staleness, rounds)


_PLAIN = StageUpdates()


class Optimizer:
    """The user's optimizer on one stage's handles, and everything that belongs to its step under one program.

    Args:
        optimizer: factory from a list of (name, parameter).
        scheduler: factory from the optimizer; None for a constant rate.
        replicas: r_s.
        reducer: how the replicas agree; by default there is one replica.
        ema: averages of the weights, by name; empty if none are kept.
        ema_decay: of these averages.
        counted_elsewhere: indices of handles that another stage counts in the norm.
        loss_scale: by default the loss is not scaled.
        division: by default the worker is a single rank.
        stepped: by default the handles.

    Attributes:
        finite: False skips the next update.
        updates: made or skipped with this program.
        scheduled: scheduler steps with this program.
        rounds_before: rounds of the input stage before this program.

    Raises:
        ScheduleError: the optimizer computes the loss itself, or a compensation is not defined for it.
    """

    def __init__(
        self,
        handles: Mapping[str, torch.nn.Parameter],
        optimizer: Callable[[list[tuple[str, torch.nn.Parameter]]], torch.optim.Optimizer],
        updates: StageUpdates = _PLAIN,
        *,
        scheduler: Callable[[torch.optim.Optimizer], Any] | None = None,
        replicas: int = 1,
        reducer: Reducer | None = None,
        ema: dict[str, torch.Tensor] | None = None,
        ema_decay: float = 0.0,
        counted_elsewhere: Collection[int] = (),
        loss_scale: LossFactor | None = None,
        division: Division | None = None,
        stepped: SteppedWeights | None = None,
    ) -> None:
        self.named = dict(handles)
        self.stepped = stepped or SteppedWeights(handles)
        self._handles = list(handles.values())
        self._names = list(handles)
        # A stage without weights still has the common clock and learning rate.
        pairs = list(self.stepped.weights.items()) or [("nothing", torch.nn.Parameter(torch.zeros(())))]
        try:
            self.optimizer = optimizer(pairs)
        except ValueError as error:
            if "empty parameter list" not in str(error):
                raise
            raise ScheduleError(
                "the optimizer's factory is called once per stage, and has chosen none of this stage's parameters, "
                f"{', '.join(name for name, _ in pairs[:3])}{', ...' if pairs[3:] else ''}; freeze what is not to be "
                "trained (requires_grad_(False)), so that a stage without trained parameters needs no optimizer"
            ) from error
        _check_steps_by_gradients(self.optimizer)
        self._rule = updates
        self._division = division or Division()
        self.compensator = Compensator(
            updates.rule.compensation, updates.staleness, self.optimizer, self.stepped, self._division
        )
        self.scheduler = scheduler(self.optimizer) if scheduler is not None else None
        self._clock_rate = updates.clock_rate
        self.replicas = replicas
        self._mean_of_rounds = updates.rule.mean_of_rounds
        self.ema = ema or {}
        self._ema_decay = ema_decay
        self.finite = True
        self.skipped = 0
        self._has_stepped = False
        self.loss_scale = loss_scale or LossFactor()
        self.counted_elsewhere = frozenset(counted_elsewhere)
        self.reducer = reducer or Reducer()
        self.scheduled = self.updates = self.rounds_before = 0

    def take_over(self, former: Optimizer, input_updates: int) -> None:
        """Continues after another program's updates of the same weights, at a drain.

        The state of a compensation continues if the former program kept it too.

        Args:
            input_updates: the input stage's updates with the former program.
        """
        former.step_scheduler(input_updates - former.scheduled)
        self.rounds_before = former.rounds_before + input_updates
        self.skipped, self._has_stepped = former.skipped, former._has_stepped
        for name, tensors in former.compensator.state.items():
            self.compensator.load(name, tensors)

    def check(self, updates: UpdateRule) -> None:
        """Raises a `ScheduleError` if a compensation is not defined for the optimizer."""
        check_optimizer(updates.compensation, self.optimizer)

    def switch_mode(self, mode: Literal["train", "eval"]) -> bool:
        """Calls the optimizer's own ``train()`` or ``eval()``, which may move weights. Returns whether it has them."""
        if not all(callable(getattr(self.optimizer, name, None)) for name in ("train", "eval")):
            return False
        getattr(self.optimizer, mode)()
        return True

    @property
    def scale(self) -> float:
        return self.loss_scale.value

    @property
    def rate(self) -> float:
        """The first parameter group's, before the stage's factor."""
        return float(self.optimizer.param_groups[0]["lr"])

    @property
    def rate_factor(self) -> float:
        """Factor on the next update's learning rate: the stage's times T1's."""
        return self._rule.rate_factor(self.rounds)

    @property
    def copies(self) -> int:
        """How many ranks have the same `norm_square`: those of all replicas."""
        return self.replicas * self._division.ranks

    def prepare(self, gradients: Gradients, stop_request: float = 0.0) -> Waiting[tuple[float, bool]]:
        """Sums and divides the update's gradients (`gather`, `normalise`), and sets the handles' ``.grad``."""
        gathered = yield from self.gather(gradients, stop_request)
        return self.normalise(gathered)

    def gather(self, gradients: Gradients, stop_request: float = 0.0) -> Waiting[ReducedGradients]:
        """Returns the gradients summed over each replica's ranks and, unless they average weights, over replicas."""
        reduced = yield from self.reducer.take(gradients, stop_request, self._divisor)
        self._division.sum_gradients(self._names, reduced.gradients)
        return reduced

    def normalise(self, gathered: ReducedGradients) -> tuple[float, bool]:
        """Divides the summed gradients, and sets the handles' ``.grad``.

        Returns the share of the round's replicas that took part, which scales the learning rate, and whether to stop.
        """
        divisor = self._divisor(gathered)
        gradients = [total for total in gathered.gradients if total is not None]
        if gradients and divisor != 1.0 and divisor > 0.0:
            torch._foreach_div_(gradients, divisor)
        summed = iter(gradients)
        for handle, total in zip(self._handles, gathered.gradients, strict=True):
            handle.grad = None if total is None else next(summed)
        count = gathered.microbatches if gathered.present is None else gathered.present
        return (count / self.replicas if self._mean_of_rounds else 1.0), gathered.stop_request > 0

    def _divisor(self, gathered: ReducedGradients) -> float:
        return gathered.divisor(self._mean_of_rounds) * self.scale

    @property
    def norm_square(self) -> torch.Tensor:
        """Square of the gradients' norm, without weights that another stage counts; float64, on their device.

        On a mesh all ranks of the worker call it.
        """
        counted = [
            _view_as_dense(handle.grad)
            for i, (name, handle) in enumerate(self.named.items())
            if handle.grad is not None and i not in self.counted_elsewhere and self._division.is_counted(name)
        ]
        # In double precision the squares of all finite float32 are finite.
        norms = torch._foreach_norm(counted, 2, torch.float64) if counted else ()
        square = torch.stack(list(norms)).square().sum() if counted else None
        if square is None:  # a mesh sums on the device of its handles
            device = next((handle.device for handle in self._handles if self._division.is_divided), None)
            square = torch.zeros((), dtype=torch.float64, device=device)
        return self._division.sum(square)

    def clip(self, max_norm: float, norm: float | torch.Tensor) -> None:
        """Clips the gradients of a given norm, without waiting for the norm if it is on their device."""
        scale = max_norm / (norm + 1e-6)  # as torch.nn.utils.clip_grad_norm_
        gradients = [handle.grad for handle in self._handles if handle.grad is not None]
        if isinstance(scale, torch.Tensor):
            scale = torch.where(scale < 1.0, scale, 1.0)  # 1 for a nan, too
            torch._foreach_mul_(gradients, scale.to(torch.promote_types(gradients[0].dtype, torch.float32)))
        elif scale < 1.0 and gradients:
            torch._foreach_mul_(gradients, scale)

    def step(self, present_share: float = 1.0) -> None:
        """Makes the update from the handles' ``.grad``: learning-rate schedule, step, average.

        A skipped update counts only for the schedule.
        """
        self.step_schedule()
        self.reducer.finish_step(is_made=self.finite)
        if self.finite:
            self._step(present_share)
        else:
            self.skipped += 1
        self.updates += 1
        for handle in self._handles:
            handle.grad = None
        self.loss_scale.update(self.finite)

    def _step(self, present_share: float) -> None:
        # A replica that averages weights has divided by its own share, and makes no step if it is absent.
        factor = self.rate_factor * (1.0 if self.reducer.averages_weights else present_share)
        if factor == 1.0:
            self.compensator.step()
        else:
            groups = self.optimizer.param_groups
            rates = [group["lr"] for group in groups]
            for group, rate in zip(groups, rates, strict=True):
                group["lr"] = rate * factor
            self.compensator.step()
            for group, rate in zip(groups, rates, strict=True):
                group["lr"] = rate
        self._has_stepped = True
        if self.ema:
            averages = [self.ema[name] for name in self._names]
            torch._foreach_lerp_(averages, [handle.detach() for handle in self._handles], 1.0 - self._ema_decay)

    @property
    def rounds(self) -> int:
        """Rounds of the input stage before the next update."""
        return self.rounds_before + self._finished_rounds

    @property
    def scheduler_steps_due(self) -> int:
        """Steps of the learning-rate schedule due before the next update.

        One clock for all stages: update n of this stage belongs to round (n - 1) r_s / r_0 of the input stage.
        """
        return self._finished_rounds - self.scheduled

    @property
    def _finished_rounds(self) -> int:
        per_clock, first = self._clock_rate
        return self.updates * per_clock // first

    @property
    def follows_evaluations(self) -> bool:
        """Whether the scheduler steps at evaluations instead of updates."""
        return isinstance(self.scheduler, ReduceLROnPlateau)

    def step_after_evaluation(self, value: float) -> None:
        """Steps a scheduler that follows evaluations; the value is the same at all stages."""
        if isinstance(self.scheduler, ReduceLROnPlateau):
            self.scheduler.step(value)

    def unpredicted(self) -> dict[str, torch.Tensor]:
        weights = self.compensator.unpredicted(self.rate_factor)
        return {name: weight.to(self.named[name].device) for name, weight in weights.items()}

    def step_schedule(self) -> None:
        """Sets the learning rate of the next update, unless that is done."""
        self.step_scheduler(self.scheduler_steps_due)

    def step_scheduler(self, steps: int) -> None:
        if self.scheduler is None or steps <= 0:
            return
        if self.follows_evaluations:
            self.scheduled += steps
            return
        with nullcontext() if self._has_stepped else warnings.catch_warnings():
            if not self._has_stepped:  # skipped updates, and those before a checkpoint, count too
                warnings.filterwarnings("ignore", "Detected call of `lr_scheduler.step")
            for _ in range(steps):
                self.scheduler.step()
                self.scheduled += 1


def _check_steps_by_gradients(optimizer: torch.optim.Optimizer) -> None:
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ScheduleError(
            "the optimizer LBFGS computes the loss several times per update, but a pipeline does so once; use one that "
            "steps by gradients, such as SGD, AdamW or Muon"
        )


def _view_as_dense(gradient: torch.Tensor) -> torch.Tensor:
    """Returns a dense, real tensor that has the norm of a gradient."""
    if gradient.is_sparse:
        gradient = gradient.coalesce().values()
    return torch.view_as_real(gradient) if gradient.is_complex() else gradient
