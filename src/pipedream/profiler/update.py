"""Seconds and bytes of an optimizer step, on copies of the parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from pipedream.core.errors import ProfileError
from pipedream.core.model.graph import LayerGraph
from pipedream.profiler.allocations import Allocations
from pipedream.profiler.sizes import storage_bytes
from pipedream.profiler.stopwatch import Watch

__all__ = [
    "NamedParameters",
    "OptimizerFactory",
    "UpdateCost",
    "all_parameters",
    "estimate_update",
    "measure_update",
    "named_parameters",
]

NamedParameters = list[tuple[str, nn.Parameter]]
OptimizerFactory = Callable[[NamedParameters], torch.optim.Optimizer]


@dataclass(frozen=True)
class UpdateCost:
    """One optimizer step over all parameters; median seconds.

    Attributes:
        copy_s: of copying all parameters.
        working_bytes: in addition to state, weights and gradients.
    """

    name: str = ""
    update_s: float = 0.0
    copy_s: float = 0.0
    state_bytes: int = 0
    working_bytes: int = 0


def measure_update(
    optimizer: OptimizerFactory, parameters: NamedParameters, watch: Watch, *, warmup: int, runs: int
) -> UpdateCost:
    """Times an optimizer on copies of the parameters that require gradients (at least one). Raises ProfileError."""
    copies = [(name, nn.Parameter(tensor.detach().clone())) for name, tensor in parameters]
    with _named_failure(len(copies)):
        stepper = optimizer(copies)
        for run in range(warmup + runs):
            if run == warmup:
                watch.laps_s()
            _step(stepper, [copy for _, copy in copies], watch)
        laps_s, working = watch.laps_s(), 0
        if Allocations.is_free():
            with Allocations(copies[0][1].device) as allocations:
                stepper.step()
            working = allocations.sections[0].rise_bytes
    sources = [copy.detach() for _, copy in copies]
    targets = [torch.empty_like(source) for source in sources]
    for _ in range(warmup + runs):
        watch.start()
        torch._foreach_copy_(targets, sources)
        watch.stop()
    copy_s = median(watch.laps_s()[warmup:])
    return UpdateCost(type(stepper).__name__, median(laps_s), copy_s, _state_bytes(dict(stepper.state)), working)


def estimate_update(optimizer: OptimizerFactory, parameters: NamedParameters, watch: Watch) -> UpdateCost:
    """Adds up the costs of the parameters, each stepped alone; of equal shapes and dtypes only one is run.

    The factory gets all parameters, because an optimizer skips those without a gradient. Raises ProfileError.
    """
    copies = [(name, nn.Parameter(tensor.detach().clone())) for name, tensor in parameters]
    alike: dict[Any, list[nn.Parameter]] = {}
    for _, copy in copies:
        alike.setdefault((copy.shape, copy.stride(), copy.dtype), []).append(copy)
    update_s, copy_s, state_bytes = 0.0, 0.0, 0
    with _named_failure(len(copies)):
        stepper = optimizer(copies)
        for same in alike.values():
            _step(stepper, same[:1], watch)  # creates its state
            _step(stepper, same[:1], watch)
            same[0].grad = None
            update_s += len(same) * watch.laps_s()[-1]
            source = same[0].detach()
            watch.start()
            torch.empty_like(source).copy_(source)
            watch.stop()
            copy_s += len(same) * watch.laps_s()[-1]
            state_bytes += len(same) * _state_bytes(stepper.state[same[0]])
    return UpdateCost(type(stepper).__name__, update_s, copy_s, state_bytes)


def _step(stepper: torch.optim.Optimizer, parameters: Sequence[nn.Parameter], watch: Watch) -> None:
    for parameter in parameters:
        # Small, so that weights stay finite; renewed, because some optimizers write into it.
        parameter.grad = torch.full_like(parameter, 1e-4)
    watch.start()
    stepper.step()
    watch.stop()


def _state_bytes(state: Any) -> int:
    return storage_bytes(leaf for leaf in tree_leaves(state) if isinstance(leaf, torch.Tensor))


@contextmanager
def _named_failure(count: int) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        raise ProfileError(
            f"one optimizer step over {count} parameters should be timed, but it raised {type(error).__name__}: "
            f"{error}; give a factory that takes a list of (name, parameter) and returns a torch optimizer"
        ) from error


def named_parameters(layers: Sequence[nn.Module], graph: LayerGraph) -> NamedParameters:
    """Returns the parameters that require gradients, under the user's own names, each once."""
    found: dict[int, tuple[str, nn.Parameter]] = {}
    for name, parameter in all_parameters(layers, graph).items():
        if parameter.requires_grad:
            found.setdefault(id(parameter), (name, parameter))
    return list(found.values())


def all_parameters(layers: Sequence[nn.Module], graph: LayerGraph) -> dict[str, nn.Parameter]:
    """Returns all parameters under all of the user's names that the graph lists."""
    found: dict[str, nn.Parameter] = {}
    for layer, module in zip(graph.layers, layers, strict=True):
        path = layer.name.partition("@")[0]
        for local, parameter in module.named_parameters(remove_duplicate=False):
            # A model of one layer is named after its class, which is not a path.
            name = f"{path}.{local}" if f"{path}.{local}" in layer.parameters else local
            found.setdefault(name, parameter)
    return found
