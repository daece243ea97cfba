"""Where the weights and the optimizers of a process's stages are."""

from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist
from torch import nn

from pipedream.core.extensions import find_offer
from pipedream.core.schedule.program import Program
from pipedream.runtime.blueprint import Blueprint
from pipedream.runtime.stage.stage_module import StageModule
from pipedream.runtime.stage.versions import Versions, WeightStore
from pipedream.runtime.update.stepped import SteppedWeights


class Residence:
    """Weights and optimizers on the device of their stage; what has them elsewhere extends this class.

    Life: `copy` the stages whose passes here copy weights; `settle` those that are updated here; `exchange`; for each
    program `make_versions`; `close`.
    """

    def copy(self, rank: int, stage: int, module: StageModule) -> Callable[[Program], WeightStore]:
        """Returns what makes the weights that a rank's passes copy for a program."""
        raise NotImplementedError(f"passes copy no weights from {type(self).__name__}")

    def settle(
        self,
        stage: int,
        replica: int,
        module: StageModule,
        handles: Mapping[str, nn.Parameter],
        averages: dict[str, torch.Tensor],
    ) -> SteppedWeights:
        """Takes a stage replica, with the averages of its weights over time; returns what its optimizer steps."""
        return SteppedWeights(handles)

    def exchange(self) -> None:
        """Opens what other processes have; every rank calls it."""

    def make_versions(
        self, stage: int, handles: Mapping[str, nn.Parameter], *, watched: bool, single: bool
    ) -> Versions:
        """Returns the versions of a stage's weights for one program, see there."""
        return Versions(handles, watched, single)

    def close(self) -> None:
        """Ends it; the user's model continues to use its memory."""


def find_residence(blueprint: Blueprint, group: dist.ProcessGroup | None) -> Residence:
    """Returns the residence that a plan asks for; `group`: of all ranks, None in a single process."""
    if not (blueprint.placement.shares_weights or blueprint.program.plan.choices.hosts_optimizers):
        return Residence()
    offer = find_offer("residence", "weights or optimizers were to be kept in the memory of the machine")
    residence: Residence = offer.make_residence(blueprint, group)
    return residence
