"""A checkpoint's contents page: where a run stood at a drain, and where in its files each tensor lies.

Tensors are kept under the user's own parameter names (``model/NAME``, ``optimizer/NAME/KEY``, ``ema/NAME``,
``compensation/NAME/KEY``), so that a checkpoint belongs to no plan: any other one can take it up. At a drain each stage
has one version of its weights, so no stash is kept.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

from pipedream.core.artifact import Artifact
from pipedream.core.plan.plan import Plan
from pipedream.core.schedule.compensation import Compensation

__all__ = ["Checkpoint", "ParameterGroup", "SavedStage", "Stored"]

_PLAIN_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")
_TYPE = re.compile(r"[a-z][a-z0-9_]*")


@dataclass(frozen=True)
class Stored:
    """Where a tensor lies.

    Attributes:
        dtype: torch's name of its type, as in 'float32'.
        shape: its sizes.
        file: in the checkpoint's folder.
        offset, length: in bytes.
    """

    dtype: str
    shape: tuple[int, ...]
    file: str
    offset: int
    length: int

    def __post_init__(self) -> None:
        if not _TYPE.fullmatch(self.dtype):
            raise ValueError(f"a type of numbers such as float32 is wanted, found {self.dtype!r}")
        # A contents page may come from elsewhere; it shall not lead out of its folder.
        if not _PLAIN_NAME.fullmatch(self.file):
            raise ValueError(f"a file's plain name is wanted, found {self.file!r}")
        if min((self.offset, self.length, *self.shape)) < 0:
            raise ValueError(f"sizes cannot be negative, found {self}")


@dataclass(frozen=True)
class ParameterGroup:
    """One parameter group of an optimizer: names of its parameters, and its options (rate, decay, ...)."""

    names: tuple[str, ...]
    options: dict[str, Any]


@dataclass(frozen=True)
class SavedStage:
    """What a stage's optimizer has beside its tensors.

    Attributes:
        groups: parameter groups.
        numbers: parameter -> key -> value, for state that is no tensor.
        scheduler: state of the learning-rate scheduler; None without one.
        updates: optimizer steps made.
        scheduled: scheduler steps made.
        skipped: updates that were left out, for gradients that were not finite.
        loss_scale: factor on the loss and good updates in a row since it changed; None where it is not scaled.
        norm_square: square of the newest global norm of the gradients that was known; 0 before there was one.
        rounds_before: updates of the input stage under the plans and phases before, which `updates` does not count.
    """

    groups: tuple[ParameterGroup, ...]
    numbers: dict[str, dict[str, Any]] = field(default_factory=dict)
    scheduler: Any = None
    updates: int = 0
    scheduled: int = 0
    norm_square: float = 0.0
    skipped: int = 0
    loss_scale: tuple[float, int] | None = None
    rounds_before: int = 0

    def __post_init__(self) -> None:
        if not self.groups:
            raise ValueError("an optimizer has at least one parameter group, found none")
        if self.scheduler is not None and not isinstance(self.scheduler, dict):
            raise ValueError(f"a scheduler's state is an object, found {self.scheduler!r}")
        if min(self.updates, self.scheduled, self.rounds_before) < 0:
            raise ValueError(
                f"counts cannot be negative, found {self.updates} updates, {self.scheduled} scheduled, "
                f"{self.rounds_before} rounds before"
            )


@dataclass(frozen=True)
class Checkpoint(Artifact):
    """The contents page.

    Attributes:
        minibatches: done since the start of training.
        epoch, epoch_batches: where the data goes on.
        drains: minibatch numbers at which the pipeline was drained; this is the last of them.
        schedule, compensation, microbatches, seed, plan: of the run that saved it; the first three of its phase.
        phases: of that run as they were asked for, as text (`core.schedule.phase`); empty where it has but one method.
        phases_compensation: what was asked for those that do not say their own; None where nothing was.
        stages: one for each of the plan's.
        tensors: by name.
        files: name -> bytes; a file of another size is damaged.
        random: of each process, its generators.
        data: order of the data, and the loader's own state.
        software: versions of what saved it.

    Raises:
        ValueError: what it says does not fit together.
    """

    FORMAT = 1

    minibatches: int
    epoch: int
    epoch_batches: int
    drains: tuple[int, ...]
    schedule: str
    microbatches: int
    seed: int
    plan: Plan
    stages: tuple[SavedStage, ...]
    tensors: dict[str, Stored] = field(default_factory=dict)
    files: dict[str, int] = field(default_factory=dict)
    random: tuple[str, ...] = ()
    data: Any = None
    phases: str = ""
    software: dict[str, str] = field(default_factory=dict)
    compensation: tuple[Compensation, ...] = ()
    phases_compensation: tuple[Compensation, ...] | None = None

    def __post_init__(self) -> None:
        if min(self.minibatches, self.epoch, self.epoch_batches) < 0 or self.microbatches < 1:
            raise ValueError(
                f"minibatches {self.minibatches}, epoch {self.epoch} with {self.epoch_batches} done, "
                f"{self.microbatches} microbatches are no position"
            )
        if len(self.stages) != len(self.plan.stages):
            raise ValueError(f"{len(self.plan.stages)} stages are planned, {len(self.stages)} are described")
        if self.data is not None and not isinstance(self.data, dict):
            raise ValueError(f"the data's state is an object, found {self.data!r}")
        for name, stored in self.tensors.items():
            if stored.offset + stored.length > self.files.get(stored.file, 0):
                raise ValueError(f"tensor {name!r} lies outside of the file {stored.file!r}")
