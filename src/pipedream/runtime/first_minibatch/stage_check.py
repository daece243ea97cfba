"""What one stage compares of its first minibatch, at its own ops."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from pipedream.runtime.comm.message import Message
from pipedream.runtime.comm.values import map_tensors, tensors_in, unflatten
from pipedream.runtime.first_minibatch.observer import StageObserver
from pipedream.runtime.first_minibatch.reference_run import ReferenceRun
from pipedream.runtime.stage.auxiliary import auxiliary_loss_scale
from pipedream.runtime.stage.stage_module import SavedForward, StageModule
from pipedream.sharding.stage import StageSharding


class StageCheck(StageObserver):
    """Compares a stage's buffers and gradients with those of the model, which has run as a whole.

    Args:
        buffers: names of the stage's, of which no other replica has moved others.
        names: of its trained parameters, in the order of the handles.
        alone: its first update holds the minibatch alone; otherwise the gradients of the minibatch's only microbatch,
            0, are compared before they are summed over the replicas.
        sharding: of a mesh, whose ranks compare whole gradients.
    """

    def __init__(
        self,
        run: ReferenceRun,
        stage: int,
        buffers: Sequence[str],
        names: Sequence[str],
        *,
        alone: bool,
        sharding: StageSharding | None = None,
    ) -> None:
        self._run = run
        self._stage = stage
        self._buffers = buffers
        self._names = names
        self._alone = alone
        self._sharding = sharding
        self._ready: dict[int, torch.Tensor] = {}

    def after_forward(self, index: int) -> None:
        if index == self._run.split - 1:
            model = self._run.model
            self._run.comparer.compare_buffers(self._stage, ((name, model.get_buffer(name)) for name in self._buffers))

    def gradient_ready(self, index: int, gradient: torch.Tensor) -> None:
        if not self._alone:
            self._ready[index] = gradient.clone()

    def after_backward(self, index: int, gradients: Sequence[torch.Tensor | None], factor: float) -> None:
        if self._alone or index or not factor:
            return
        present = {i: gradient for i, gradient in enumerate(gradients) if gradient is not None} | self._ready
        named = {name: present.get(i) for i, name in enumerate(self._names)}
        self._run.comparer.compare_gradients(self._stage, named, factor)
        self._ready.clear()

    def before_update(self, handles: Mapping[str, torch.Tensor]) -> None:
        for name, handle in zip(self._names, handles.values(), strict=True) if self._alone else ():
            gradient = handle.grad
            if gradient is not None and self._sharding is not None:
                gradient = self._sharding.gather([name], gradient)
            self._run.comparer.compare_gradients(self._stage, {name: gradient})


class LayersCheck(StageCheck):
    """Compares a stage's first microbatch with its layers, run plainly on what the stage has received.

    The layers run on a copy of the received value, with the user's own parameters, before the stage's own forward;
    their outputs, and their gradients for the gradients that the stage has received, must be the stage's own.
    """

    def __init__(self, run: ReferenceRun, stage: int, module: StageModule, names: Sequence[str]) -> None:
        super().__init__(run, stage, (), names, alone=False)
        self._module = module
        self._inputs: list[torch.Tensor] = []
        self._outputs: tuple[torch.Tensor, ...] = ()
        self._input_gradients: list[torch.Tensor | None] = []
        self._is_ready = False

    def before_forward(
        self, value: Any, microbatch: int, is_first: bool, message: Message, targets: Message | None
    ) -> None:
        def enter(tensor: torch.Tensor) -> torch.Tensor:
            copy = tensor.detach().clone()
            if not tensor.requires_grad:
                return copy
            self._inputs.append(copy.requires_grad_())
            return copy.clone()  # into which a layer may write

        # Within a forward that is to be recomputed, no other graph would be kept.
        keeping = torch.autograd.graph.saved_tensors_hooks(_return_itself, _return_itself)
        with self._run.restoring_state(), torch.enable_grad(), keeping:
            output = self._module.forward(map_tensors(value, enter), dict(self._module.handles), microbatch, is_first)
            if targets is not None:
                with self._module.casting():
                    output = self._run.loss_of(output, message, unflatten(targets.structure, targets.tensors))  # type: ignore[arg-type]
        self._outputs = tensors_in(output)
        self._run.note_kinds(self._outputs)
        self._run.refer_to({})

    def before_backward(self, saved: SavedForward, gradients: Sequence[torch.Tensor | None]) -> None:
        """Compares the outputs, and takes the gradients of the layers for those that the outputs have."""
        if saved.microbatch or not self._outputs:
            return
        self._run.comparer.compare_values(self._stage, "output", self._outputs, saved.outputs)
        pairs = [(o, g) for o, g in zip(self._outputs, gradients, strict=True) if g is not None and o.requires_grad]
        handles = [self._module.handles[name] for name in self._names]
        layer_gradients: Sequence[torch.Tensor | None] = [None] * (len(handles) + len(self._inputs))
        if pairs:
            ends, arrived = zip(*pairs, strict=True)
            with auxiliary_loss_scale(saved.auxiliary_scale):
                layer_gradients = torch.autograd.grad(ends, [*handles, *self._inputs], arrived, allow_unused=True)
        self._run.refer_to(dict(zip(self._names, layer_gradients, strict=False)))
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
        self._run.comparer.compare_values(self._stage, "gradient of the received tensor", expected, actual)
        self._input_gradients = []


def _return_itself(tensor: torch.Tensor) -> torch.Tensor:
    return tensor
