"""An update: sum over replicas, normalise, set the learning rate, step, average the weights.

Between `Optimizer.prepare` and `Optimizer.step` gradients may be clipped (`decision`).
Compensations of delay act on the clipped gradients, the learning rate and the step. The optimizer is the user's, one
per stage.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch

from pipedream.core.errors import ScheduleError
from pipedream.runtime.comm.channel import Waiting
from pipedream.runtime.division import Division
from pipedream.runtime.update.compensator import make_compensator
from pipedream.runtime.update.gradients import Gradients, ReducedGradients
from pipedream.runtime.update.rate_schedule import RateSchedule
from pipedream.runtime.update.reducer import Reducer
from pipedream.runtime.update.stepped import LossFactor, MovingAverages, SteppedWeights


def make_optimizer(
    factory: Callable[[list[tuple[str, torch.nn.Parameter]]], torch.optim.Optimizer], stepped: SteppedWeights
) -> torch.optim.Optimizer:
    """Returns the user's optimizer of a stage. A stage without weights still has the common clock and learning rate.

    Args:
        factory: from a list of (name, parameter).

    Raises:
        ScheduleError: it has chosen no parameter, or computes the loss itself.
    """
    pairs = list(stepped.weights.items()) or [("nothing", torch.nn.Parameter(torch.zeros(())))]
    try:
        optimizer = factory(pairs)
    except ValueError as error:
        if "empty parameter list" not in str(error):
            raise
        raise ScheduleError(
            "the optimizer's factory is called once per stage, and has chosen none of this stage's parameters, "
            f"{', '.join(name for name, _ in pairs[:3])}{', ...' if pairs[3:] else ''}; freeze what is not to be "
            "trained (requires_grad_(False)), so that a stage without trained parameters needs no optimizer"
        ) from error
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ScheduleError(
            "the optimizer LBFGS computes the loss several times per update, but a pipeline does so once; use one that "
            "steps by gradients, such as SGD, AdamW or Muon"
        )
    return optimizer


class Optimizer:
    """The user's optimizer on one stage's weights, and everything that belongs to its step under one program.

    Args:
        schedule: has the optimizer.
        reducer: how the replicas agree; by default there is one replica.
        averages: of the weights over time; by default none are kept.
        loss_scale: by default the loss is not scaled.
        division: by default the worker is a single rank.

    Attributes:
        named: the handles, by name.
        ema: the averages, by name.
        finite: False skips the next update.
        skipped: updates so far.

    Raises:
        ScheduleError: a compensation is not defined for the optimizer.
    """

    def __init__(
        self,
        stepped: SteppedWeights,
        schedule: RateSchedule,
        *,
        reducer: Reducer | None = None,
        averages: MovingAverages | None = None,
        loss_scale: LossFactor | None = None,
        division: Division | None = None,
    ) -> None:
        self.stepped = stepped
        self.named = stepped.handles
        self.schedule = schedule
        self.optimizer, self.rule = schedule.optimizer, schedule.rule
        self.reducer = reducer or Reducer()
        self._averages = averages or MovingAverages({})
        self.ema = self._averages.tensors
        self.loss_scale = loss_scale or LossFactor()
        self.division = division or Division()
        self.compensator = make_compensator(
            self.rule.updates.compensation, self.rule.staleness, self.optimizer, stepped, self.division
        )
        self.finite = True
        self.skipped = 0

    def take_over(self, former: Optimizer, input_updates: int) -> None:
        """Continues after another program's updates of the same weights, at a drain.

        The state of a compensation continues if the former program kept it too.

        Args:
            input_updates: the input stage's updates with the former program.
        """
        self.schedule.take_over(former.schedule, input_updates)
        self.skipped = former.skipped
        for name, tensors in former.compensator.state.items():
            self.compensator.load(name, tensors)

    def switch_mode(self, mode: Literal["train", "eval"]) -> bool:
        """Calls the optimizer's own ``train()`` or ``eval()``, which may move weights. Returns whether it has them."""
        if not all(callable(getattr(self.optimizer, name, None)) for name in ("train", "eval")):
            return False
        getattr(self.optimizer, mode)()
        return True

    def prepare(self, gradients: Gradients, stop_request: float = 0.0) -> Waiting[tuple[float, bool]]:
        """Sums and divides the update's gradients (`gather`, `normalise`), and sets the handles' ``.grad``."""
        gathered = yield from self.gather(gradients, stop_request)
        return self.normalise(gathered)

    def gather(self, gradients: Gradients, stop_request: float = 0.0) -> Waiting[ReducedGradients]:
        """Returns the gradients summed over each replica's ranks and, unless they average weights, over replicas."""
        reduced = yield from self.reducer.take(gradients, stop_request, self._divisor)
        self.division.sum_gradients(list(self.named), reduced.gradients)
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
        for handle, total in zip(self.named.values(), gathered.gradients, strict=True):
            handle.grad = None if total is None else next(summed)
        count = gathered.microbatches if gathered.present is None else gathered.present
        present_share = count / self.rule.replicas if self.rule.updates.mean_of_rounds else 1.0
        return present_share, gathered.stop_request > 0

    def _divisor(self, gathered: ReducedGradients) -> float:
        return gathered.divisor(self.rule.updates.mean_of_rounds) * self.loss_scale.value

    def step(self, present_share: float = 1.0) -> None:
        """Makes the update from the handles' ``.grad``: learning-rate schedule, step, average.

        A skipped update counts only for the schedule.
        """
        self.schedule.step()
        self.reducer.finish_step(is_made=self.finite)
        if self.finite:
            self._step(present_share)
        else:
            self.skipped += 1
        self.schedule.updates += 1
        for handle in self.named.values():
            handle.grad = None
        self.loss_scale.update(self.finite)

    def _step(self, present_share: float) -> None:
        # A replica that averages weights has divided by its own share, and makes no step if it is absent.
        factor = self.schedule.factor * (1.0 if self.reducer.averages_weights else present_share)
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
        self.schedule.has_stepped = True
        self._averages.follow()

    def unpredicted(self) -> dict[str, torch.Tensor]:
        weights = self.compensator.unpredicted(self.schedule.factor)
        return {name: weight.to(self.named[name].device) for name, weight in weights.items()}
