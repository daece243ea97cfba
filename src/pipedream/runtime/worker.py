"""The worker: the loop of one rank, which executes a program instruction by instruction.

A worker is a generator: it yields a `Pending` where it would wait, and a `Done` for each minibatch whose gradients are
in its weights. The clock decides how to wait. The worker decides nothing: order, messages and versions are in the
verified program.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any

import torch

from pipedream.core.errors import CaptureError, PipelineError, WorkerError
from pipedream.core.schedule.op import Kind, Op
from pipedream.core.schedule.program import Instruction, Move, Program
from pipedream.core.schedule.timeline import GradientVersions
from pipedream.core.user_code import with_place
from pipedream.runtime.comm.channel import Pending, Receiver, Sender, Waiting
from pipedream.runtime.comm.message import Content, Ending, Message
from pipedream.runtime.data.microbatches import Microbatches
from pipedream.runtime.failure.activity import Activity
from pipedream.runtime.forward import DataStream, ForwardRunner
from pipedream.runtime.mailbox import Mailbox
from pipedream.runtime.results.recorder import Recorder
from pipedream.runtime.results.results import Done, Output, Results
from pipedream.runtime.results.scoring import Scorer
from pipedream.runtime.stage.remote_forward import RemoteForward, WeightPacket
from pipedream.runtime.stage.stage_module import SavedForward
from pipedream.runtime.stage_state import StageState
from pipedream.runtime.update_barrier import UpdateBarrier

__all__ = ["Worker"]

_IN_PLACE_ADVICE = (
    "perhaps the forward of a later microbatch has changed a buffer or an attribute in place that this backward reads: "
    "let the forward make a new tensor (self.steps = self.steps + 1), or use a method or a number of microbatches "
    "with one microbatch in flight"
)

_BACKWARDS = {
    Kind.BACKWARD: "a backward",
    Kind.INPUT_GRADIENT: "an input gradient",
    Kind.WEIGHT_GRADIENT: "a weight gradient",
}


class Worker:
    """One rank.

    Args:
        program: of the first phase, verified.
        evaluation: forwards alone.
        remote_forwards: stage -> forwards on weights of another rank.
        weight_packets: stage -> format of its weights for such ranks.

    Attributes:
        input_updates: updates of the input stage with this program.
        trained: phase -> (begin, end) in minibatches.
    """

    def __init__(
        self,
        rank: int,
        *,
        program: Program,
        evaluation: Program,
        stage_states: dict[int, StageState],
        remote_forwards: dict[int, RemoteForward],
        weight_packets: dict[int, WeightPacket],
        senders: dict[int, Sender],
        receivers: dict[int, Receiver],
        results: Results,
        scorer: Scorer,
        device: torch.device,
        update_barrier: UpdateBarrier,
    ) -> None:
        self.rank = rank
        self.stage_states = stage_states
        self.remote_forwards = remote_forwards
        self._weight_packets = weight_packets
        self._evaluation = evaluation
        self.senders = senders
        self.receivers = receivers
        self.results = results
        self._scorer = scorer
        self.update_barrier = update_barrier
        self._last = program.placement.stages - 1
        self.recorder = Recorder(rank, device)
        self.ending = Ending.DATA
        self._total: int | None = None
        self._mailbox = Mailbox(rank, program.placement, program.channels, senders, receivers)
        self._forwards = ForwardRunner(rank, self._mailbox, scorer, results, device, lambda: self.where)
        self.done_minibatches = 0
        self.input_updates = 0
        self.trained: dict[int, tuple[int, int]] = {}
        self._at: tuple[Program, Instruction] | None = None
        self.activity = Activity()
        self.stop_requested: Callable[[], bool] = lambda: False
        self.switch_to(program, 0)
        self._begin(DataStream(), None)

    def switch_to(self, program: Program, phase: int) -> None:
        self.program = program
        self._update_completed_by = program.update_completed_by(self.rank)
        self.recorder.switch_to(phase)
        self._scorer.switch_to(program)
        self.update_barrier.switch_to(program)
        for stage, stage_state in self.stage_states.items():
            stage_state.switch_to(program, stage, self.input_updates)
        self.input_updates = 0

    # -- the three things a worker does -------------------------------------------------------------

    def train(self, data: Microbatches | None, until: int | None) -> Generator[Pending[Any] | Done, None, None]:
        """Trains until the stream ends, and drains; sets `ending`.

        Args:
            data: None except at the input stage.
            until: total of minibatches at which it drains; None for no limit.

        Raises:
            WorkerError: an op failed; names rank, stage, op and cause.
        """
        stream = DataStream(self.program.microbatches, self.done_minibatches, trains=True)
        self._begin(stream, data, self.program.round_minibatches, until)
        self._mailbox.begin(self.program.microbatches)
        for stage_state in self.stage_states.values():
            stage_state.begin()
        yield from (event for event in self._run(self.program) if not isinstance(event, Op))
        yield from self.update_barrier.finish()
        for stage_state in self.stage_states.values():
            yield from stage_state.end()
        self.input_updates += self.program.updates.updates(0, self._total or 0)
        begin, _ = self.trained.get(self.recorder.phase, (self.done_minibatches, 0))
        self.done_minibatches += (self._total or 0) // self.program.microbatches
        if self._total:
            self.trained[self.recorder.phase] = begin, self.done_minibatches
        self.recorder.note_peak(max(stage_state.versions.peak for stage_state in self.stage_states.values()))

    def evaluate(self, data: Microbatches | None, ema: bool) -> Generator[Pending[Any] | Done, None, None]:
        """Yields at the end one `Done` with the means over all minibatches; the stages are in evaluation mode."""
        self._begin(DataStream(ema=ema), data)
        yield from (event for event in self._run(self._evaluation) if not isinstance(event, Op))
        owners = self.program.placement.ranks[self._last]
        if self._last in self.stage_states:
            self.results.send_sums(0)
        yield (yield from self.results.collect(0, range(len(owners)), self.rate))

    def predict(self, data: Microbatches | None, ema: bool) -> Generator[Pending[Any] | Output, None, None]:
        """Yields the outputs in order, at rank 0 only; the stages are in evaluation mode."""
        self._begin(DataStream(predicts=True, ema=ema), data)
        ahead, given = self.program.plan.in_flight[0], 0
        for event in self._run(self._evaluation):
            if not isinstance(event, Op):
                yield event
            elif self.rank == 0 and self._total is None and event.index - given >= ahead:
                # Outputs are received as they come, so that no worker has to keep many.
                yield (yield from self._output(given))
                given += 1
        while self.rank == 0 and given < (self._total or 0):
            yield (yield from self._output(given))
            given += 1

    @property
    def where(self) -> str:
        return "the start" if self._at is None else self._at[0].describe(self._at[1])

    @property
    def rate(self) -> float:
        """The learning rate, before the stages' factors."""
        return self.stage_states[min(self.stage_states)].optimizer.rate

    def _output(self, index: int) -> Waiting[Output]:
        return self.results.receive_output(index, self.program.placement.rank_of(self._last, index))

    # -- the loop -----------------------------------------------------------------------------------

    def _run(self, program: Program) -> Generator[Any, None, None]:
        """Yields what it would wait for, each `Done`, and each op."""
        for instruction in program.instructions(self.rank, lambda: self._total):
            self._at = (program, instruction)
            try:
                if isinstance(instruction, Op):
                    if instruction.kind is Kind.FETCH:
                        self.remote_forwards[instruction.stage].fetch(self._mailbox.take("weights", instruction))
                        continue
                    if instruction.kind is Kind.FORWARD:
                        self._forward_op(instruction)
                    elif instruction.kind is Kind.UPDATE:
                        yield from self._update_op(instruction)
                    else:
                        with self.activity.running(_BACKWARDS[instruction.kind]):
                            self._backward_op(instruction)
                    yield instruction
                elif instruction.kind is Move.RECEIVE:
                    yield from self._receive(program, instruction.channel, instruction.index)
                elif instruction.kind is Move.SEND:
                    self._send(program, instruction.channel, instruction.index)
                elif instruction.kind is Move.SYNC:
                    # Nothing to do: the all-reduce that the proof places here was started inside the update's last
                    # backward (`_ready_hook`), and the update waits for it (`UpdateBarrier.prepare`). The earlier
                    # start is safe: the replicas of a stage have a group of their own, and all start their buckets
                    # in the same order.
                    pass
            except CaptureError as error:
                raise WorkerError(self.rank, self.where, str(error)) from error
            except PipelineError:
                raise
            except Exception as error:
                advice = _IN_PLACE_ADVICE if "modified by an inplace operation" in str(error) else ""
                raise WorkerError(self.rank, self.where, with_place(error), advice) from error
        # The end arrives once on each channel that serves forwards; receive those still unread.
        while unread := self._mailbox.unread(program.channels):
            yield from self._receive(program, unread[0], self._total or 0)

    # -- forward ------------------------------------------------------------------------------------

    def _forward_op(self, op: Op) -> None:
        message = self._admit(op) if op.stage == 0 else self._mailbox.take("activation", op)
        if message is None:
            return
        start = self.recorder.mark()
        self.activity.begin("a forward" if self._stream.trains else "a forward without training")
        remote_forward = self.remote_forwards.get(op.stage)
        stage_state = remote_forward or self.stage_states[op.stage]
        if not self._stream.trains:
            is_empty = message.content is Content.EMPTY
            result = message if is_empty else self._forwards.without_backward(op, stage_state, message)
        elif remote_forward is None:
            result = self._own_forward(op, self.stage_states[op.stage], message)
        else:
            result = self._remote_forward(op, remote_forward, message)
        if op.stage < self._last:
            self._mailbox.put("activation", op.stage + 1, result)
        else:
            self._mailbox.drop("input", op)
        self.activity.end()
        stage_state.next_forward = op.index + self.program.placement.replicas[op.stage]
        self.recorder.note("F", op.stage, self._stream.number(op.index), start)
        ends = self._stream.minibatch(stage_state.next_forward) > self._stream.minibatch(op.index)
        if op.stage == self._last and self._stream.trains and ends:
            self.results.send_sums(self._stream.minibatch(op.index))

    def _own_forward(self, op: Op, stage_state: StageState, message: Message) -> Message:
        """Runs a forward of a stage of this rank, and keeps what its backward needs."""
        if message.content is Content.EMPTY:
            self._saved_forwards[op.stage, op.index] = SavedForward(None, (), (), (), op.index)
            if op.stage == self._last:
                self.results.add(self._stream.minibatch(op.index), message, self.results.zeros)
            return message
        saved, run = self._forwards.for_training(op, stage_state, message)
        with stage_state.forward_context():
            if stage_state.recomputation is None:
                result = run(message)
            else:
                result = stage_state.recomputation.forward(saved, message, run)
        self._saved_forwards[op.stage, op.index] = saved
        return result

    def _remote_forward(self, op: Op, remote_forward: RemoteForward, message: Message) -> Message:
        """Runs a forward on fetched weights; its input goes to the stage's own rank, where the backward repeats it."""
        result = message
        if message.content is not Content.EMPTY:
            saved, run = self._forwards.for_training(op, remote_forward, message)
            with remote_forward.forward_context():
                result = remote_forward.recomputation.forward(saved, message, run)
        self._mailbox.put("stage_input", op.stage, message)
        if (op.index + 1) % self._stream.split == 0:
            remote_forward.drop()
        return result

    def _admit(self, op: Op) -> Message | None:
        """Takes the next microbatch from the data; ends the stream after the last one."""
        if self._stream.trains and self.program.placement.replicas[0] == 1 and self.stop_requested():
            self._stop_feed(Ending.INTERRUPT)
        assert self._data is not None
        with self.activity.running("loading data"):
            found = self._data.take(op.index)
        if isinstance(found, Ending):
            self._end(self._data.ended_at * self._stream.split, found)
            return None
        inputs, targets = found
        self._mailbox.put("input", self._last, targets)
        return inputs

    # -- backward and update ------------------------------------------------------------------------

    def _backward_op(self, op: Op) -> None:
        stage_state = self.stage_states[op.stage]
        if self.program.placement.is_remote(op.stage):
            self._saved_forwards[op.stage, op.index] = self._forwards.recompute(
                op, stage_state, self._mailbox.take("stage_input", op)
            )
        start = self.recorder.mark()
        if op.kind is Kind.BACKWARD:
            self._whole_backward(op, stage_state)
        elif op.kind is Kind.INPUT_GRADIENT:
            self._input_gradients(op, stage_state)
        else:
            self._weight_gradients(op, stage_state)
        self.recorder.note(op.kind.value, op.stage, self._stream.number(op.index), start)

    def _whole_backward(self, op: Op, stage_state: StageState) -> None:
        """B: gradients of the weights and of the received tensors."""
        saved = self._saved_forwards.pop((op.stage, op.index))
        message = self._mailbox.take("gradient", op) if op.stage < self._last else None
        ready = self._ready_hook(op, stage_state)
        weight_gradients: list[torch.Tensor | None] = []
        input_gradients: list[torch.Tensor | None] = []
        if saved.weights is not None:
            with stage_state.backward_context(saved):
                output_gradients = saved.output_gradients(message, stage_state.optimizer.scale)
                weight_gradients, input_gradients = stage_state.module.backward(
                    saved, output_gradients, stage_state.gradients.accumulators, ready
                )
        self._add_gradients(stage_state, saved, weight_gradients, is_last=ready is not None)
        self._send_back(op, saved, input_gradients)

    def _input_gradients(self, op: Op, stage_state: StageState) -> None:
        """I: the half of a backward that the previous stage waits for."""
        saved = self._saved_forwards[op.stage, op.index]
        message = self._mailbox.take("gradient", op) if op.stage < self._last else None
        input_gradients: list[torch.Tensor | None] = []
        if saved.weights is not None:
            with stage_state.backward_context(saved):
                output_gradients = saved.output_gradients(message, stage_state.optimizer.scale)
                input_gradients = stage_state.module.backward_inputs(saved, output_gradients)
        self._send_back(op, saved, input_gradients)

    def _weight_gradients(self, op: Op, stage_state: StageState) -> None:
        """W: the other half of a backward."""
        saved = self._saved_forwards.pop((op.stage, op.index))
        ready = self._ready_hook(op, stage_state)
        weight_gradients: list[torch.Tensor | None] = []
        if saved.weights is not None:
            with stage_state.backward_context(saved):
                weight_gradients = stage_state.module.backward_weights(saved, stage_state.gradients.accumulators, ready)
        self._add_gradients(stage_state, saved, weight_gradients, is_last=ready is not None)

    def _ready_hook(self, op: Op, stage_state: StageState) -> Callable[[int, torch.Tensor], None] | None:
        """Returns what starts the all-reduce inside the last backward before a replicated stage's update, else None."""
        if stage_state.optimizer.all_reduce is None or self._update_completed_by(op) is None:
            return None
        return stage_state.gradient_ready

    def _add_gradients(
        self, stage_state: StageState, saved: SavedForward, gradients: list[torch.Tensor | None], *, is_last: bool
    ) -> None:
        stage_state.add_gradients(saved, gradients)
        if is_last:
            stage_state.optimizer.close(stage_state.gradients, float(self.stop_requested()))

    def _send_back(self, op: Op, saved: SavedForward, input_gradients: list[torch.Tensor | None]) -> None:
        if op.stage:
            content = Content.EMPTY if saved.weights is None else Content.DATA
            gradients = Message(op.index, content, tensors=tuple(input_gradients), loss_weight=saved.loss_weight)
            self._mailbox.put("gradient", op.stage - 1, gradients)

    def _update_op(self, op: Op) -> Generator[Any, None, None]:
        stage_state = self.stage_states[op.stage]
        before = self.recorder.mark()
        is_replicated = self.program.placement.replicas[op.stage] > 1
        stop_request = is_replicated and self.stop_requested()
        present_share, stop_requests = yield from self.update_barrier.prepare(op.stage, float(stop_request))
        is_tied = any(op.stage in one.stages for one in self.program.plan.tied)
        if is_replicated or is_tied or (self.program.couples_updates and not self.program.norm_delay):
            self.recorder.note("wait", op.stage, op.index, before)
        start = self.recorder.mark()
        with self.activity.running("an update"):
            gradient_versions = stage_state.update(self.program, op, present_share, self._total)
        for microbatch, forward_version, backward_version, newest in gradient_versions:
            number = self._stream.number(microbatch)
            self.recorder.note_gradient_versions(
                GradientVersions(op.stage, number, forward_version, backward_version, newest)
            )
        before_drain = self._stream.base * self.program.microbatches // self.program.updates.per_update[op.stage]
        self.recorder.note("U", op.stage, before_drain + op.index, start)
        if stop_requests:
            self._stop_feed(Ending.INTERRUPT)
        if op.stage == min(self.stage_states):
            m = self.program.microbatches
            members = self.program.updates.members(op.stage, op.index, self._total)
            if self.program.updates.mean_of_rounds and self._total is None:
                # A round may be the last, and incomplete, before this worker has received the end.
                members = members[: round(present_share * self.program.placement.replicas[op.stage])]
            for minibatch in range(members.start // m, -(-members.stop // m)):
                yield (yield from self.results.collect(minibatch, self.results.replicas_of(minibatch, m), self.rate))

    # -- messages -----------------------------------------------------------------------------------

    def _receive(self, program: Program, number: int, index: int) -> Waiting[None]:
        start = self.recorder.mark()
        ended = yield from self._mailbox.receive(number, index)
        self.recorder.note("wait", program.channels[number].target, self._stream.number(index), start)
        if ended is not None and self._total is None:
            self._end(*ended)

    def _send(self, program: Program, number: int, index: int) -> None:
        start = self.recorder.mark()
        channel = program.channels[number]
        if channel.carries == "weights":
            stage = channel.source
            weights = self._forwards.pack_weights(stage, index, self.stage_states[stage], self._weight_packets[stage])
            self._mailbox.put("weights", stage, weights)
        self._mailbox.send(number, index)
        self.recorder.note("send", channel.source, self._stream.number(index), start)

    def _end(self, total: int, ending: Ending) -> None:
        self._total = total
        self.ending = ending
        self._mailbox.end(total, ending)

    # -- small things -------------------------------------------------------------------------------

    def _begin(self, stream: DataStream, data: Microbatches | None, cycle: int = 1, until: int | None = None) -> None:
        self._data = data
        if data is not None:
            replica = dict(self.program.placement.stage_replicas(self.rank)).get(0, 0)
            data.begin(stream.split, replica, stream.base, cycle, until)
        self._stream = stream
        self._total = None
        self._mailbox.begin()
        self._forwards.begin(self.program, stream)
        for remote_forward in self.remote_forwards.values():
            remote_forward.drop()
        self._saved_forwards: dict[tuple[int, int], SavedForward] = {}
        self.results.begin()

    def _stop_feed(self, ending: Ending) -> None:
        if self._data is not None:
            self._data.stop(ending)
