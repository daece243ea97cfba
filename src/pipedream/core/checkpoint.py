"""A checkpoint's manifest: a run's position at a drain, and the places of each tensor's pieces in its files.

Tensors have the user's own parameter names (``model/NAME``, ``optimizer/NAME/KEY``, ``ema/NAME``,
``compensation/NAME/KEY``), so that any plan can load them; what a single replica has is under ``replica/R/``. At a
drain each stage has one version of its weights, so no stash is saved.
"""

from __future__ import annotations

import json
import re
import zlib
from dataclasses import dataclass, field
from math import prod
from typing import Any, NamedTuple, Self

from pipedream.core.artifact import Artifact, decode_fields, encode
from pipedream.core.box import Box
from pipedream.core.errors import ArtifactError
from pipedream.core.plan.plan import Plan
from pipedream.core.schedule.delay_compensation import Compensation

_PLAIN_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")
_TYPE = re.compile(r"[a-z][a-z0-9_]*")


_FINITE_OPTIONS = {"lr", "initial_lr", "betas", "momentum", "weight_decay", "eps"}
"""Options that must be finite; in others, infinity means no limit."""

_MAX_COUNT = 10**15


class StoredPiece(NamedTuple):
    """Where a part of a tensor is stored.

    Attributes:
        start: the part's first index in each dimension of the tensor.
        shape: the part's shape.
        offset, length: bytes in the file.
        crc32: checksum of dtype, shape and values.
    """

    start: tuple[int, ...]
    shape: tuple[int, ...]
    file: str
    offset: int
    length: int
    crc32: int

    @property
    def box(self) -> Box:
        return tuple(range(first, first + size) for first, size in zip(self.start, self.shape, strict=True))


@dataclass(frozen=True)
class Stored:
    """Where a tensor is stored: in pieces, each element in exactly one.

    In JSON the fields of a single piece are next to the dtype, as in earlier files.
    """

    dtype: str
    shape: tuple[int, ...]
    pieces: tuple[StoredPiece, ...]

    def __post_init__(self) -> None:
        if not _TYPE.fullmatch(self.dtype):
            raise ValueError(f"expected a dtype such as float32, found {self.dtype!r}")
        for piece in self.pieces:
            # An untrusted manifest must not lead out of its folder.
            if not _PLAIN_NAME.fullmatch(piece.file):
                raise ValueError(f"expected a file name without folders, found {piece.file!r}")
            if min((piece.offset, piece.length, *self.shape, *piece.start, *piece.shape)) < 0:
                raise ValueError(f"sizes cannot be negative, found {self}")
            if not len(piece.start) == len(piece.shape) == len(self.shape):
                raise ValueError(f"a piece has the dimensions of its tensor, {self.shape}, found {piece}")
            if any(part.stop > size for part, size in zip(piece.box, self.shape, strict=True)):
                raise ValueError(f"a piece lies within its tensor, {self.shape}, found {piece}")
        if len({piece.start for piece in self.pieces}) < len(self.pieces) or not self.pieces:
            raise ValueError(f"a tensor has pieces with different starts, found {self.pieces}")
        piece_values = sum(prod(piece.shape) for piece in self.pieces)
        if piece_values != prod(self.shape):
            raise ValueError(f"the pieces make up the tensor of {prod(self.shape)} values, found {piece_values}")

    def encoded(self) -> dict[str, Any]:
        first, *others = self.pieces
        if others:
            return {field: encode(value) for field, value in vars(self).items()}
        where = {key: value for key, value in first._asdict().items() if key not in ("start", "shape")}
        return {"dtype": self.dtype, "shape": encode(self.shape), **where}

    @classmethod
    def decoded(cls, value: dict[str, Any], where: str) -> Self:
        """Reads JSON values. Raises an ArtifactError if a field is missing or wrong."""
        if "pieces" not in value:
            shape = value.get("shape")
            start = [0] * len(shape) if isinstance(shape, list) else shape
            piece = {"start": start, "shape": shape} | {key: value.get(key) for key in StoredPiece._fields[2:]}
            other_fields = {key: item for key, item in value.items() if key not in piece or key == "shape"}
            value = other_fields | {"pieces": [list(piece.values())]}
        stored: Self = decode_fields(cls, value, where)
        return stored


@dataclass(frozen=True)
class ParameterGroup:
    """An optimizer's parameter group: parameter names, and options (rate, decay, ...)."""

    names: tuple[str, ...]
    options: dict[str, Any]

    def __post_init__(self) -> None:
        for key in _FINITE_OPTIONS & self.options.keys():
            _check_finite(self.options[key], key)


