"""Costs of the runtime: a worker's host seconds for each op, message and update, beyond the layers."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipedream.core.artifact import NOT_STORED
from pipedream.core.units import format_seconds

_Numbers = float | NDArray[Any]


@dataclass(frozen=True)
class RuntimeCosts:
    """Seconds of a worker's host, beyond the layers and the optimizer's step; 0 where unknown.

    Attributes:
        op_s: seconds of each forward and each backward.
        message_s, message_s_per_byte: seconds that each message takes from the processor, at its sender and again at
            its receiver; those of the link are the cluster's.
        update_s: seconds of each update.
        load_s: seconds of reading a minibatch, at the input stage.
        encodings_s_per_byte: encoding -> seconds of encoding or decoding, per byte in memory.
        encoding_s_per_byte: what the encoding in use adds to `message_s_per_byte`, per byte in memory; negative if
            fewer bytes on the wire save more (`MessageEncoding.add_costs`).
        sum_s_per_byte: seconds of an all-reduce, for each byte that a worker sends; 0 takes both ends of a message.
        overlap_device: the device, a GPU, computes meanwhile; otherwise these seconds add to the layers'.
    """

    op_s: float = 0.0
    message_s: float = 0.0
    message_s_per_byte: float = 0.0
    update_s: float = 0.0
    load_s: float = 0.0
    overlap_device: bool = False
    encodings_s_per_byte: dict[str, float] = field(default_factory=dict, hash=False)
    encoding_s_per_byte: float = field(default=0.0, metadata=NOT_STORED)
    sum_s_per_byte: float = 0.0

    def __post_init__(self) -> None:
        for name in ("op_s", "message_s", "message_s_per_byte", "sum_s_per_byte", "update_s", "load_s"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} cannot be negative, found {getattr(self, name)}")

    def __bool__(self) -> bool:
        return any((self.op_s, self.message_s, self.message_s_per_byte, self.update_s, self.load_s))

    def __str__(self) -> str:
        per_mb = f" and {format_seconds(self.message_s_per_byte * 1e6)} per MB" if self.message_s_per_byte else ""
        return (
            f"the runtime adds {format_seconds(self.op_s)} to an op, {format_seconds(self.message_s)}{per_mb} to each "
            f"end of a message, {format_seconds(self.update_s)} to an update"
            f"{f'; a minibatch is read in {format_seconds(self.load_s)}' if self.load_s else ''}"
        )

    def added_s(self, device_s: _Numbers, host_s: _Numbers, launch_s: _Numbers = 0.0) -> _Numbers:
        """Returns the seconds that work adds to its `device_s` if it keeps the host busy for `host_s`.

        Args:
            launch_s: further seconds of the host to launch layers on a GPU, which always computes meanwhile.
        """
        if self.overlap_device:
            return np.maximum(host_s + launch_s - device_s, 0.0)
        return host_s + np.maximum(launch_s - device_s, 0.0)

    def end_s(self, size_bytes: _Numbers) -> _Numbers:
        """Returns the seconds of a message at its sender, or at its receiver."""
        return self.message_s + (self.message_s_per_byte + self.encoding_s_per_byte) * size_bytes

    def stage_s(
        self,
        device_s: _Numbers,
        before_bytes: _Numbers,
        after_bytes: _Numbers,
        is_first: Any,
        is_last: Any,
        launch_s: _Numbers = 0.0,
    ) -> _Numbers:
        """Returns the seconds that a stage takes beyond those of its device, for an unsplit minibatch.

        Args:
            device_s: seconds of its passes and its update.
            before_bytes, after_bytes: bytes that it receives and sends on; 0 at the model's ends.
            is_first, is_last: bools, or arrays of them.
            launch_s: seconds of its layers' passes, see `added_s`.
        """
        if not self:
            return self.added_s(device_s, 0.0, launch_s)
        first, last = np.asarray(is_first), np.asarray(is_last)
        # With each neighbour a stage exchanges an activation and its gradient; targets go from the first stage to the
        # last.
        messages_s = 2 * (~first * self.end_s(before_bytes) + ~last * self.end_s(after_bytes))
        messages_s = messages_s + (first != last) * self.message_s
        return self.added_s(device_s, 2 * self.op_s + self.update_s + first * self.load_s + messages_s, launch_s)
