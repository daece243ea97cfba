"""Compensations of delay: what one stage does around a step of the user's own optimizer.

Within an update, after the gradients have been summed, normalised and clipped:

1. changes of the gradients that need the weights at which they were computed, while these still exist;
2. changes of the learning rate (`RateSchedule.factor`) and other changes of the gradients;
3. the optimizer's own step, followed by a further move of the weights.

The stored weights are the compensated ones, y of `core.schedule.delay_compensation`; `unpredicted` computes the others.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from pipedream.core.schedule.delay_compensation import COMPENSATIONS, Compensation
from pipedream.runtime.division import Division
from pipedream.runtime.update.compensator import Compensator, check_optimizer
from pipedream.runtime.update.stepped import SteppedWeights

_COUPLED = (
    torch.optim.SGD,
    torch.optim.ASGD,
    torch.optim.Adadelta,
    torch.optim.Adagrad,
    torch.optim.Adam,
    torch.optim.Adamax,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.RMSprop,
)
"""Optimizers that add the weight decay to the gradient, except in groups with ``decoupled_weight_decay``."""


class CompensatedStage:
    """One stage as one of its compensations sees it.

    Attributes:
        handles: what the optimizer steps, by name; `names` has their names by id.
        staleness: D.
        state: name -> tensors that checkpoints save.
        tool: anything else that the compensation keeps.
        listeners: called with the optimizer's steps, see `Compensation.note_steps`.
    """

    tool: Any = None

    def __init__(
        self,
        handles: Mapping[str, torch.nn.Parameter],
        optimizer: torch.optim.Optimizer,
        staleness: int,
        division: Division,
    ) -> None:
        self.handles = handles
        self.names = {id(handle): name for name, handle in handles.items()}
        self.optimizer = optimizer
        self.staleness = staleness
        self.state: dict[str, dict[str, torch.Tensor]] = {name: {} for name in handles}
        self.listeners: list[Callable[[Sequence[Any], Sequence[Any], float], None]] = []
        self._division = division

    def name_of(self, handle: torch.Tensor) -> str | None:
        return self.names.get(id(handle))

    def adds_decay(self, group: Mapping[str, Any]) -> bool:
        """Returns whether the optimizer adds a group's weight decay to the gradient."""
        return isinstance(self.optimizer, _COUPLED) and not group.get("decoupled_weight_decay", False)

    def step_and_measure(self, step: Callable[[], None]) -> list[torch.Tensor]:
        """Makes a step, and returns what it has subtracted from each handle."""
        updates = [handle.detach().clone() for handle in self.handles.values()]
        step()
        if updates:
            torch._foreach_sub_(updates, [handle.detach() for handle in self.handles.values()])
        return updates

    def note_updates(self, updates: Sequence[torch.Tensor]) -> None:
        """Passes what the optimizer has subtracted from each handle to the listeners."""
        update_by_id = dict(zip(map(id, self.handles.values()), updates, strict=True)) if self.listeners else {}
        for group in self.optimizer.param_groups if update_by_id else ():
            if rate := float(group["lr"]):
                stepped = [handle for handle in group["params"] if id(handle) in update_by_id]
                self.note_steps(stepped, [update_by_id[id(handle)] / rate for handle in stepped], rate)

    def note_steps(self, handles: Sequence[torch.Tensor], steps: Sequence[torch.Tensor], rate: float) -> None:
        """Passes the optimizer's steps, divided by the learning rate, to the listeners."""
        for listen in self.listeners:
            listen(handles, steps, rate)

    def gather(self, name: str, tensors: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        """Returns whole tensors from the parts that this rank of a mesh has of them, in the layout of a handle."""
        return {n: self._division.gather([name], tensor) for n, tensor in tensors.items()}

    def take_part(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Returns the part that this rank of a mesh has of a whole tensor."""
        return self._division.take_part([name], tensor)


class DelayCompensator(Compensator):
    """Compensates for the stale gradients of one stage.

    Args:
        compensations: checked by `core.schedule.delay_compensation.check_compensations`.
        staleness: D.
        stepped: what the optimizer steps.

    Raises:
        ScheduleError: one is not defined for this optimizer.
    """

    def __init__(
        self,
        compensations: Sequence[Compensation],
        staleness: int,
        optimizer: torch.optim.Optimizer,
        stepped: SteppedWeights,
        division: Division,
    ) -> None:
        super().__init__(optimizer, stepped, division)
        check_optimizer(compensations, optimizer)
        make_stage = partial(CompensatedStage, stepped.weights, optimizer, staleness, division)
        self._stage = make_stage()
        self._parts = [(compensation, make_stage()) for compensation in compensations]
        self._mover = next((part for part in self._parts if part[0].moves_at(staleness)), None)
        for compensation, stage in self._parts:
            compensation.begin(stage)
            if compensation.notes_steps:
                for listened in (self._stage, *(other for _, other in self._parts)):
                    listened.listeners.append(partial(compensation.note_steps, stage))

    @property
    def state(self) -> dict[str, dict[str, torch.Tensor]]:
        merged = super().state
        for _, stage in self._parts:
            for name, tensors in stage.state.items():
                merged[name] |= tensors
        return merged

    @property
    def needs_read_weights(self) -> bool:
        return any(compensation.needs_read_weights for compensation, _ in self._parts)

    def penalise(self, newest: Mapping[str, torch.Tensor], read: Mapping[str, torch.Tensor]) -> None:
        for compensation, stage in self._parts:
            compensation.penalise(stage, newest, read)

    def _make_step(self) -> None:
        for compensation, stage in self._parts:
            compensation.change_gradients(stage)
        if self._mover is not None:
            compensation, stage = self._mover
            compensation.move(stage, self._step_optimizer)
        elif self._stage.listeners:
            self._stage.note_updates(self._stage.step_and_measure(self._step_optimizer))
        else:
            self._step_optimizer()

    def unpredicted(self, factor: float) -> dict[str, torch.Tensor]:
        """Returns name -> weights w = y + p, from which the stored ones are predicted.

        p is lr T v, at the present learning rate (times `factor`) and momentum of the groups, or lambda u_{t-1}.
        """
        weights = super().unpredicted(factor)
        for compensation, stage in self._parts:
            compensation.unpredict(stage, weights, factor)
        return weights

    def load(self, name: str, saved: Mapping[str, torch.Tensor]) -> None:
        for compensation, stage in self._parts:
            compensation.load(stage, name, saved)
        for kind in {*COMPENSATIONS.named.values()} - {type(compensation) for compensation, _ in self._parts}:
            kind.leave(self._stage, name, saved)

    def _step_optimizer(self) -> None:
        step: Callable[[], Any] = self._optimizer.step
        for compensation, stage in self._parts:
            step = partial(compensation.step, stage, step)
        with self._division.stepping(self._optimizer, self._stepped.weights):
            step()
