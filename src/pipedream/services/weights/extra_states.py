"""The extra state of modules (``get_extra_state``)."""

import warnings
from collections.abc import Mapping
from typing import Any

from torch import nn

from pipedream.core.errors import PipelineError
from pipedream.runtime.data.rng import from_json, to_json
from pipedream.runtime.session.local_workers import LocalWorkers

_KEY = "_extra_state"


def collect_extra_states(workers_here: LocalWorkers) -> dict[int, dict[str, Any]]:
    """Returns the extra states of the modules of each stage whose replica 0 is here, in JSON, by their names."""
    return {stage: _collect_of_stage(workers_here, stage) for stage, replica, _ in workers_here.replicas if not replica}


def _collect_of_stage(workers_here: LocalWorkers, stage: int) -> dict[str, Any]:
    """Returns module -> extra state of a stage's modules; warns of one that JSON cannot hold.

    A module that no stage's names contain counts as stage 0's.
    """
    layers = [each.names for each in workers_here.program.plan.stages]
    states = {}
    for key, module in find_modules_by_key(workers_here.model).items():
        name = key.removesuffix(_KEY).removesuffix(".")
        owners = [
            number
            for number, (layer_names, tensor_names) in enumerate(zip(layers, workers_here.names.by_stage, strict=True))
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
    """Sets the extra states of modules, from JSON."""
    modules = find_modules_by_key(model)
    for key, state in key_extra_states(states).items():
        if key in modules:
            modules[key].set_extra_state(state)


def find_modules_by_key(model: nn.Module) -> dict[str, nn.Module]:
    """Returns the modules that have an extra state, by its key in a state dict."""
    return {
        f"{name}.{_KEY}".lstrip("."): module
        for name, module in model.named_modules()
        if type(module).get_extra_state is not nn.Module.get_extra_state
    }


def key_extra_states(states: Mapping[str, Any]) -> dict[str, Any]:
    """Returns extra states, from JSON, by their keys in a state dict."""
    return {f"{name}.{_KEY}".lstrip("."): from_json(state) for name, state in states.items()}
