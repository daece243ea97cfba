"""The door of compensations of delay: what surrounds a step of the user's own optimizer on one stage.

An update calls it after the gradients have been summed, normalised and clipped. An extension that offers a
`compensator` has the one that compensates.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from pipedream.core.extensions import find_offer, list_offers
from pipedream.core.schedule.delay_compensation import Compensation
from pipedream.runtime.division import Division
from pipedream.runtime.update.stepped import SteppedWeights


class Compensator:
    """Makes the steps of one stage's optimizer. This base class compensates for nothing.

    Args:
        stepped: what the optimizer steps.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, stepped: SteppedWeights, division: Division) -> None:
        self._optimizer = optimizer
        self._stepped = stepped
        self._division = division

    @property
    def state(self) -> dict[str, dict[str, torch.Tensor]]:
        """What checkpoints save: name of a parameter -> tensors."""
        return {name: {} for name in self._stepped.weights}

    @property
    def needs_read_weights(self) -> bool:
        """Whether `penalise` needs the weights at which the gradients were computed."""
        return False

    def penalise(self, newest: Mapping[str, torch.Tensor], read: Mapping[str, torch.Tensor]) -> None:
        """Changes the gradients before the step.

        Args:
            newest: weights from which the update starts.
            read: weights at which the gradients were computed.
        """

    def step(self) -> None:
        self._stepped.take_gradients()
        self._make_step()
        self._stepped.write()

    def _make_step(self) -> None:
        with self._division.stepping(self._optimizer, self._stepped.weights):
            self._optimizer.step()

    def unpredicted(self, factor: float) -> dict[str, torch.Tensor]:
        """Returns name -> weights from which the stored ones are predicted; `factor` is on the learning rate."""
        return {name: handle.detach() for name, handle in self._stepped.weights.items()}

    def load(self, name: str, saved: Mapping[str, torch.Tensor]) -> None:
        """Loads a parameter's state from a checkpoint or another method; missing entries keep their initial values."""


def make_compensator(
    compensations: Sequence[Compensation],
    staleness: int,
    optimizer: torch.optim.Optimizer,
    stepped: SteppedWeights,
    division: Division,
) -> Compensator:
    """Returns what makes the steps of a stage.

    Args:
        compensations: checked by `core.schedule.delay_compensation.check_compensations`; without any, state of former
            ones is still taken back.
        staleness: D.

    Raises:
        ScheduleError: one is not defined for this optimizer.
        PlanError: no extension here compensates.
    """
    if not compensations and not list_offers("compensator"):
        return Compensator(optimizer, stepped, division)
    offer = find_offer("compensator", f"compensation {' and '.join(map(str, compensations))} was asked for")
    compensator: Compensator = offer.DelayCompensator(compensations, staleness, optimizer, stepped, division)
    return compensator


def check_optimizer(compensations: Sequence[Compensation], optimizer: torch.optim.Optimizer) -> None:
    """Raises a `ScheduleError` if a compensation is not defined for an optimizer."""
    for compensation in compensations:
        compensation.check_optimizer(optimizer)
