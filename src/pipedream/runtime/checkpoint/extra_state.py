"""What modules add to a state dict by ``get_extra_state``."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from pipedream.core.errors import PipelineError
from pipedream.runtime.data.tensor_json import from_json, to_json

_KEY = "_extra_state"


def extra_states_of(
    model: nn.Module, stage: int, layers: Sequence[Sequence[str]], names: Sequence[Sequence[str]]
) -> dict[str, Any]:
    """Returns module -> extra state, in JSON, of a stage's modules; warns of one that JSON cannot hold.

    A module that no stage's names show to be its own counts as stage 0's.

    Args:
        layers: names of the layers of each stage.
        names: of the parameters and buffers of each stage.
    """
    states = {}
    for key, module in modules_by_key(model).items():
        name = key.removesuffix(_KEY).removesuffix(".")
        owners = [
            number
            for number, (layer_names, tensor_names) in enumerate(zip(layers, names, strict=True))
            if any(f"{name}.".startswith(f"{layer}.") for layer in layer_names)
            or any(n.startswith(f"{name}.") for n in tensor_names)
        ]
        if stage != (owners[0] if owners else 0):
            continue
        try:
            states[name] = to_json(module.get_extra_state(), f"the extra state of {name!r}")
        except PipelineError as error:
            warnings.warn(f"{error}; it is not saved", stacklevel=2)
    return states


def set_extra_states(model: nn.Module, states: Mapping[str, Any]) -> None:
    """Gives modules their extra states, from JSON."""
    modules = modules_by_key(model)
    for key, state in keys_of(states).items():
        if key in modules:
            modules[key].set_extra_state(state)


def modules_by_key(model: nn.Module) -> dict[str, nn.Module]:
    """Returns the modules that have an extra state, by its key in a state dict."""
    return {
        f"{name}.{_KEY}".lstrip("."): module
        for name, module in model.named_modules()
        if type(module).get_extra_state is not nn.Module.get_extra_state
    }


def keys_of(states: Mapping[str, Any]) -> dict[str, Any]:
    """Returns extra states, from JSON, by their keys in a state dict."""
    return {f"{name}.{_KEY}".lstrip("."): from_json(state) for name, state in states.items()}
