"""Runs a stage on a mesh without data, to predict its collectives.

The layers are copied with tensors that have sizes but no numbers (torch's FakeTensorMode), so that nothing is computed
or sent, and the user's own modules do not change.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeCopyMode, FakeTensorMode

from pipedream.core.model.profile import Collective, StageCollectives
from pipedream.core.schedule.op import Kind, Op
from pipedream.core.schedule.program import Program
from pipedream.extensions.meshes.sharding.stage import StageSharding
from pipedream.runtime.comm.message import Message
from pipedream.runtime.comm.values import flatten, unflatten
from pipedream.runtime.stage.part import StageFacts, StagePart
from pipedream.runtime.stage.stage_module import SavedForward, StageModule
from pipedream.runtime.stage.versions import WeightSet
from pipedream.runtime.stage_parts import find_split


class SampleMessage(StagePart):
    """Keeps the first message of a stage, without its data, from which its collectives are predicted.

    It keeps that of the `former`, of an earlier phase.
    """

    def __init__(self, facts: StageFacts, former: SampleMessage | None = None) -> None:
        self._facts = facts
        self._message: Message | None = None if former is None else former._message

    def receive(self, message: Message) -> None:
        if self._message is None:
            tensors = (
                torch.empty_like(tensor, device="meta") if torch.is_tensor(tensor) else tensor
                for tensor in message.tensors
            )
            self._message = replace(message, tensors=tuple(tensors))

    def compare(
        self,
        division: StageSharding,
        measured: Mapping[str, tuple[Collective, ...]],
        program: Program,
        needs_norms: bool,
    ) -> StageCollectives:
        """Returns the collectives of the first microbatch and update, as measured and predicted.

        Args:
            division: of the stage before it has run.
            program: that the first microbatch was trained with.
            needs_norms: of each update's gradients.
        """
        try:
            predicted = self._predict(division, program, needs_norms)
        except Exception as error:  # of the user's layers, which may need numbers, or cannot be copied
            return StageCollectives(dict(measured), problem=f"{type(error).__name__}: {str(error).splitlines()[0]}")
        return StageCollectives(dict(measured), predicted)

    def _predict(
        self, division: StageSharding, program: Program, needs_norms: bool
    ) -> dict[str, tuple[Collective, ...]]:
        """The backward starts from all outputs of the model, instead of the loss."""
        stage, module = self._facts.stage, self._facts.module
        ops = [op for rank in program.ranks for op in (*rank.warmup, *rank.period) if isinstance(op, Op)]
        splits = any(op.kind is Kind.INPUT_GRADIENT and op.stage == stage for op in ops)
        memo, mode = dict[int, Any](), FakeTensorMode(allow_non_fake_inputs=True)
        with FakeCopyMode(mode):
            layers = [(name, copy.deepcopy(layer, memo)) for name, layer in module.layers]
            handles = {name: copy.deepcopy(handle, memo) for name, handle in module.handles.items()}
        with mode:
            fake_module = module.with_layers(layers, handles, division)
            leaves = self._facts.versions.peek().leaves
            weights = WeightSet(
                0, {name: _allocate_like(leaf, leaf.device).requires_grad_() for name, leaf in leaves.items()}
            )
            forward = partial(self._run_forward, fake_module, weights, stage == program.placement.stages - 1)
            with division.count_collectives("forward"):
                saved = forward()
            with division.count_collectives("backward"):
                saved = forward() if program.plan.stages[stage].recompute else saved
                seeds = [torch.empty_like(output) if output.requires_grad else None for output in saved.outputs]
                if splits:
                    find_split(program).backward_inputs(fake_module, saved, seeds)
                else:
                    gradients, _ = fake_module.backward(saved, seeds, [None] * len(handles))
            if splits:
                with division.count_collectives("weights' backward"):
                    gradients = find_split(program).backward_weights(fake_module, saved, [None] * len(handles))
            pairs = zip(gradients, handles.values(), strict=True)
            sums = [None if g is None else torch.empty_like(g, dtype=handle.dtype) for g, handle in pairs]
            division.sum_gradients(list(handles), sums)
            if division.steps_whole_weights:
                with division.count_collectives("whole weights"):
                    for name, part in (*weights.leaves.items(), *zip(handles, sums, strict=True)):
                        if part is not None:
                            division.gather([name], part)
            if needs_norms:
                division.sum(torch.empty((), dtype=torch.float64, device=fake_module.device))
        return division.collectives

    def _run_forward(self, module: StageModule, weights: WeightSet, is_last: bool) -> SavedForward:
        message, is_first, nodes = self._message, self._facts.stage == 0, tuple[Any, ...]()
        assert message is not None, "what was measured began with a message"
        tensors = tuple(
            _allocate_like(tensor, module.device) if torch.is_tensor(tensor) else tensor for tensor in message.tensors
        )
        if is_first:
            value = module.division.prepare_input(unflatten(message.structure, tensors), message.samples)  # type: ignore[arg-type]
        else:
            value, nodes = module.enter(message.structure, tensors, message.wants)
        output = module.forward(value, weights.leaves, 0, is_first)
        if is_last:
            leaves = flatten(module.division.gather_output(output), opaque_as_none=True)[1]
            outputs = tuple(tensor for tensor in leaves if tensor is not None)
        else:
            outputs = module.pack_output(output, message.samples)[1]
        return SavedForward(weights, nodes, outputs, message.wants, 0, auxiliary_scale=1.0)


def _allocate_like(like: torch.Tensor, device: torch.device) -> torch.Tensor:
    return torch.empty_strided(like.size(), like.stride(), dtype=like.dtype, device=device)
