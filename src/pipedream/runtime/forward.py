"""The forwards of one rank, from the received message to the next one or the loss."""

from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from pipedream.core.plan.placement import Carries
from pipedream.core.schedule.program import Program
from pipedream.runtime.comm.channel import Waiting
from pipedream.runtime.comm.message import Content, Message
from pipedream.runtime.comm.values import flatten, tensors_in, to_device
from pipedream.runtime.rank_context import RankContext
from pipedream.runtime.results import Output
from pipedream.runtime.scorer import Scorer, Targets
from pipedream.runtime.stage.part import ForwardFunction
from pipedream.runtime.stage.stage_module import SavedForward, StageModule
from pipedream.runtime.stage_passes import StagePasses


@dataclass(frozen=True)
class DataStream:
    """The minibatches between two drains.

    Attributes:
        split: microbatches of a minibatch.
        offset: microbatches before this stream, since the start of training.
        trains: backwards follow.
        predicts: outputs are returned, not scored.
        ema: forwards without backwards read averaged weights.
    """

    split: int = 1
    offset: int = 0
    trains: bool = False
    predicts: bool = False
    ema: bool = False

    def minibatch(self, index: int) -> int:
        """Returns the minibatch of a microbatch, both counted in this stream."""
        return index // self.split


class ForwardRunner:
    """Runs the forwards of a rank. Lifecycle: `begin` a stream; then `run` for each microbatch at a stage.

    Args:
        stage_passes: stage -> its passes here.
        admit: takes a microbatch from the data; returns None at its end.

    Attributes:
        saved_forwards: (stage, microbatch) -> what its backward needs.
        received_outputs: how many outputs of a prediction were received.
    """

    def __init__(
        self,
        context: RankContext,
        stage_passes: Mapping[int, StagePasses],
        scorer: Scorer,
        admit: Callable[[int], Message | None],
    ) -> None:
        self._rank, self._device = context.rank, context.device
        self._mailbox, self._results = context.mailbox, context.results
        self._recorder, self._activity = context.recorder, context.activity
        self.stage_passes = stage_passes
        self._scorer = scorer
        self._admit = admit
        self.saved_forwards: dict[tuple[int, int], SavedForward] = {}
        self.received_outputs = 0

    def begin(self, program: Program, stream: DataStream) -> None:
        self._program = program
        self._stream = stream
        self._scorer.begin(trains=stream.trains)
        self._last_stage = program.placement.stages - 1
        self._replicas = program.placement.replicas
        self.saved_forwards.clear()
        self.received_outputs = 0

    def run(self, stage: int, index: int) -> Waiting[Any] | None:
        """Runs an F; returns a generator of what it waits for, or None if it has run."""
        message = self._mailbox.take(Carries.ACTIVATION, stage, index) if stage else self._admit(index)
        if message is None:
            return None
        return self._run_forward(stage, index, message)

    def _run_forward(self, stage: int, index: int, message: Message) -> Waiting[Any] | None:
        stream = self._stream
        start = self._recorder.mark()
        self._activity.begin("a forward" if stream.trains else "a forward without training")
        passes = self.stage_passes[stage]
        if not stream.trains:
            is_empty = message.content is Content.EMPTY
            result = message if is_empty else self._run_without_backward(stage, index, passes, message)
            passes.finish_minibatch()
        else:
            result = self._run_before_backward(stage, index, passes, message)
        if stage < self._last_stage:
            self._mailbox.put(Carries.ACTIVATION, stage + 1, result)
        else:
            self._mailbox.drop(Carries.INPUT, stage, index)
        self._activity.end()
        passes.next_forward = self._program.placement.next_forward(stage, index)
        self._recorder.note("F", stage, stream.offset + index, start)
        if stage == self._last_stage and stream.trains:
            minibatch = stream.minibatch(index)
            # This minibatch's results are complete if the next forward of this replica belongs to a later one.
            if stream.minibatch(passes.next_forward) > minibatch:
                self._results.complete(minibatch, self._scorer.close(minibatch), index)
        if stream.predicts and self._rank == 0 and index - self.received_outputs >= self._program.plan.in_flight[0]:
            # Receive outputs as they come, so that no worker has to keep many.
            return self._yield_output()
        return None

    def receive_output(self) -> Waiting[Output]:
        """Receives the next output of a prediction."""
        index = self.received_outputs
        self.received_outputs += 1
        owner = self._program.placement.rank_of(self._last_stage, index, forward=True)
        return self._results.receive_output(index, owner)

    def recompute(self, stage: int, index: int, passes: StagePasses, message: Message) -> SavedForward:
        """Returns the saved forward of a stage that ran on another rank; the backward repeats it from `message`."""
        passes.next_forward = index + 1
        if message.content is Content.EMPTY:
            return SavedForward(None, (), (), (), index)
        saved, run = self._prepare(stage, index, passes, message)
        saved.recompute = lambda: run(message, True)
        return saved

    def _yield_output(self) -> Generator[Any, None, None]:
        yield (yield from self.receive_output())

    def _run_before_backward(self, stage: int, index: int, passes: StagePasses, message: Message) -> Message:
        """Runs a forward, and saves what its backward needs; sends its input to a backward on another rank."""
        runs_backward_elsewhere = self._program.placement.runs_backward_elsewhere(stage)
        result, saved = message, SavedForward(None, (), (), (), index)
        if message.content is not Content.EMPTY:
            passes.pass_parts.receive(message)
            saved, run = self._prepare(stage, index, passes, message)
            with passes.pass_parts.forward(saved), passes.module.division.count_collectives("forward"):
                result = passes.pass_parts.run_forward(saved, message, run)
                passes.observer.after_forward(index)
        elif stage == self._last_stage and not runs_backward_elsewhere:
            self._scorer.skip(self._stream.minibatch(index), message)
        if runs_backward_elsewhere:
            self._mailbox.put(Carries.STAGE_INPUT, stage, message)
        else:
            self.saved_forwards[stage, index] = saved
        if (runs_backward_elsewhere or stage < self._last_stage) and (index + 1) % self._stream.split == 0:
            passes.finish_minibatch()
        return result

    def _prepare(
        self, stage: int, index: int, passes: StagePasses, message: Message
    ) -> tuple[SavedForward, ForwardFunction]:
        """Returns the saved forward, and the function that runs the forward and fills it in."""
        weights, version = passes.pass_parts.acquire(self._program.weights.forward_version(stage, index))
        saved = SavedForward(weights, (), (), message.wants, index, version)
        targets = self._mailbox.take(Carries.INPUT, stage, index) if stage == self._last_stage else None

        def run(message: Message, recomputes: bool = False) -> Message:
            if stage == 0:
                value = passes.module.division.prepare_input(self._unpack_value(message), message.samples)
            else:
                value, saved.graph_inputs = passes.module.enter(message.structure, message.tensors, message.wants)
                saved.gradient_structure = passes.module.division.gradient_structure(message)
            if index == 0 and not recomputes:
                # Before the stage's own forward, which may write into its input and its buffers.
                passes.observer.before_forward(value, self._stream.offset + index, stage == 0, message, targets)
            read_weights = passes.read_for_recomputation(saved) if recomputes else weights
            resident = partial(_list_resident, passes.module, read_weights.leaves, value if stage == 0 else None)
            with passes.pass_parts.packing(index, resident):
                with nullcontext() if targets is None else self._scorer.watching(value, message.samples):
                    output = passes.forward(value, read_weights, self._stream.offset + index, stage == 0)
                if targets is None:
                    structure, saved.outputs = passes.module.pack_output(output, message.samples)
                    wants = tuple(tensor.requires_grad for tensor in saved.outputs)
                    return message.with_tensors(structure, saved.outputs, wants, version)
                output = passes.module.division.gather_output(output)
                minibatch = self._stream.minibatch(index)
                with passes.module.autocasting():
                    value, saved.loss_weight, saved.scale = self._scorer.score(
                        minibatch, message, output, self._unpack_targets(targets), recomputes
                    )
                saved.outputs = (value,)
                return message

        return saved, run

    def _run_without_backward(self, stage: int, index: int, passes: StagePasses, message: Message) -> Message:
        leaves, context = passes.store.reading(self._stream.ema)
        is_scored = stage == self._last_stage and not self._stream.predicts
        with torch.no_grad(), context:
            module = passes.module
            if stage == 0:
                value = module.division.prepare_input(self._unpack_value(message), message.samples)
            else:
                value = to_device(module.unpack_value(message.structure, message.tensors), self._device)  # type: ignore[arg-type]
            with self._scorer.watching(value, message.samples) if is_scored else nullcontext():
                output = module.forward(value, leaves, self._stream.offset + index, stage == 0)
            if stage < self._last_stage:
                return message.with_tensors(*module.pack_output(output, message.samples))
            output = module.division.gather_output(output)
            if self._stream.predicts:
                self._results.send_output(index, message.with_tensors(*flatten(output, opaque_as_none=True)))
            else:
                with passes.module.autocasting():
                    targets = self._unpack_targets(self._mailbox.take(Carries.INPUT, stage, index))
                    self._scorer.score(0, message, output, targets)
        return message

    def _unpack_targets(self, message: Message) -> Targets:
        targets = message.value()
        return Targets(targets, to_device(targets, self._device))

    def _unpack_value(self, message: Message) -> Any:
        return to_device(message.value(), self._device)


def _list_resident(module: StageModule, leaves: Mapping[str, torch.Tensor], value: Any) -> Iterator[torch.Tensor]:
    """Yields the tensors of a forward that stay in memory anyway: weights, buffers, and `value`, the model's input."""
    yield from leaves.values()
    for _, layer in module.layers:
        yield from layer.parameters()
        yield from layer.buffers()
    yield from tensors_in(value)
