"""The worker: the loop of one rank, which executes a program instruction by instruction.

A worker is a generator: it yields a `Pending` where it would wait, and a `Done` for each minibatch whose gradients are
in its weights. The worker decides nothing: order, messages and versions are in the
verified program. Each instruction is resolved to a method and its numbers before the run (`_Step`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator
from functools import partial
from typing import Any, NamedTuple

import torch

from pipedream.core.errors import CaptureError, PipelineError, WorkerError
from pipedream.core.plan.placement import Carries
from pipedream.core.schedule.op import Kind, Op
from pipedream.core.schedule.program import Instruction, Move, Program, advance_instruction
from pipedream.core.user_code import with_place
from pipedream.runtime.comm.channel import Pending, Receiver, Sender, Waiting
from pipedream.runtime.comm.message import Content, Message, StopReason
from pipedream.runtime.data.microbatches import Microbatches
from pipedream.runtime.failure.activity import Activity
from pipedream.runtime.forward import DataStream, ForwardRunner
from pipedream.runtime.mailbox import Mailbox
from pipedream.runtime.results.recorder import Moment, Recorder
from pipedream.runtime.results.results import NOT_FINITE_ADVICE, Done, Output, Results
from pipedream.runtime.results.scoring import Scorer
from pipedream.runtime.stage.remote_forward import RemoteForward, WeightPacket
from pipedream.runtime.stage.stage_module import SavedForward
from pipedream.runtime.stage_state import StageState
from pipedream.runtime.update_barrier import UpdateBarrier

_ADVICE = {
    "modified by an inplace operation": (
        "perhaps the forward of a later microbatch has changed a buffer or an attribute in place that this backward "
        "reads: let the forward make a new tensor (self.steps = self.steps + 1), or use a method or a number of "
        "microbatches with one microbatch in flight"
    ),
    "device meta": (
        "perhaps the forward reads a weight or buffer of another stage, through a reference, a list or a dict: read it "
        "in the forward of the module that holds it, and pass tensors on"
    ),
    "CUDA out of memory": (
        "if much memory is reserved but not allocated, set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True; otherwise "
        "use recomputation (--recompute), smaller microbatches or more workers"
    ),
}
"""What torch says -> what to do."""


class _Step(NamedTuple):
    """An instruction of a program's text, resolved.

    Attributes:
        run: called with `at` and the index; returns what it waits for, None if it is done.
        at: stage or channel.
        index: of the first period.
        advance: what each period adds to the index.
    """

    run: Callable[[int, int], Waiting[Any] | None]
    at: int
    index: int  # type: ignore[assignment]  # a field, not the method of tuples
    advance: int
    instruction: Instruction


class Worker:
    """One worker, or one of its ranks.

    Args:
        process: this rank among all ranks of the job, for errors.
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
        process: int,
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
        self._process = process
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
        for sharding in (stage_state.module.sharding for stage_state in stage_states.values()):
            if sharding is not None:
                sharding.look = self.recorder.memory.look
        self.stop_reason = StopReason.DATA
        self._total: int | None = None
        self._mailbox = Mailbox(rank, program.placement, program.channels, senders, receivers)
        self._forwards = ForwardRunner(self._mailbox, scorer, results, device)
        results.where = lambda: self.where
        self.done_minibatches = 0
        self.input_updates = 0
        self.trained: dict[int, tuple[int, int]] = {}
        self._text: Program | None = None
        self._yielded = 0
        self._turn = 0
        self._actions: dict[Kind | Move, Callable[[int, int], Waiting[Any] | None]] = {
            Kind.FORWARD: self._forward,
            Kind.BACKWARD: partial(self._time_backward, Kind.BACKWARD.value, "a backward", self._run_backward),
            Kind.INPUT_GRADIENT: partial(
                self._time_backward, Kind.INPUT_GRADIENT.value, "an input gradient", self._compute_input_gradients
            ),
            Kind.WEIGHT_GRADIENT: partial(
                self._time_backward, Kind.WEIGHT_GRADIENT.value, "a weight gradient", self._compute_weight_gradients
            ),
            Kind.UPDATE: self._update,
            Kind.FETCH: self._fetch,
            Move.RECEIVE: self._receive,
            Move.SEND: self._send,
            Move.SYNC: self._sync,
        }
        self._steps: dict[bool, tuple[list[_Step], list[_Step]]] = {False: self._resolve_steps(evaluation)}
        self.activity = Activity()
        self.stop_requested: Callable[[], bool] = lambda: False
        self.switch_to(program, 0)
        self._begin(DataStream(), None)

    def switch_to(self, program: Program, phase: int) -> None:
        self.program = program
        self._steps[True] = self._resolve_steps(program)
        self._update_completed_by = program.update_completed_by(self.rank)
        self._replicas = program.placement.replicas
        self._waits_for_others = {
            stage
            for stage, replicas in enumerate(self._replicas)
            if replicas > 1
            or any(stage in weights.stages for weights in program.plan.tied_weights)
            or (program.couples_updates and not program.norm_delay)
        }
        self._is_remote = [program.placement.is_remote(stage) for stage in range(len(self._replicas))]
        self.recorder.switch_to(phase)
        self._scorer.switch_to(program)
        self.update_barrier.switch_to(program)
        for stage, stage_state in self.stage_states.items():
            stage_state.switch_to(program, stage, self.input_updates)
        self.input_updates = 0

    # -- the three things a worker does -------------------------------------------------------------

    def train(self, data: Microbatches | None, until: int | None) -> Generator[Pending[Any] | Done, None, None]:
        """Trains until the stream ends, and drains; sets `stop_reason`.

        Args:
            data: None except at the input stage.
            until: total of minibatches at which it drains; None for no limit.

        Raises:
            WorkerError: an op failed, or the last updates left weights that are not finite; names rank, stage, op and
                cause.
        """
        not_finite = self._list_not_finite()
        stream = DataStream(self.program.microbatches, self.done_minibatches, trains=True)
        self._begin(stream, data, self.program.round_minibatches, until)
        self._mailbox.begin(self.program.microbatches)
        for stage_state in self.stage_states.values():
            stage_state.begin()
        yield from self._run(self.program)
        self.results.finish()
        yield from self.update_barrier.finish()
        for stage_state in self.stage_states.values():
            yield from stage_state.end()
        yield from self._collect(0)
        self.input_updates += self.program.updates.updates(0, self._total or 0)
        begin, _ = self.trained.get(self.recorder.phase, (self.done_minibatches, 0))
        self.done_minibatches += (self._total or 0) // self.program.microbatches
        if self._total:
            self.trained[self.recorder.phase] = begin, self.done_minibatches
        if newly_not_finite := {
            name: stage for name, stage in self._list_not_finite().items() if name not in not_finite
        }:
            self._refuse(*next(iter(newly_not_finite.items())))
        self.recorder.note_peak(max(stage_state.versions.peak for stage_state in self.stage_states.values()))

    def _list_not_finite(self) -> dict[str, int]:
        """Returns each trained weight that is not finite, with its stage; none where the run continues regardless."""
        if not self.results.raises_on_nan:
            return {}
        return {
            name: stage
            for stage, stage_state in self.stage_states.items()
            for name, handle in stage_state.versions.handles.items()
            if not _is_finite(handle.detach())
        }

    def _refuse(self, name: str, stage: int) -> None:
        """Raises the error of a weight that no loss has shown: no later forward has read it."""
        last, program = self.done_minibatches - 1, self.program
        minibatches = f"minibatch {last}"
        if any(program.weights.mean_staleness(s) for s in range(len(self._replicas))):
            unread = -(-max(program.plan.in_flight) // program.microbatches) + 1  # the weights after so many, at most
            minibatches = f"one of the minibatches {max(0, last + 1 - unread)} to {last}"
        raise WorkerError(
            self._process,
            f"stage {stage}, the updates after minibatch {last}",
            f"the weight {name!r} is not finite, because a gradient of {minibatches} was not",
            NOT_FINITE_ADVICE,
        )

    def evaluate(self, data: Microbatches | None, ema: bool) -> Generator[Pending[Any] | Done, None, None]:
        """Yields at the end one `Done` with the means over all minibatches; the stages are in evaluation mode."""
        self._begin(DataStream(ema=ema), data)
        yield from self._run(self._evaluation)
        if self._last in self.stage_states:
            self.results.complete(0)
        yield (yield from self.results.collect(0, self.rate))

    def predict(self, data: Microbatches | None, ema: bool) -> Generator[Pending[Any] | Output, None, None]:
        """Yields the outputs in order, at rank 0 only; the stages are in evaluation mode."""
        self._begin(DataStream(predicts=True, ema=ema), data)
        yield from self._run(self._evaluation)
        while self.rank == 0 and self._yielded < (self._total or 0):
            yield (yield from self._receive_output())

    @property
    def where(self) -> str:
        if self._text is None:
            return "the start"
        by = self._turn * self._text.cycle
        return self._text.describe(advance_instruction(self._instruction, by, self._text.updates))

    @property
    def rate(self) -> float:
        """The learning rate, before the stages' factors."""
        return self.stage_states[min(self.stage_states)].optimizer.rate

    def _receive_output(self) -> Waiting[Output]:
        index = self._yielded
        self._yielded += 1
        return self.results.receive_output(index, self.program.placement.rank_of(self._last, index))

    # -- the loop -----------------------------------------------------------------------------------

    def _resolve_steps(self, program: Program) -> tuple[list[_Step], list[_Step]]:
        """Returns the steps of the warm-up and of the period."""
        mine = program.ranks[self.rank]
        return [self._resolve_step(program, i) for i in mine.warmup], [
            self._resolve_step(program, i) for i in mine.period
        ]

    def _resolve_step(self, program: Program, instruction: Instruction) -> _Step:
        by = advance_instruction(instruction, program.cycle, program.updates).index - instruction.index
        at = instruction.stage if isinstance(instruction, Op) else instruction.channel
        return _Step(self._actions[instruction.kind], at, instruction.index, by, instruction)

    def _run(self, program: Program) -> Generator[Any, None, None]:
        """Yields what it would wait for, and each `Done`."""
        steps, period = self._steps[self._stream.trains]
        executed = 0
        self._text, self._turn = program, 0
        try:
            while steps or period:
                turn = self._turn
                for run, at, index, advance, self._instruction in steps:
                    executed += 1
                    waiting = run(at, index + turn * advance)
                    if waiting is not None:
                        yield from waiting
                    if self._total is not None:
                        break
                if self._total is not None or not period:
                    break
                self._turn = 0 if steps is not period else turn + 1
                steps = period
            if self._total is not None:
                # Past the end of the data only some instructions exist.
                self._turn = 0
                for instruction in program.instructions(self.rank, self._total, executed):
                    self._instruction = instruction
                    step = self._resolve_step(program, instruction)
                    yield from step.run(step.at, step.index) or ()
        except CaptureError as error:
            raise WorkerError(self._process, self.where, str(error)) from error
        except (PipelineError, GeneratorExit, KeyboardInterrupt):
            raise
        except BaseException as error:
            advice = next((advice for words, advice in _ADVICE.items() if words in str(error)), "")
            raise WorkerError(self._process, self.where, with_place(error), advice) from error
        # The end arrives once on each channel that serves forwards; receive those still unread.
        while unread := self._mailbox.unread(program.channels):
            yield from self._receive(unread[0], self._total or 0) or ()

    # -- forward ------------------------------------------------------------------------------------

    def _fetch(self, stage: int, index: int) -> None:
        self.remote_forwards[stage].fetch(self._mailbox.take(Carries.WEIGHTS, stage, index))

    def _forward(self, stage: int, index: int) -> Waiting[Any] | None:
        message = self._mailbox.take(Carries.ACTIVATION, stage, index) if stage else self._admit(index)
        if message is None:
            return None
        start = self.recorder.mark()
        trains = self._stream.trains
        self.activity.begin("a forward" if trains else "a forward without training")
        remote_forward = self.remote_forwards.get(stage)
        stage_state = remote_forward or self.stage_states[stage]
        if not trains:
            is_empty = message.content is Content.EMPTY
            result = message if is_empty else self._forwards.without_backward(stage, index, stage_state, message)
        elif remote_forward is None:
            result = self._run_local_forward(stage, index, self.stage_states[stage], message)
        else:
            result = self._run_remote_forward(stage, index, remote_forward, message)
        if stage < self._last:
            self._mailbox.put(Carries.ACTIVATION, stage + 1, result)
        else:
            self._mailbox.drop(Carries.INPUT, stage, index)
        self.activity.end()
        stage_state.next_forward = index + self._replicas[stage]
        self.recorder.note("F", stage, self._stream.number(index), start)
        if stage == self._last and trains:
            minibatch = self._stream.minibatch(index)
            if self._stream.minibatch(stage_state.next_forward) > minibatch:
                self.results.complete(minibatch, index)
        if self._stream.predicts and self.rank == 0 and index - self._yielded >= self.program.plan.in_flight[0]:
            # Outputs are received as they come, so that no worker has to keep many.
            return self._yield_output()
        return None

    def _yield_output(self) -> Generator[Any, None, None]:
        yield (yield from self._receive_output())

    def _run_local_forward(self, stage: int, index: int, stage_state: StageState, message: Message) -> Message:
        """Runs a forward of a stage of this rank, and keeps what its backward needs."""
        if message.content is Content.EMPTY:
            self._saved_forwards[stage, index] = SavedForward(None, (), (), (), index)
            if stage == self._last:
                self.results.add(self._stream.minibatch(index), message, self.results.zeros)
            return message
        stage_state.note_received(message)
        saved, run = self._forwards.for_training(stage, index, stage_state, message)
        with stage_state.forward_context(), stage_state.module.counting("forward"):
            if stage_state.recomputation is None:
                result = run(message)
            else:
                result = stage_state.recomputation.forward(saved, message, run)
        self._saved_forwards[stage, index] = saved
        stage_state.check.after_forward(index)
        return result

    def _run_remote_forward(self, stage: int, index: int, remote_forward: RemoteForward, message: Message) -> Message:
        """Runs a forward on fetched weights; its input goes to the stage's own rank, where the backward repeats it."""
        result = message
        if message.content is not Content.EMPTY:
            saved, run = self._forwards.for_training(stage, index, remote_forward, message)
            with remote_forward.forward_context():
                result = remote_forward.recomputation.forward(saved, message, run)
        self._mailbox.put(Carries.STAGE_INPUT, stage, message)
        if (index + 1) % self._stream.split == 0:
            remote_forward.drop()
        return result

    def _admit(self, index: int) -> Message | None:
        """Takes the next microbatch from the data; ends the stream after the last one."""
        if self._stream.trains and self._replicas[0] == 1 and self.stop_requested():
            self._stop_feed(StopReason.INTERRUPT)
        assert self._data is not None
        self.activity.begin("loading data")
        messages = self._data.take(index)
        self.activity.end()
        if isinstance(messages, StopReason):
            self._end(self._data.ended_at * self._stream.split, messages)
            return None
        inputs, targets = messages
        self._mailbox.put(Carries.INPUT, self._last, targets)
        return inputs

    # -- backward and update ------------------------------------------------------------------------

    def _time_backward(
        self, kind: str, task: str, backward: Callable[[int, int, StageState], None], stage: int, index: int
    ) -> None:
        self.activity.begin(task)
        stage_state = self.stage_states[stage]
        if self._is_remote[stage]:
            self._saved_forwards[stage, index] = self._forwards.recompute(
                stage, index, stage_state, self._mailbox.take(Carries.STAGE_INPUT, stage, index)
            )
        start = self.recorder.mark()
        backward(stage, index, stage_state)
        self.recorder.note(kind, stage, self._stream.number(index), start)
        self.activity.end()

    def _run_backward(self, stage: int, index: int, stage_state: StageState) -> None:
        """B: gradients of the weights and of the received tensors."""
        saved = self._saved_forwards.pop((stage, index))
        message = self._take_gradients(stage, index)
        ready = self._choose_ready_hook(Kind.BACKWARD, stage, index, stage_state)
        weight_gradients: list[torch.Tensor | None] = []
        input_gradients: list[torch.Tensor | None] = []
        if saved.weights is not None:
            with stage_state.backward_context(saved), stage_state.module.counting("backward"):
                output_gradients = saved.output_gradients(message, stage_state.optimizer.scale)
                stage_state.check.before_backward(saved, output_gradients)
                weight_gradients, input_gradients = stage_state.module.backward(
                    saved, output_gradients, stage_state.gradients.accumulators, ready
                )
        self._add_gradients(stage_state, saved, weight_gradients, is_last=ready is not None)
        self._send_back(stage, index, saved, input_gradients, message)

    def _compute_input_gradients(self, stage: int, index: int, stage_state: StageState) -> None:
        """I: the half of a backward that the previous stage waits for."""
        saved = self._saved_forwards[stage, index]
        message = self._take_gradients(stage, index)
        input_gradients: list[torch.Tensor | None] = []
        if saved.weights is not None:
            with stage_state.backward_context(saved), stage_state.module.counting("backward"):
                output_gradients = saved.output_gradients(message, stage_state.optimizer.scale)
                stage_state.check.before_backward(saved, output_gradients)
                input_gradients = stage_state.module.backward_inputs(saved, output_gradients)
        self._send_back(stage, index, saved, input_gradients, message)

    def _compute_weight_gradients(self, stage: int, index: int, stage_state: StageState) -> None:
        """W: the other half of a backward."""
        saved = self._saved_forwards.pop((stage, index))
        ready = self._choose_ready_hook(Kind.WEIGHT_GRADIENT, stage, index, stage_state)
        weight_gradients: list[torch.Tensor | None] = []
        if saved.weights is not None:
            with stage_state.backward_context(saved), stage_state.module.counting("weights' backward"):
                weight_gradients = stage_state.module.backward_weights(saved, stage_state.gradients.accumulators, ready)
        self._add_gradients(stage_state, saved, weight_gradients, is_last=ready is not None)

    def _choose_ready_hook(
        self, kind: Kind, stage: int, index: int, stage_state: StageState
    ) -> Callable[[int, torch.Tensor], None] | None:
        """Returns what starts the all-reduce inside the last backward before a replicated stage's update, else None."""
        if stage_state.optimizer.all_reduce is None:
            return None
        op = Op(kind, stage, index, self.program.placement.replica(stage, index))
        return None if self._update_completed_by(op) is None else stage_state.gradient_ready

    def _add_gradients(
        self, stage_state: StageState, saved: SavedForward, gradients: list[torch.Tensor | None], *, is_last: bool
    ) -> None:
        stage_state.add_gradients(saved, gradients)
        if is_last:
            stage_state.optimizer.close(stage_state.gradients, float(self.stop_requested()))

    def _take_gradients(self, stage: int, index: int) -> Message | None:
        """Returns the message with the gradients of a stage's outputs; None at the last stage."""
        if stage == self._last:
            return None
        message = self._mailbox.take(Carries.GRADIENT, stage, index)
        if message.numbers:
            self.results.arrived(index, message)
        return message

    def _send_back(
        self,
        stage: int,
        index: int,
        saved: SavedForward,
        input_gradients: list[torch.Tensor | None],
        received: Message | None,
    ) -> None:
        """Sends the gradients of a stage's inputs, with the results that travel with them."""
        if not stage:
            return
        self.stage_states[stage].check.sent_back(index, input_gradients)
        results = self.results.carried(index) if received is None else received
        content = Content.EMPTY if saved.weights is None else Content.DATA
        gradients = Message(
            index, content, tuple(input_gradients), saved.gradient_crossings, loss_weight=saved.loss_weight
        )
        if results is not None and results.numbers:
            gradients.carry(results)
        self._mailbox.put(Carries.GRADIENT, stage - 1, gradients)

    def _sync(self, stage: int, index: int) -> None:
        """Has nothing to do: the all-reduce that the proof places here was started inside the update's last backward
        (`_choose_ready_hook`), and the update waits for it (`UpdateBarrier.prepare`).

        The earlier start is safe: the replicas of a stage have a group of their own, and all start their buckets in the
        same order.
        """

    def _update(self, stage: int, index: int) -> Generator[Any, None, None]:
        stage_state = self.stage_states[stage]
        before = self.recorder.mark()
        stop_request = self._replicas[stage] > 1 and self.stop_requested()
        present_share, stop_requests = yield from self.update_barrier.prepare(stage, float(stop_request))
        if stage in self._waits_for_others:
            self.recorder.note("wait", stage, index, before)
        start = self.recorder.mark()
        self.activity.begin("an update")
        gradient_versions = stage_state.update(self.program, Op(Kind.UPDATE, stage, index), present_share, self._total)
        self.activity.end()
        for microbatch, *versions in gradient_versions:
            self.recorder.note_gradient_versions(stage, self._stream.number(microbatch), *versions)
        before_drain = self._stream.base * self.program.microbatches // self.program.updates.per_update[stage]
        self.recorder.note("U", stage, before_drain + index, start)
        if stop_requests:
            self._stop_feed(StopReason.INTERRUPT)
        if stage == min(self.stage_states):
            m = self.program.microbatches
            members = self.program.updates.members(stage, index, self._total)
            if self.program.updates.mean_of_rounds and self._total is None:
                # A round may be the last, and incomplete, before this worker has received the end.
                members = members[: round(present_share * self._replicas[stage])]
            self._updated += ((minibatch, self.rate) for minibatch in range(members.start // m, -(-members.stop // m)))
            yield from self._collect(self.results.delay)

    def _collect(self, delay: int) -> Generator[Any, None, None]:
        """Yields the results of the minibatches that the weights contain, but for the last ones."""
        while self._updated and self._updated[0][0] + delay <= self._updated[-1][0]:
            minibatch, rate = self._updated.popleft()
            yield (yield from self.results.collect(minibatch, rate, self._total))

    # -- messages -----------------------------------------------------------------------------------

    def _receive(self, number: int, index: int) -> Waiting[None] | None:
        start = self.recorder.mark()
        pending = self._mailbox.receive(number)
        if not pending.ready():
            return self._finish_receive(pending, number, index, start)
        self._note_arrival(pending.result(), number, index, start)
        return None

    def _finish_receive(self, pending: Pending[Message], number: int, index: int, start: Moment) -> Waiting[None]:
        yield pending
        self._note_arrival(pending.result(), number, index, start)

    def _note_arrival(self, message: Message, number: int, index: int, start: Moment) -> None:
        ended = self._mailbox.arrived(number, index, message)
        self.recorder.note("wait", self.program.channels[number].target, self._stream.number(index), start)
        if ended is not None and self._total is None:
            self._end(*ended)

    def _send(self, number: int, index: int) -> None:
        start = self.recorder.mark()
        channel = self.program.channels[number]
        if channel.carries == Carries.WEIGHTS:
            stage = channel.source
            weights = self._forwards.pack_weights(stage, index, self.stage_states[stage], self._weight_packets[stage])
            self._mailbox.put(Carries.WEIGHTS, stage, weights)
        self._mailbox.send(number, index)
        self.recorder.note("send", channel.source, self._stream.number(index), start)

    def _end(self, total: int, stop_reason: StopReason) -> None:
        self._total = total
        self.stop_reason = stop_reason
        self._mailbox.end(total, stop_reason)

    # -- small things -------------------------------------------------------------------------------

    def _begin(self, stream: DataStream, data: Microbatches | None, cycle: int = 1, until: int | None = None) -> None:
        self._data = data
        if data is not None:
            replica = dict(self.program.placement.stage_replicas(self.rank)).get(0, 0)
            data.begin(stream.split, replica, stream.base, cycle, until)
        self._stream = stream
        self._total = None
        self._yielded = 0  # outputs, in a prediction
        self._mailbox.begin()
        self._forwards.begin(self.program, stream)
        for remote_forward in self.remote_forwards.values():
            remote_forward.drop()
        self._saved_forwards: dict[tuple[int, int], SavedForward] = {}
        self.results.begin(stream.split if stream.trains else 0)
        self._updated: deque[tuple[int, float]] = deque()

    def _stop_feed(self, stop_reason: StopReason) -> None:
        if self._data is not None:
            self._data.stop(stop_reason)


def _is_finite(weight: torch.Tensor) -> bool:
    """Tries the sum first, which takes a twentieth of the time; a sum of finite numbers may overflow."""
    return bool(weight.sum().isfinite()) or bool(weight.isfinite().all())
