"""Runs a stage of a mesh without data, to predict its collectives.

The layers are copied with tensors that have sizes but no numbers (torch's FakeTensorMode), so that nothing is computed
or sent, and the user's own modules do not change.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeCopyMode, FakeTensorMode

from pipedream.core.model.collective import Collective
from pipedream.runtime.comm.message import Message
from pipedream.runtime.comm.values import flatten, unflatten
from pipedream.runtime.stage.stage_module import SavedForward, StageModule
from pipedream.runtime.stage.versions import WeightSet


def without_data(message: Message) -> Message:
    """Returns a message with tensors on the meta device."""
    tensors = (torch.empty_like(one, device="meta") if torch.is_tensor(one) else one for one in message.tensors)
    return replace(message, tensors=tuple(tensors))


def predicted_collectives(
    module: StageModule,
    leaves: Mapping[str, torch.Tensor],
    message: Message,
    *,
    is_first: bool,
    is_last: bool,
    splits: bool = False,
    recomputes: bool = False,
    needs_norms: bool = False,
) -> Mapping[str, tuple[Collective, ...]]:
    """Returns those of a stage's forward and backward of a microbatch, and of an update.

    The backward starts from all outputs of the model, instead of the loss.

    Args:
        leaves: a version of the weights.
        message: that the stage gets, from `without_data`.
        is_first, is_last: where the stage is in the model.
        splits: the backward has two halves.

    Raises:
        Exception: any that the layers raise, which may need numbers, or cannot be copied.
    """
    assert module.sharding is not None
    sharding, memo, mode = module.sharding.anew(), dict[int, Any](), FakeTensorMode(allow_non_fake_inputs=True)
    with FakeCopyMode(mode):
        layers = [(name, copy.deepcopy(layer, memo)) for name, layer in module.layers]
        handles = {name: copy.deepcopy(handle, memo) for name, handle in module.handles.items()}
    with mode:
        own = module.with_layers(layers, handles, sharding)
        weights = WeightSet(0, {name: _empty(leaf, leaf.device).requires_grad_() for name, leaf in leaves.items()})

        def forward() -> SavedForward:
            tensors = tuple(_empty(one, own.device) if torch.is_tensor(one) else one for one in message.tensors)
            nodes: tuple[Any, ...] = ()
            if is_first:
                value = own.first_input(unflatten(message.structure, tensors), message.samples)  # type: ignore[arg-type]
            else:
                value, nodes = own.enter(message.structure, tensors, message.gradients)
            output = own.forward(value, weights.leaves, 0, is_first)
            if is_last:
                outputs = tuple(one for one in flatten(own.whole(output), opaque_as_none=True)[1] if one is not None)
            else:
                outputs = own.sent(output, message.samples)[1]
            return SavedForward(weights, nodes, outputs, message.gradients, 0, auxiliary_scale=1.0)

        with sharding.counting("forward"):
            saved = forward()
        with sharding.counting("backward"):
            saved = forward() if recomputes else saved
            arriving = [torch.empty_like(one) if one.requires_grad else None for one in saved.outputs]
            if splits:
                own.backward_inputs(saved, arriving)
            else:
                found, _ = own.backward(saved, arriving, [None] * len(handles))
        if splits:
            with sharding.counting("weights' backward"):
                found = own.backward_weights(saved, [None] * len(handles))
        kinds = zip(found, handles.values(), strict=True)
        sums = [None if one is None else torch.empty_like(one, dtype=as_.dtype) for one, as_ in kinds]
        sharding.sum_gradients(list(handles), sums)
        if sharding.steps_whole_weights:
            sharding.wholes([*handles, *handles], [*weights.leaves.values(), *sums])
        if needs_norms:
            sharding.sum(torch.empty((), dtype=torch.float64, device=own.device))
    return sharding.collectives


def _empty(like: torch.Tensor, device: torch.device) -> torch.Tensor:
    return torch.empty_strided(like.size(), like.stride(), dtype=like.dtype, device=device)
