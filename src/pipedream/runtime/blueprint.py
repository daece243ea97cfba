"""What all workers of a run are built from."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from pipedream.core.plan.placement import Placement
from pipedream.core.plan.ranks import Mesh, TensorLayout
from pipedream.core.plan.stage import TiedWeights
from pipedream.core.schedule.program import Program
from pipedream.core.schedule.update_policy import Policy
from pipedream.runtime.data.splitter import BatchDim
from pipedream.runtime.recorder import Recorder
from pipedream.runtime.results import Results
from pipedream.runtime.scorer import Scorer
from pipedream.runtime.update.stepped import LossFactor


@dataclass(frozen=True)
class Settings:
    """The user's choices for the training itself.

    Attributes:
        make_scorer: returns what computes losses and metrics.
        metrics: their names.
        ema: decay of the averaged weights; None keeps no average.
        autocast: dtype of the forwards; None computes in the dtype of the weights.
        compile: returns what runs in place of a layer; None runs the layers as they are.
        make_loss_scale: returns the factor on the loss of a stage.
        batch_dim: dimension of the samples in the model's inputs, see `data.splitter`.
        planned_samples: of a minibatch in the plan, compared with the first minibatch's; 1 compares nothing.
        layout: of tensors on the ranks of each worker; None where none is divided.
        parallelize: shards layers in place of the layout.
    """

    make_scorer: Callable[[Results, Program], Scorer]
    optimizer: Callable[[list[tuple[str, nn.Parameter]]], torch.optim.Optimizer]
    metrics: Sequence[str] = ()
    scheduler: Callable[[torch.optim.Optimizer], Any] | None = None
    seed: int = 0
    policy: Policy = field(default_factory=Policy)
    ema: float | None = None
    autocast: torch.dtype | None = None
    compile: Callable[[nn.Module], Callable[..., Any]] | None = None
    make_loss_scale: Callable[[], LossFactor] = LossFactor
    batch_dim: BatchDim = 0
    planned_samples: int = 1
    layout: TensorLayout | None = None
    parallelize: Callable[[str, nn.Module, Any], Any] | None = None


@dataclass(frozen=True)
class Blueprint:
    """What all workers of a run are built from.

    Attributes:
        programs: one for each phase of the training, over the same channels; verified.
        evaluation: a verified program without backwards.
        stages: (name, module) of each stage's layers.
        last_layers: name of each stage's last layer, in the model's graph.
        make_recorder: returns what records a worker, from its rank and the device.
        settings_to_agree: returns settings that must be equal on all ranks, as texts by name.
        phase: the one that is trained now.
    """

    programs: Sequence[Program]
    evaluation: Program
    stages: Sequence[Sequence[tuple[str, nn.Module]]]
    settings: Settings
    device: torch.device
    make_recorder: Callable[[int, torch.device], Recorder] = Recorder
    settings_to_agree: Callable[[], Mapping[str, str]] = dict
    last_layers: Sequence[str] = ()
    phase: int = 0

    @property
    def program(self) -> Program:
        return self.programs[self.phase]

    @property
    def tied(self) -> tuple[TiedWeights, ...]:
        return self.program.plan.tied_weights

    @property
    def weights_device(self) -> torch.device:
        """Where weights are updated: the device, or the memory of the machine (`residence`)."""
        return torch.device("cpu") if self.placement.shares_weights else self.device

    @property
    def meshes(self) -> tuple[Mesh, ...]:
        return self.placement.meshes(self.program.plan.meshes)

    @property
    def placement(self) -> Placement:
        return self.program.placement
