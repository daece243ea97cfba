"""Runs layers forward and backward, one at a time, and takes the time of each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map

from ..core.errors import ProfileError
from ..core.graph import LayerGraph
from .stopwatch import Watch

__all__ = ["Passes", "shapes_of"]

Loss = Callable[[Any], torch.Tensor]


class Passes:
    """Runs the layers of a chain on one sample.

    Life: `timed_run` as often as wanted; each gives two laps per layer, and two for the loss. The backward of a
    layer comes right after its forward, by `torch.autograd.grad` with a gradient of ones, so no ``.grad`` is
    written. A layer's input takes a gradient where the output that it is took one: the raw data and what a
    frozen first layer makes of them do not.
    """

    def __init__(
        self,
        layers: Sequence[nn.Module],
        graph: LayerGraph,
        loss: Loss | None,
        watch: Watch,
        device: torch.device,
        autocast: torch.dtype | None,
    ) -> None:
        self._layers = layers
        self._graph = graph
        self._loss = loss
        self._watch = watch
        self._device = device
        self._autocast = autocast
        self._parameters = [[p for p in layer.parameters() if p.requires_grad] for layer in layers]

    def timed_run(self, sample: tuple[Any, ...]) -> None:
        """Takes the laps of one run: forward and backward of each layer, then of the loss.

        Raises:
            ProfileError: a layer or the loss fails; names it, its input shapes and the cause.
        """
        arguments = sample
        for index in range(len(self._layers)):
            arguments = (self.timed_layer(index, arguments),)
        if self._loss is not None:
            self.timed_loss(arguments)

    def timed_layer(self, index: int, arguments: tuple[Any, ...]) -> Any:
        """Takes two laps, the forward and the backward of one layer, and returns its output.

        Raises:
            ProfileError: the layer fails.
        """
        return self._timed_call(f"the {self._named(index)}", self._layers[index], arguments, self._parameters[index])

    def timed_loss(self, arguments: tuple[Any, ...]) -> None:
        """Takes two laps, the forward and the backward of the loss.

        Raises:
            ProfileError: the loss fails.
        """
        self._timed_call("the loss", self._loss_of, arguments, [])

    def run_layer(self, index: int, arguments: tuple[Any, ...]) -> Any:
        """Runs one layer forward, and takes no time.

        Raises:
            ProfileError: the layer fails.
        """
        try:
            with self._autocast_mode():
                return self._layers[index](*arguments)
        except Exception as error:
            raise _failure(f"the {self._named(index)}", arguments, error) from error

    def _timed_call(
        self, what: str, forward: Callable[..., Any], arguments: tuple[Any, ...], parameters: list[nn.Parameter]
    ) -> Any:
        leaves: list[torch.Tensor] = []
        with torch.enable_grad():
            entered = tree_map(lambda leaf: _enter(leaf, leaves), arguments)
            try:
                with self._autocast_mode():
                    self._watch.start()
                    value = forward(*entered)
                    self._watch.stop()
                outputs = [t for t in tree_leaves(value) if isinstance(t, torch.Tensor) and t.requires_grad]
                gradients = [torch.ones_like(output) for output in outputs]
                self._watch.start()
                if outputs and (leaves or parameters):
                    torch.autograd.grad(outputs, [*leaves, *parameters], gradients, allow_unused=True)
                self._watch.stop()
            except Exception as error:
                raise _failure(what, arguments, error) from error
        return tree_map(_leave, value)

    def _loss_of(self, output: Any) -> torch.Tensor:
        assert self._loss is not None
        value = self._loss(output)
        if not isinstance(value, torch.Tensor) or value.numel() != 1:
            found = f"shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__
            raise TypeError(f"it should return a tensor of one number, found {found}")
        return value

    def _autocast_mode(self) -> AbstractContextManager[Any]:
        if self._autocast is None:
            return nullcontext()
        return torch.autocast(self._device.type, dtype=self._autocast)

    def _named(self, index: int) -> str:
        layer = self._graph.layers[index]
        return f"layer {layer.name!r} ({layer.kind})"


def shapes_of(value: Any) -> tuple[tuple[int, ...], ...]:
    """Returns the shapes of all tensors in a value."""
    return tuple(tuple(leaf.shape) for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor))


def _enter(leaf: Any, leaves: list[torch.Tensor]) -> Any:
    if not isinstance(leaf, torch.Tensor):
        return leaf
    start = leaf.detach()
    if leaf.requires_grad:
        leaves.append(start.requires_grad_())
    # A layer may work in place, which autograd allows on a copy and not on the leaf. The copy's own
    # backward hands the gradient on and costs nothing.
    return start.clone()


def _leave(leaf: Any) -> Any:
    # Without its graph, but with the memory of whether it took a gradient.
    return leaf.detach().requires_grad_(leaf.requires_grad) if isinstance(leaf, torch.Tensor) else leaf


def _failure(what: str, arguments: tuple[Any, ...], error: Exception) -> ProfileError:
    shapes = ", ".join(str(list(shape)) for shape in shapes_of(arguments)) or "no tensor"
    return ProfileError(
        f"{what} should run forward and backward on inputs of shape {shapes}, but raised "
        f"{type(error).__name__}: {error}; check the sample's shape, dtype and device"
    )
