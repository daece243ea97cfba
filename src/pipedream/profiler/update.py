"""Seconds and bytes of an optimizer, measured on copies of the parameters."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from ..core.errors import ProfileError
from ..core.graph import LayerGraph
from .allocations import Allocations
from .sizes import storage_bytes
from .stopwatch import Stopwatch

__all__ = ["NamedParameters", "OptimizerFactory", "UpdateCost", "measure_update", "named_parameters"]

NamedParameters = list[tuple[str, nn.Parameter]]
OptimizerFactory = Callable[[NamedParameters], torch.optim.Optimizer]


@dataclass(frozen=True)
class UpdateCost:
    """One optimizer step over all parameters.

    Attributes:
        name: class of the optimizer.
        update_s: median of the measured steps.
        state_bytes: of the tensors in its state after them.
        working_bytes: that a step needs at most beside them, weights and gradients.
    """

    name: str = ""
    update_s: float = 0.0
    state_bytes: int = 0
    working_bytes: int = 0


def measure_update(
    optimizer: OptimizerFactory, parameters: NamedParameters, watch: Stopwatch, *, warmup: int, runs: int
) -> UpdateCost:
    """Times an optimizer on copies of the parameters that take gradients; these must not be empty.

    Raises:
        ProfileError: the optimizer cannot be made or does not step.
    """
    copies = [(name, nn.Parameter(tensor.detach().clone())) for name, tensor in parameters]
    try:
        stepper = optimizer(copies)
        for run in range(warmup + runs):
            for _, copy in copies:
                # Small, so that weights stay finite; set anew, as some optimizers write into it.
                copy.grad = torch.full_like(copy, 1e-4)
            if run == warmup:
                watch.laps_s()
            watch.start()
            stepper.step()
            watch.stop()
        laps_s = watch.laps_s()
        working = 0
        if Allocations.is_free():
            with Allocations(copies[0][1].device) as allocations:
                stepper.step()
            working = allocations.sections[0].rise_bytes
    except Exception as error:
        raise ProfileError(
            f"one optimizer step over {len(copies)} parameters should be timed, but it raised {type(error).__name__}: "
            f"{error}; give a factory that takes a list of (name, parameter) and returns a torch optimizer"
        ) from error
    state = [leaf for leaf in tree_leaves(dict(stepper.state)) if isinstance(leaf, torch.Tensor)]
    return UpdateCost(type(stepper).__name__, median(laps_s), storage_bytes(state), working)


def named_parameters(layers: Sequence[nn.Module], graph: LayerGraph) -> NamedParameters:
    """Returns the parameters that take gradients under the user's own names, each once."""
    found: dict[int, tuple[str, nn.Parameter]] = {}
    for layer, module in zip(graph.layers, layers, strict=True):
        path = layer.name.partition("@")[0]
        for local, parameter in module.named_parameters():
            if parameter.requires_grad:
                # A model of one layer stands under its class name, which is no path.
                name = f"{path}.{local}" if f"{path}.{local}" in layer.parameters else local
                found.setdefault(id(parameter), (name, parameter))
    return list(found.values())
