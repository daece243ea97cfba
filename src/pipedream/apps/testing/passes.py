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

from pipedream.apps.testing.batches import Total, call_model, clone_batch, inputs_of
from pipedream.apps.testing.rules import Values, copy_values
from pipedream.core.seeds import layer_seed

Rounding = Callable[[Tensor, str], Tensor]


@dataclass
class Passes:
    """Runs a model with weights and buffers that are given for each microbatch.

    Attributes:
        stages: for each the names of its layers, the last one last; weights and buffers outside of them come first.
        total: (output, batch) -> (sum of the losses, their weight).
        inputs: batch -> the model's input, as in a pipeline's options.
        messages: encodings of activations, gradients and evaluations between stages, which `rounding` rounds.
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
    messages: tuple[str, str, str] = ("full", "full", "full")
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
        repeats, leaves = bool(new) and rule == "recompute", self._make_leaves(old)
        with reading(leaves, new) if new and rule == "graph" else nullcontext():
            slopes, loss, weight = self._pass(leaves, buffers, batch, as_mean, goes_back=not repeats)
        if repeats:
            leaves, self._repeats = self._make_leaves(new), True
            slopes, _, _ = self._pass(leaves, before, batch, as_mean)
        return slopes, loss, weight

    def _pass(
        self, leaves: Values, buffers: Values, batch: Any, as_mean: bool, goes_back: bool = True
    ) -> tuple[Values, float, float]:
        """Returns gradients, loss and weight. The model has the weights until the backward, which may run it again."""

        def run() -> tuple[Values, float, float]:
            with torch.autocast("cpu", self.autocast) if self.autocast else nullcontext():
                inputs = self.inputs(clone_batch(batch))
                total, weight = self.total(call_model(self.model, inputs), batch)
            trained = {name: leaf for name, leaf in leaves.items() if leaf.requires_grad and goes_back}
            value = total / weight if as_mean and weight else total
            slopes = torch.autograd.grad(value, list(trained.values()), allow_unused=True) if trained else ()
            gradients = {name: g for name, g in zip(trained, slopes, strict=True) if g is not None}
            return gradients, float(total.detach()), weight

        done: tuple[Values, float, float] = self._holding(leaves | buffers, run)
        return done

    def run(self, tensors: Values, inputs: Any) -> Any:
        """Returns the model's output with these weights and buffers."""
        return self._holding(tensors, lambda: call_model(self.model, inputs))

    def _holding(self, tensors: Values, function: Callable[[], Any]) -> Any:
        """Returns what a function returns while the model has these weights and buffers."""
        return functional_call(_Holder(self.model), {f"model.{name}": t for name, t in tensors.items()}, (function,))

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
            encodings = self.messages[:2] if self.has_message(s) else ("full", "full")
            return lambda module, arguments, output: tree_map(lambda value: self._pass_on(value, *encodings), output)

        modules, has_cuts = dict(self.model.named_modules()), self.repeats_forwards or {*self.messages[:2]} != {"full"}
        with ExitStack() as hooks:
            for s, layers in enumerate(self.stages):
                for name in layers:
                    if name in modules:  # what a graph adds between modules draws nothing
                        hooks.callback(modules[name].register_forward_pre_hook(seed(name)).remove)
                if has_cuts and s + 1 < len(self.stages):
                    hooks.callback(modules[layers[-1]].register_forward_hook(send(s)).remove)
            yield

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Rounds all numbers that pass a cut as those of an evaluation."""

        def send(module: nn.Module, arguments: Any, output: Any) -> Any:
            return tree_map(lambda v: self.rounding(v, self.messages[2]) if isinstance(v, Tensor) else v, output)

        modules = dict(self.model.named_modules())
        with ExitStack() as hooks:
            for s, layers in enumerate(self.stages[:-1]):
                if self.messages[2] != "full" and self.has_message(s):
                    hooks.callback(modules[layers[-1]].register_forward_hook(send).remove)
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


class _Holder(nn.Module):
    """Calls a function as its forward, for which `functional_call` gives tensors to `model`."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, function: Callable[[], Any]) -> Any:
        return function()


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
