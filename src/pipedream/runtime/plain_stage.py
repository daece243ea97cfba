"""Compares a stage's first microbatch with its layers, run plainly on what the stage has received.

For models that do not fit one worker as a whole. The layers run on a copy of the received value, with the user's own
parameters, before the stage's own forward; their outputs, and their gradients for the gradients that the stage has
received, must be the stage's own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from pipedream.runtime.comm.values import map_tensors, tensors_in
from pipedream.runtime.first_minibatch import ReferenceRun, StageCheck
from pipedream.runtime.stage.auxiliary import auxiliary_loss_scale
from pipedream.runtime.stage.stage_module import SavedForward, StageModule


class PlainStage(StageCheck):
    """What one stage compares with its own layers.

    Args:
        names: of its trained parameters, in the order of the handles.
    """

    def __init__(self, check: ReferenceRun, stage: int, module: StageModule, names: Sequence[str]) -> None:
        super().__init__(check, stage, (), names, alone=False)
        self._module = module
        self._inputs: list[torch.Tensor] = []
        self._outputs: tuple[torch.Tensor, ...] = ()
        self._input_gradients: list[torch.Tensor | None] = []
        self._is_ready = False

    def before_forward(self, value: Any, microbatch: int, first: bool, finish: Callable[[Any], Any] | None) -> None:
        """Runs the layers; `finish` makes the loss of the last stage's output."""

        def entered(tensor: torch.Tensor) -> torch.Tensor:
            copy = tensor.detach().clone()
            if not tensor.requires_grad:
                return copy
            self._inputs.append(copy.requires_grad_())
            return copy.clone()  # into which a layer may write

        # Within a forward that is to be recomputed, no other graph would be kept.
        keeping = torch.autograd.graph.saved_tensors_hooks(_return_itself, _return_itself)
        with self._check.restoring_state(), torch.enable_grad(), keeping:
            output = self._module.forward(map_tensors(value, entered), dict(self._module.handles), microbatch, first)
            if finish is not None:
                with self._module.casting():
                    output = finish(output)
        self._outputs = tensors_in(output)
        self._check.note_kinds(self._outputs)

    def before_backward(self, saved: SavedForward, gradients: Sequence[torch.Tensor | None]) -> None:
        """Compares the outputs, and takes the gradients of the layers for those that the outputs have."""
        if saved.microbatch or not self._outputs:
            return
        self._check.compare_values(self._stage, "output", self._outputs, saved.outputs)
        pairs = [(o, g) for o, g in zip(self._outputs, gradients, strict=True) if g is not None and o.requires_grad]
        handles = [self._module.handles[name] for name in self._names]
        layer_gradients: Sequence[torch.Tensor | None] = [None] * (len(handles) + len(self._inputs))
        if pairs:
            ends, arrived = zip(*pairs, strict=True)
            with auxiliary_loss_scale(saved.auxiliary_scale):
                layer_gradients = torch.autograd.grad(ends, [*handles, *self._inputs], arrived, allow_unused=True)
        self._check.refer_to(dict(zip(self._names, layer_gradients, strict=False)))
        self._input_gradients = list(layer_gradients[len(handles) :])
        self._inputs, self._outputs = [], ()
        self._is_ready = True

    def after_forward(self, index: int) -> None:
        """Compares no buffers: those of the layers alone were copies."""

    def after_backward(self, index: int, gradients: Sequence[torch.Tensor | None], factor: float) -> None:
        if not index and self._is_ready:
            super().after_backward(index, gradients, 1.0)

    def sent_back(self, index: int, gradients: Sequence[torch.Tensor | None]) -> None:
        """Compares the gradients of the received tensors, which go to the previous stage."""
        if index or not self._is_ready or len(gradients) != len(self._input_gradients):
            return
        pairs = [(a, b) for a, b in zip(self._input_gradients, gradients, strict=True) if a is not None]
        expected, actual = [a for a, _ in pairs], [torch.zeros_like(a) if b is None else b for a, b in pairs]
        self._check.compare_values(self._stage, "gradient of the received tensor", expected, actual)
        self._input_gradients = []


def _return_itself(tensor: torch.Tensor) -> torch.Tensor:
    return tensor
