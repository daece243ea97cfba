"""Splits a model into layers: from a module and a sample to a LayerGraph and the user's own modules in run order."""

from __future__ import annotations

from typing import Any

from torch import nn

from pipedream.capture.chain import Captured, capture_chain, find_layers
from pipedream.capture.preserve_state import preserve_state
from pipedream.capture.stand_ins import stand_ins

__all__ = ["Captured", "capture", "find_layers", "preserve_state", "stand_ins"]


def capture(model: nn.Module, sample: tuple[Any, ...]) -> Captured:
    """Finds the layers of a model, which must be a chain, by running it on a sample. The model is left unchanged.

    With parameters on the meta device, or within `stand_ins`, the values are not compared with the model's.

    Args:
        model: its submodules become the layers, without being copied.
        sample: the positional inputs of one forward: tensors, or tuples, lists and dicts of them.

    Raises:
        CaptureError: the model cannot be cut, does not run on the sample, or its layers do not return what it returns.
    """
    return capture_chain(model, sample)
