"""Seconds and bytes of an optimizer step, on copies of the parameters."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils._pytree import tree_leaves

from pipedream.core.cold import busy_wait_cold_cache
from pipedream.core.errors import PipelineError, ProfileError
from pipedream.core.model.graph import LayerGraph
from pipedream.profiler.sizes import Allocations, count_storage_bytes
from pipedream.profiler.stopwatch import Watch

NamedParameters = list[tuple[str, nn.Parameter]]
SchedulerFactory = Callable[[torch.optim.Optimizer], Any]
OptimizerFactory = Callable[[NamedParameters], torch.optim.Optimizer]


@dataclass(frozen=True)
class UpdateCost:
    """Fields of a `Profile` about one optimizer step over all parameters, with the learning-rate schedule's."""

    optimizer: str = ""
    update_s: float = 0.0
    update_fixed_s: float = 0.0
    copy_s: float = 0.0
    optimizer_bytes: int = 0
    update_temporary_bytes: int = 0


def measure_update(
    optimizer: OptimizerFactory,
    parameters: NamedParameters,
    watch: Watch,
    run_passes: Callable[[], None],
    *,
    scheduler: SchedulerFactory | None = None,
    warmup: int,
    runs: int,
) -> UpdateCost:
    """Times an optimizer on copies of the parameters that require gradients (at least one). Raises ProfileError.

    The caches are cold, as they are after the passes of a stage: the host then takes up to twice as long.

    Args:
        run_passes: runs the layers; called before each of warmup + runs steps, as weights have left the caches then.
    """
    copies = [(name, nn.Parameter(tensor.detach().clone())) for name, tensor in parameters]
    with naming_failure(len(copies)):
        stepper = optimizer(copies)
        rates = None if scheduler is None else scheduler(stepper)
        if isinstance(rates, ReduceLROnPlateau):  # steps at evaluations
            rates = None
        beginning = None if rates is None else deepcopy(rates.state_dict())

        def step_s(some: Sequence[nn.Parameter], begin: Callable[[], None]) -> float:
            for _ in range(warmup + runs):
                begin()
                step_once(stepper, some, watch, rates)
                if rates is not None:  # some have an end
                    rates.load_state_dict(deepcopy(beginning))
            return median(watch.laps_s()[warmup:])

        update_s, working = step_s([copy for _, copy in copies], run_passes), 0
        if Allocations.is_free():
            with Allocations(copies[0][1].device) as allocations:
                stepper.step()
            working = allocations.sections[0].rise_bytes
        stepper.zero_grad()
        smallest = min((copy for _, copy in copies), key=lambda copy: copy.nbytes)
        # A step over a share s of all bytes takes f + k s: `part_s`, and `update_s` for 1; f is fixed.
        part_s = step_s([smallest], busy_wait_cold_cache)
        share = smallest.nbytes / sum(copy.nbytes for _, copy in copies)
        fixed_s = min(max((part_s - share * update_s) / (1 - share), 0.0), update_s) if share < 1 else 0.0
    sources = [copy.detach() for _, copy in copies]
    targets = [torch.empty_like(source) for source in sources]
    for _ in range(warmup + runs):
        watch.start()
        torch._foreach_copy_(targets, sources)
        watch.stop()
    copy_s = median(watch.laps_s()[warmup:])
    return UpdateCost(
        type(stepper).__name__, update_s, fixed_s, copy_s, count_state_bytes(dict(stepper.state)), working
    )


def step_once(
    stepper: torch.optim.Optimizer, parameters: Sequence[nn.Parameter], watch: Watch, rates: Any = None
) -> None:
    """Makes a step with small gradients, and one of the learning-rate schedule, as a lap."""
    for parameter in parameters:
        # Small, so that weights stay finite; renewed, because some optimizers write into it.
        parameter.grad = torch.full_like(parameter, 1e-4)
    watch.start()
    stepper.step()
    if rates is not None:
        rates.step()
    watch.stop()


def count_state_bytes(state: Any) -> int:
    """Returns the bytes of the tensors in an optimizer's state."""
    return count_storage_bytes(leaf for leaf in tree_leaves(state) if isinstance(leaf, torch.Tensor))


@contextmanager
def naming_failure(count: int) -> Iterator[None]:
    """Context of a step over so many parameters, which raises a ProfileError if it fails."""
    try:
        yield
    except PipelineError:  # of the passes before a step
        raise
    except Exception as error:
        raise ProfileError(
            f"one optimizer step over {count} parameters should be timed, but it raised {type(error).__name__}: "
            f"{error}; give a factory that takes a list of (name, parameter) and returns a torch optimizer"
        ) from error


def named_parameters(layers: Sequence[nn.Module], graph: LayerGraph) -> NamedParameters:
    """Returns the parameters that require gradients, under the user's own names, each once."""
    named: dict[int, tuple[str, nn.Parameter]] = {}
    for name, parameter in all_parameters(layers, graph).items():
        if parameter.requires_grad:
            named.setdefault(id(parameter), (name, parameter))
    return list(named.values())


def all_parameters(layers: Sequence[nn.Module], graph: LayerGraph) -> dict[str, nn.Parameter]:
    """Returns all parameters under all of the user's names that the graph lists."""
    named: dict[str, nn.Parameter] = {}
    for layer, module in zip(graph.layers, layers, strict=True):
        path = layer.name.partition("@")[0]
        for local, parameter in module.named_parameters(remove_duplicate=False):
            # A model of one layer is named after its class, which is not a path.
            name = f"{path}.{local}" if f"{path}.{local}" in layer.parameters else local
            named.setdefault(name, parameter)
    return named
