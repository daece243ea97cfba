"""Compares the layers that were found with the model that they were found in."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_map

from pipedream.capture.captured import Captured
from pipedream.capture.untouched import untouched
from pipedream.core.errors import CaptureError

__all__ = ["check_equal_to_model"]


def check_equal_to_model(model: nn.Module, captured: Captured, sample: tuple[Any, ...], devices: list[int]) -> None:
    """Runs model and layers on the sample, in training and in evaluation mode, from the same seed.

    Gradients are not compared: where every tensor is passed on as the same object, in the same modes, the
    graph of autograd is the same one.

    Raises:
        CaptureError: outputs or buffers are not equal to the bit; says in which mode.
    """

    def run_layers(*inputs: Any) -> Any:
        value = captured.layers[0](*inputs)
        for layer in captured.layers[1:]:
            value = layer(value)
        return value

    kind = type(model).__name__
    for training in (True, False):
        mode = "training" if training else "evaluation"
        wanted, wanted_buffers = _run(model, model, sample, training, devices)
        try:
            found, found_buffers = _run(model, run_layers, sample, training, devices)
        except Exception as error:
            raise CaptureError(
                f"the layers of {kind}, run one after the other, should give what the model gives, but in {mode} mode "
                f"they raised {type(error).__name__}: {error}; the forward does something beside calling its "
                "modules: put it into a module"
            ) from error
        if not _equal(wanted, found):
            raise CaptureError(
                f"the layers of {kind}, run one after the other, should give what the model gives, but in {mode} mode "
                "their output differs; the forward changes tensors or modules in a way that cannot be seen from "
                "outside (writes through .data, sets attributes, draws random numbers): put it into a module"
            )
        for (name, a), (_, b) in zip(wanted_buffers, found_buffers, strict=True):
            if not _equal(a, b):
                raise CaptureError(
                    f"the layers of {kind}, run one after the other, should leave the buffers that the model leaves, "
                    f"but in {mode} mode {name!r} differs; the forward writes it outside the module that "
                    "holds it: write it there"
                )


def _run(
    model: nn.Module, forward: Callable[..., Any], sample: tuple[Any, ...], training: bool, devices: list[int]
) -> tuple[Any, list[tuple[str, torch.Tensor]]]:
    with untouched([model], devices), torch.no_grad():
        for module in model.modules():
            module.training = training
        inputs = tree_map(lambda leaf: leaf.detach().clone() if isinstance(leaf, torch.Tensor) else leaf, sample)
        return forward(*inputs), list(model.named_buffers())


def _equal(wanted: Any, found: Any) -> bool:
    a, spec_a = tree_flatten(wanted)
    b, spec_b = tree_flatten(found)
    return spec_a == spec_b and all(_equal_leaf(x, y) for x, y in zip(a, b, strict=True))


def _equal_leaf(a: Any, b: Any) -> bool:
    if not isinstance(a, torch.Tensor):
        return isinstance(b, type(a)) and bool(a == b)
    if not isinstance(b, torch.Tensor) or a.shape != b.shape or a.dtype != b.dtype:
        return False
    return torch.equal(a, b) or bool(torch.isclose(a, b, rtol=0.0, atol=0.0, equal_nan=True).all())
