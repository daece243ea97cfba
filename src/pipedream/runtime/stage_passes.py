"""The passes of a stage on one rank: its layers, the store of their weights, and the gradients that they give."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from pipedream.runtime.comm.message import Message
from pipedream.runtime.stage.part import PassFacts, PassParts, StagePart
from pipedream.runtime.stage.stage_module import SavedForward
from pipedream.runtime.stage.versions import WeightSet
from pipedream.runtime.update.gradients import Gradients
from pipedream.runtime.update.stepped import LossFactor


class StageObserver:
    """Observes a stage until its first update. This base class does nothing.

    Attributes:
        observes: whether it does anything.
    """

    observes = False

    def before_forward(
        self, value: Any, microbatch: int, is_first: bool, message: Message, targets: Message | None
    ) -> None:
        """Takes the input of the layers for the first microbatch; `targets` are those of the last stage."""

    def after_forward(self, index: int) -> None:
        """Called after the forward of a microbatch."""

    def before_backward(self, saved: SavedForward, gradients: Sequence[torch.Tensor | None]) -> None:
        """Takes the gradients of the stage's outputs."""

    def gradient_ready(self, index: int, gradient: torch.Tensor) -> None:
        """Takes a gradient that is about to be summed over the replicas."""

    def after_backward(self, index: int, gradients: Sequence[torch.Tensor | None], factor: float) -> None:
        """Takes the gradients of the weights, which are multiplied by `factor`."""

    def before_send_back(self, index: int, gradients: Sequence[torch.Tensor | None]) -> None:
        """Takes the gradients of the received tensors."""

    def before_update(self, handles: Mapping[str, torch.Tensor]) -> None:
        """Takes the weights, with the gradients of the first update."""


UNOBSERVED = StageObserver()


class StagePasses:
    """What runs the passes of a stage on a rank, at the home of its weights or elsewhere.

    1. A forward acquires its weights (`pass_parts`), and runs the layers with `forward`.
    2. A backward runs in the context of the parts (`pass_parts`); `add_gradients` then adds its gradients to those of
       the next update and releases the weights.
    3. `finish_minibatch` follows the last forward, or backward, of a minibatch, and each forward without a backward.

    Attributes:
        loss_scale: factor on the loss.
        next_forward: microbatch of the next forward.
        gradient_versions: (microbatch, forward version, backward version) of the next update's gradients.
        observer: compares the first minibatch with the model, until the first update.
        parts: what else takes part, in the order of the calls.
        pass_parts: what they do in passes.
        weight_choice: which weights the passes read.
    """

    def __init__(
        self, facts: PassFacts, gradients: Gradients, loss_scale: LossFactor, parts: Iterable[StagePart]
    ) -> None:
        self.module = facts.module
        self.store = facts.store
        self.gradients = gradients
        self.loss_scale = loss_scale
        self.next_forward = 0
        self.gradient_versions: list[tuple[int, int, int]] = []
        self.observer = UNOBSERVED
        self.parts = tuple(parts)
        self.weight_choice = facts.choice
        self.pass_parts = PassParts(self.parts, facts.choice)

    def begin(self) -> None:
        """Begins a stream with training."""
        self.next_forward = 0
        for part in self.parts:
            part.begin()

    def read_for_recomputation(self, saved: SavedForward) -> WeightSet:
        assert saved.weights is not None
        saved.recomputed_weights = self.weight_choice.choose_for_backward(saved.weights)
        return saved.recomputed_weights

    def forward(self, value: Any, weights: WeightSet, microbatch: int, first: bool) -> Any:
        layers = partial(self.module.forward, value, weights.leaves, microbatch, first)
        return self.pass_parts.run_layers(layers, value, weights)

    def choose_ready_hook(self) -> Callable[[int, torch.Tensor], None] | None:
        """Returns what takes the gradients of a backward while it runs; None if a sum needs them only afterwards."""
        return None

    def close_sum(self, stop_request: float) -> None:
        """Follows the backward whose gradients a hook has taken."""

    def add_gradients(self, saved: SavedForward, gradients: list[torch.Tensor | None]) -> None:
        self.observer.after_backward(saved.microbatch, gradients, saved.auxiliary_scale)
        self.gradients.add(gradients, saved.loss_weight)
        if saved.weights is not None:
            read = self.weight_choice.backward_version(saved.weights)
            self.gradient_versions.append((saved.microbatch, saved.version, read))
            self.weight_choice.release(saved.weights)

    def finish_minibatch(self) -> None:
        """Drops copied weights, after the last forward, or backward, of a minibatch."""
        self.store.end_passes(self.gradients)
