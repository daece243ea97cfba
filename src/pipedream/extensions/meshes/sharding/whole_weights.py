"""Optimizers that do not step each element by itself, such as Muon and Adafactor, step whole weights on every rank.

Each rank gathers the weights, gradients and states of its stage for the step, and keeps its parts afterwards: the
numbers are those of one process for any optimizer, but the step takes memory and time as without a mesh.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from pipedream.core.errors import PlanError

if TYPE_CHECKING:
    from pipedream.extensions.meshes.sharding.stage import StageSharding


@contextmanager
def whole_weights(
    optimizer: torch.optim.Optimizer, handles: Mapping[str, nn.Parameter], sharding: StageSharding
) -> Iterator[None]:
    """Context in which an optimizer of handles, which hold parts, has whole weights, gradients and states."""
    names = {handle: name for name, handle in handles.items()}
    handle_of: dict[torch.Tensor, nn.Parameter] = {}

    def gather() -> None:
        stepped = [handle for group in optimizer.param_groups for handle in group["params"]]
        saved = [dict(optimizer.state.pop(handle, {})) for handle in stepped]
        states = [(at, key) for at, state in enumerate(saved) for key, value in state.items() if torch.is_tensor(value)]
        tensors = (
            [handle.detach() for handle in stepped],
            [handle.grad for handle in stepped],
            [saved[a][k] for a, k in states],
        )
        owners = [names[handle] for handle in stepped]
        gathered = sharding.gather_all(
            [*owners, *owners, *(owners[at] for at, _ in states)], [tensor for row in tensors for tensor in row]
        )
        for (at, key), whole in zip(states, gathered[2 * len(stepped) :], strict=True):
            saved[at][key] = whole
        for handle, whole, gradient, state in zip(stepped, gathered, gathered[len(stepped) :], saved, strict=False):
            assert whole is not None
            weight = nn.Parameter(whole, requires_grad=handle.requires_grad)
            weight.grad = gradient
            handle_of[weight] = handle
            if state:
                optimizer.state[weight] = state
        wholes = iter(list(handle_of))
        for group in optimizer.param_groups:
            group["params"] = [next(wholes) for _ in group["params"]]

    def keep_parts() -> None:
        for weight, handle in handle_of.items():
            owner = [names[handle]]
            handle.data.copy_(sharding.take_part(owner, weight.detach()))
            if state := optimizer.state.pop(weight, {}):
                optimizer.state[handle] = {key: cut(owner, key, value, weight, handle) for key, value in state.items()}
        for group in optimizer.param_groups:
            group["params"] = [handle_of[weight] for weight in group["params"]]
        handle_of.clear()

    def cut(owner: list[str], key: str, value: Any, weight: torch.Tensor, handle: nn.Parameter) -> Any:
        if not torch.is_tensor(value) or value.dim() == 0:
            return value
        if value.shape == handle.shape != weight.shape:
            raise PlanError(
                f"the optimizer {type(optimizer).__name__} was asked for on a mesh, but its state {key!r} for "
                f"{owner[0]!r} of {tuple(weight.shape)} looks like one of a rank's parts, {tuple(value.shape)}; use "
                "another layout, or an optimizer that steps each element by itself"
            )
        return sharding.take_part(owner, value)

    gather()
    yield
    keep_parts()
