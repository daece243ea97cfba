"""The passes of one microbatch through all stages: a forward, and a backward at the weights that its rule says."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils._pytree import tree_map

from pipedream.core.seeds import layer_seed
from pipedream.testing.batches import Total, call_model, clone_batch, inputs_of
from pipedream.testing.rules import Values, copy_values

Rounding = Callable[[Tensor, str], Tensor]


@dataclass
class Passes:
    """Runs a model with weights and buffers that are given for each microbatch.

    Attributes:
        stages: for each the names of its layers, the last one last; weights and buffers outside of them come first.
        total: (output, batch) -> (sum of the losses, their weight).
        inputs: batch -> the model's input, as in a pipeline's options.
        messages: encodings of activations and gradients between stages, which `rounding` rounds.
        has_message: s -> whether what stage s sends travels to another worker.
        number: of the microbatch since the start of training, for the masks.
        repeats_forwards: some method has the rule 'recompute'.
    """

    model: nn.Module
    stages: Sequence[Sequence[str]]
    total: Total
    seed: int = 0
    inputs: Callable[[Any], Any] = inputs_of
    autocast: torch.dtype | None = None
    messages: tuple[str, str] = ("full", "full")
    rounding: Rounding = lambda tensor, encoding: tensor
    has_message: Callable[[int], bool] = lambda s: True
    repeats_forwards: bool = False
    number: int = 0
    _arrived: list[Tensor] = field(default_factory=list)
    _repeats: bool = False

    def differentiate(
        self, batch: Any, number: int, old: Values, new: Values, buffers: Values, rule: str, as_mean: bool
    ) -> tuple[Values, float, float]:
        """Returns the gradients of a microbatch, its loss and its weight; changes the buffers as the forward does.

        Args:
            old, new: weights that its forward and its backward read; without `new` both are the same.
            as_mean: the gradients are those of the mean of the losses, not of their sum.
        """
        self.number, self._repeats, before = number, False, copy_values(buffers)
        self._arrived.clear()
        leaves = self._make_leaves(old)
        with reading(leaves, new) if new and rule == "graph" else nullcontext():
            total, weight = self._forward(leaves, buffers, batch)
            loss = float(total.detach())
            if new and rule == "recompute":
                leaves, self._repeats = self._make_leaves(new), True
                total, _ = self._forward(leaves, before, batch)
            trained = {name: leaf for name, leaf in leaves.items() if leaf.requires_grad}
            value = total / weight if as_mean and weight else total
            slopes = torch.autograd.grad(value, list(trained.values()), allow_unused=True)
        return {name: g for name, g in zip(trained, slopes, strict=True) if g is not None}, loss, weight

    def _forward(self, weights: Values, buffers: Values, batch: Any) -> tuple[Tensor, float]:
        with torch.autocast("cpu", self.autocast) if self.autocast else nullcontext():
            return self.total(self.run(weights | buffers, self.inputs(clone_batch(batch))), batch)

    def run(self, tensors: Values, inputs: Any) -> Any:
        """Returns the model's output with these weights and buffers."""
        return call_model(lambda *args, **named: functional_call(self.model, tensors, args, named), inputs)

    def _make_leaves(self, weights: Values) -> Values:
        parameters = dict(self.model.named_parameters())
        return {n: w.detach().clone().requires_grad_(parameters[n].requires_grad) for n, w in weights.items()}

    @contextmanager
    def hooks(self) -> Iterator[None]:
        """Seeds the generator before each layer, and lets what passes a cut arrive as it is sent."""

        def seed(name: str) -> Callable[..., None]:
            def before(module: nn.Module, arguments: Any) -> None:
                torch.default_generator.manual_seed(layer_seed(self.seed, self.number, name))

            return before

        def send(s: int) -> Callable[..., Any]:
            encodings = self.messages if self.has_message(s) else ("full", "full")
            return lambda module, arguments, output: tree_map(lambda value: self._pass_on(value, *encodings), output)

        modules, has_cuts = dict(self.model.named_modules()), self.repeats_forwards or {*self.messages} != {"full"}
        with ExitStack() as hooks:
            for s, layers in enumerate(self.stages):
                for name in layers:
                    if name in modules:  # what a graph adds between modules draws nothing
                        hooks.callback(modules[name].register_forward_pre_hook(seed(name)).remove)
                if has_cuts and s + 1 < len(self.stages):
                    hooks.callback(modules[layers[-1]].register_forward_hook(send(s)).remove)
            yield

    def _pass_on(self, value: Any, encoding: str, of_gradient: str) -> Any:
        """Returns a value at the next stage; a forward that is repeated reads there what arrived the first time."""
        if not isinstance(value, Tensor):
            return value
        if self._repeats:
            arrived = self._arrived.pop(0)
        else:
            arrived = value.detach().clone()
            arrived = self.rounding(arrived, encoding) if value.requires_grad else arrived
            self._arrived.append(arrived)
        if not value.requires_grad:
            return arrived.clone()
        return _Sent.apply(value, arrived, lambda g: self.rounding(g, of_gradient))  # type: ignore[no-untyped-call]


@contextmanager
def reading(leaves: Values, new: Values) -> Iterator[None]:
    """The rule 'graph': the backward reads other weights in the place of those that the forward saved."""
    places = {leaf.untyped_storage().data_ptr(): name for name, leaf in leaves.items()}

    def pack(tensor: Tensor) -> Any:
        name = places.get(tensor.untyped_storage().data_ptr())
        return tensor if name is None else (name, tensor.shape, tensor.stride(), tensor.storage_offset())

    def unpack(packed: Any) -> Tensor:
        return packed if isinstance(packed, Tensor) else new[packed[0]].as_strided(*packed[1:])

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        yield


class _Sent(torch.autograd.Function):
    """A value on its way: the next stage reads what arrived, and its gradient is rounded on the way back."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, arrived: Tensor, rounding: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.rounding = rounding
        return arrived.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return ctx.rounding(gradients[0]), None, None
