"""Splits a model into layers: from a module and a sample to a LayerGraph and the user's own modules in run order.

Only chains can be captured so far (`pipedream.capture.chain`).
"""

from __future__ import annotations

from typing import Any

from torch import nn

from pipedream.capture.chain import Captured, capture_chain, find_layers
from pipedream.capture.preserve_state import preserve_state
from pipedream.capture.stand_ins import stand_ins

__all__ = ["Captured", "capture", "find_layers", "preserve_state", "stand_ins"]


def capture(model: nn.Module, sample: tuple[Any, ...]) -> Captured:
    """Finds the layers of a model by running its forward on a sample.

    The model is left unchanged: parameters, buffers, training flags, plain attributes and the random generators. If its
    parameters are on the meta device, the sample is moved there too. Then, and within `stand_ins`, the chain is found as
    usual, but its values cannot be compared with the model's.

    Args:
        model: the user's module; its submodules become the layers, without being copied.
        sample: the positional inputs of one forward: tensors, or tuples, lists and dicts of them.

    Raises:
        CaptureError: the model cannot be cut, does not run on the sample, or its layers, run one after the other, do
            not return what the model returns.
    """
    return capture_chain(model, sample)