@dataclass(frozen=True)
class SavedStage:
    """The state of a stage's optimizer other than tensors.

    Attributes:
        numbers: parameter -> key -> value, for values other than tensors.
        common: the optimizer's state that belongs to no parameter.
        nested: path -> parameter groups, of an optimizer within the optimizer.
        rest: all else in its state dict.
        optimizer_class, scheduler_class: their names; '' if unknown, or without a scheduler.
        modules: module -> what its ``get_extra_state`` returned.
        generators: path -> state of a random generator that a module holds.
        updates, scheduled: steps of the optimizer and the learning-rate scheduler.
        norm_square: square of the newest global norm of gradients.
        skipped: updates with gradients that were not finite.
        loss_scale: factor, and good updates in a row since it changed.
        rounds_before: updates of the input stage under earlier plans and phases.
        since_average: updates since the weights of the replicas were averaged.
        replicas: the states of the other replicas, if they differ (`SumMethod.averages_weights`).
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
    common: dict[str, Any] = field(default_factory=dict)
    modules: dict[str, Any] = field(default_factory=dict)
    generators: dict[str, Any] = field(default_factory=dict)
    nested: dict[str, tuple[ParameterGroup, ...]] = field(default_factory=dict)
    rest: Any = None
    optimizer_class: str = ""
    scheduler_class: str = ""
    since_average: int = 0
    replicas: tuple[SavedStage, ...] = ()

    def __post_init__(self) -> None:
        if not self.groups:
            raise ValueError("an optimizer has at least one parameter group, found none")
        if self.scheduler is not None and not isinstance(self.scheduler, dict):
            raise ValueError(f"a scheduler's state is an object, found {self.scheduler!r}")
        _check_counts(updates=self.updates, scheduled=self.scheduled, rounds_before=self.rounds_before)


@dataclass(frozen=True)
class Position:
    """Where a run stands at a drain.

    Attributes:
        minibatches: since the start of training.
        epoch, epoch_batches: the next minibatch's epoch, and the minibatches done in it.
        drains: minibatch numbers of all drains, this one last.
        data: order of the data, and the loader's own state.
        callbacks: states, by class.
    """

    minibatches: int
    epoch: int
    epoch_batches: int
    drains: tuple[int, ...]
    data: Any = field(default=None, kw_only=True)
    callbacks: dict[str, Any] = field(default_factory=dict, kw_only=True)

    def __post_init__(self) -> None:
        _check_counts(minibatches=self.minibatches, epoch=self.epoch, epoch_batches=self.epoch_batches)
        if self.data is not None and not isinstance(self.data, dict):
            raise ValueError(f"the state of the data is an object, found {self.data!r}")


@dataclass(frozen=True, kw_only=True)
class PipelineRequest:
    """What a run asked of its pipeline; `phases_compensation`: for phases that name none."""

    seed: int
    plan: Plan
    phases: str = ""
    phases_compensation: tuple[Compensation, ...] | None = None


@dataclass(frozen=True)
class Checkpoint(PipelineRequest, Position, Artifact):
    """A run, its position and its state there. Its JSON has a checksum, ``crc32``.

    Attributes:
        schedule, microbatches, compensation: the current phase's.
        files: name -> bytes; a file of another size is damaged.
        random: states of the generators of each process.
        extra: the training loop's own state, in JSON.
    """

    FORMAT = 1

    schedule: str
    microbatches: int
    stages: tuple[SavedStage, ...]
    compensation: tuple[Compensation, ...] = ()
    tensors: dict[str, Stored] = field(default_factory=dict)
    files: dict[str, int] = field(default_factory=dict)
    random: tuple[str, ...] = ()
    software: dict[str, str] = field(default_factory=dict)
    extra: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.minibatches and not self.data:
            raise ValueError("it has no state of the data, whose order would begin anew; resume from another one")
        if self.microbatches < 1:
            raise ValueError(f"a minibatch has at least one microbatch, found {self.microbatches}")
        if len(self.stages) != len(self.plan.stages):
            raise ValueError(f"the plan has {len(self.plan.stages)} stages, the checkpoint {len(self.stages)}")
        for name in self.files:
            if not _PLAIN_NAME.fullmatch(name):  # as in `Stored`
                raise ValueError(f"expected a file name without folders, found {name!r}")
        for name, stored in self.tensors.items():
            for piece in stored.pieces:
                if piece.offset + piece.length > self.files.get(piece.file, 0):
                    raise ValueError(f"tensor {name!r} lies outside of the file {piece.file!r}")

    def to_json(self) -> str:
        data = json.loads(super().to_json())
        return json.dumps(data | {"crc32": _compute_crc32(data)}, indent=1)

    @classmethod
    def from_json(cls, text: str, source: str = "the text") -> Self:
        """See `Artifact.from_json`; also raises an `ArtifactError` if the text was changed."""
        try:
            data = json.loads(text)
        except (ValueError, RecursionError):
            data = None
        if isinstance(data, dict) and "crc32" in data:
            saved_crc32, crc32 = data.pop("crc32"), _compute_crc32(data)
            if saved_crc32 != crc32:
                raise ArtifactError(f"{source} is damaged: its checksum is {crc32}, and was {saved_crc32} when saved")
            text = json.dumps(data)
        return super().from_json(text, source)


def _check_counts(**counts: int) -> None:
    if not 0 <= min(counts.values()) <= max(counts.values()) <= _MAX_COUNT:
        raise ValueError(f"counts are from 0 to {_MAX_COUNT:g}, found {counts}")


def _check_finite(value: Any, what: str) -> None:
    if isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            _check_finite(item, what)
    elif isinstance(value, float) and not abs(value) <= 1e60:
        raise ValueError(f"the optimizer's option {what} is a number up to 1e60, found {value}")


def _compute_crc32(data: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(data, sort_keys=True).encode())
