"""Splits a model into layers: turns a module and a sample into a LayerGraph and the user's own modules in run order."""

import sys
from collections.abc import Mapping
from types import ModuleType
from typing import Any

from torch import nn

from pipedream.capture.captured import (
    Captured as Captured,
    build_captured as build_captured,
    find_layers as find_layers,
)
from pipedream.capture.chain import find_chain
from pipedream.capture.compare import split
from pipedream.capture.errors import (
    check_model,
    check_module as check_module,
    describe_surplus as describe_surplus,
)
from pipedream.capture.preserve_state import list_cuda_devices as list_cuda_devices, preserve_state as preserve_state
from pipedream.capture.stand_ins import has_stand_ins, stand_ins as stand_ins
from pipedream.core.user_code import call_model as call_model
from pipedream.tensors.collectives import refusing_collectives


def capture(model: nn.Module, sample: Any, *, finest: bool = False) -> Captured:
    """Splits a model into layers by running it on a sample, and lists what crosses each cut; prints as a table.

    A chain of modules is split into these modules. Any other model is split at the calls of its innermost modules; it
    then runs by its own forward (`ModelSlice`). With parameters on the meta device, or within `stand_ins`, results are
    not compared with the model's. The model is left unchanged.

    This is ``pipedream.capture(model, batch)``.

    Args:
        model: its submodules become the layers, without being copied.
        sample: a tuple of positional arguments, a mapping of keyword arguments, or the only argument.
        finest: also split the modules of a chain, by treating it like any other model.

    Raises:
        CaptureError: the model does not run on the sample, or its layers do not give what it gives.
    """
    check_model(model)
    if not isinstance(sample, (tuple, Mapping)):
        sample = (sample,)
    if any(parameter.is_meta for parameter in model.parameters()):
        with stand_ins(model, sample) as empty:
            return capture(model, empty, finest=finest)
    with refusing_collectives("the forward"):
        if type(sample) is tuple and not finest:
            chain = find_chain(model, sample)
            if chain is not None and (len(chain.layers) > 1 or not list(chain.layers[0].children())):
                return chain
        compares = not has_stand_ins(model, sample)
        graph, refused = split(model, sample, list_cuda_devices(model, sample), compares=compares)
    return build_captured(model, graph, refused)


class _Callable(ModuleType):
    """Makes this package callable, because it shares its name with the function."""

    def __call__(self, model: nn.Module, batch: Any, *, finest: bool = False) -> Captured:
        return capture(model, batch, finest=finest)


sys.modules[__name__].__class__ = _Callable
