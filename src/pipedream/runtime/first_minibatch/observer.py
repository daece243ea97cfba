"""Watches a stage's first minibatch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from pipedream.runtime.comm.message import Message
from pipedream.runtime.stage.stage_module import SavedForward


class StageObserver:
    """Follows a stage until its first update; this one does nothing, when nothing is to be compared."""

    def before_forward(
        self, value: Any, microbatch: int, is_first: bool, message: Message, targets: Message | None
    ) -> None:
        """Takes the input of the layers for the first microbatch; `targets` are those of the last stage."""

    def after_forward(self, index: int) -> None:
        """Follows the forward of a microbatch."""

    def before_backward(self, saved: SavedForward, gradients: Sequence[torch.Tensor | None]) -> None:
        """Takes the gradients of the stage's outputs."""

    def gradient_ready(self, index: int, gradient: torch.Tensor) -> None:
        """Takes a gradient that leaves for the other replicas."""

    def after_backward(self, index: int, gradients: Sequence[torch.Tensor | None], factor: float) -> None:
        """Takes the gradients of the weights, which are multiplied by `factor`."""

    def sent_back(self, index: int, gradients: Sequence[torch.Tensor | None]) -> None:
        """Takes the gradients of the received tensors."""

    def before_update(self, handles: Mapping[str, torch.Tensor]) -> None:
        """Takes the weights, with the gradients of the first update."""
