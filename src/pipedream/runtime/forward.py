"""The forwards of one rank, from the received message to the next one or the loss."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from pipedream.core.plan.boundary import read_crossings, with_crossings
from pipedream.core.plan.placement import Carries
from pipedream.core.schedule.program import Program
from pipedream.runtime.comm.message import Content, Message
from pipedream.runtime.comm.values import flatten, to_device, unflatten
from pipedream.runtime.mailbox import Mailbox
from pipedream.runtime.results.results import Results
from pipedream.runtime.results.scoring import Scorer, Targets
from pipedream.runtime.stage.recompute import ForwardFunction
from pipedream.runtime.stage.remote_forward import RemoteForward, WeightPacket
from pipedream.runtime.stage.stage_module import SavedForward
from pipedream.runtime.stage_state import StageState


@dataclass(frozen=True)
class DataStream:
    """The minibatches between two drains.

    Attributes:
        split: microbatches of a minibatch.
        base: minibatches before this stream.
        trains: backwards follow.
        predicts: outputs are returned, not scored.
        ema: forwards without backwards read averaged weights.
    """

    split: int = 1
    base: int = 0
    trains: bool = False
    predicts: bool = False
    ema: bool = False

    def minibatch(self, index: int) -> int:
        """The minibatch of a microbatch, both counted in this stream."""
        return index // self.split

    def number(self, index: int) -> int:
        return self.base * self.split + index


class ForwardRunner:
    """Runs the forwards of a rank. Life: `begin` a stream; then one call for each microbatch at a stage."""

    def __init__(
        self,
        mailbox: Mailbox,
        scorer: Scorer,
        results: Results,
        device: torch.device,
    ) -> None:
        self._mailbox = mailbox
        self._scorer = scorer
        self._results = results
        self._device = device

    def begin(self, program: Program, stream: DataStream) -> None:
        self._program = program
        self._stream = stream
        self._last = program.placement.stages - 1

    def for_training(
        self, stage: int, index: int, stage_state: StageState | RemoteForward, message: Message
    ) -> tuple[SavedForward, ForwardFunction]:
        """Returns what is kept for the backward, and the forward that fills it in."""
        # The version read is recorded, to be compared with the requested one.
        weights, version = stage_state.read(self._program.weights.forward_version(stage, index))
        saved = SavedForward(weights, (), (), message.gradients, index, version)
        targets = self._mailbox.take(Carries.INPUT, stage, index) if stage == self._last else None

        def run(message: Message, again: bool = False) -> Message:
            if stage == 0:
                value = stage_state.module.first_input(self._unpack_value(message), message.samples)
            else:
                value, saved.graph_inputs = stage_state.module.enter(
                    message.structure, message.tensors, message.gradients
                )
                crossings, _ = read_crossings(message.structure)
                gradient_crossings = [
                    crossing.reversed() for crossing, wants in zip(crossings, message.gradients, strict=False) if wants
                ]
                saved.gradient_crossings = with_crossings("", gradient_crossings)
            if index == 0 and not again and isinstance(stage_state, StageState):
                stage_state.check.before_forward(value, self._stream.number(index), stage == 0, message, targets)
            read = stage_state.read_again(saved) if again else weights
            with nullcontext() if targets is None else self._scorer.watching(value, message.samples, trains=True):
                output = stage_state.forward(value, read, self._stream.number(index), stage == 0)
            if targets is None:
                structure, saved.outputs = stage_state.module.sent(output, message.samples)
                wants = tuple(tensor.requires_grad for tensor in saved.outputs)
                return message.with_tensors(structure, saved.outputs, wants, version)
            output = stage_state.module.whole(output)
            key = self._stream.minibatch(index)
            with stage_state.module.casting():
                value, saved.loss_weight, saved.scale = self._scorer.score(
                    key, message, output, self._unpack_targets(targets), again
                )
            saved.outputs = (value,)
            return message

        return saved, run

    def recompute(self, stage: int, index: int, stage_state: StageState, message: Message) -> SavedForward:
        """Returns what a forward on another rank has kept: its input."""
        stage_state.next_forward = index + 1
        if message.content is Content.EMPTY:
            return SavedForward(None, (), (), (), index)
        saved, run = self.for_training(stage, index, stage_state, message)
        saved.recompute = lambda: run(message, True)
        return saved

    def without_backward(
        self, stage: int, index: int, stage_state: StageState | RemoteForward, message: Message
    ) -> Message:
        context: AbstractContextManager[None] = nullcontext()
        if isinstance(stage_state, RemoteForward):
            leaves, context = stage_state.leaves, stage_state.evaluating()
        else:
            leaves = self._choose_leaves(stage_state)
        scores = stage == self._last and not self._stream.predicts
        with torch.no_grad(), context:
            module = stage_state.module
            if stage == 0:
                value = module.first_input(self._unpack_value(message), message.samples)
            else:
                value = to_device(module.value_of(message.structure, message.tensors), self._device)  # type: ignore[arg-type]
            with self._scorer.watching(value, message.samples, trains=False) if scores else nullcontext():
                output = module.forward(value, leaves, self._stream.number(index), stage == 0)
            if stage < self._last:
                return message.with_tensors(*module.sent(output, message.samples))
            output = module.whole(output)
            if self._stream.predicts:
                self._results.send_output(index, message.with_tensors(*flatten(output, opaque_as_none=True)))
            else:
                with stage_state.module.casting():
                    targets = self._unpack_targets(self._mailbox.take(Carries.INPUT, stage, index))
                    self._scorer.score_evaluation(message, output, targets)
        return message

    def pack_weights(self, stage: int, index: int, stage_state: StageState, weight_packet: WeightPacket) -> Message:
        """Weights for another rank's forwards from microbatch `index` on."""
        version = self._program.weights.forward_version(stage, index) if self._stream.trains else 0
        leaves = stage_state.versions.peek(version).leaves if self._stream.trains else self._choose_leaves(stage_state)
        return Message(index, tensors=(weight_packet.pack(leaves),), version=version)

    def _choose_leaves(self, stage_state: StageState) -> dict[str, torch.Tensor]:
        return stage_state.optimizer.ema if self._stream.ema else stage_state.versions.peek().leaves

    def _unpack_targets(self, message: Message) -> Targets:
        received = unflatten(message.structure, message.tensors)  # type: ignore[arg-type]
        return Targets(received, to_device(received, self._device))

    def _unpack_value(self, message: Message) -> Any:
        return to_device(unflatten(message.structure, message.tensors), self._device)  # type: ignore[arg-type]
