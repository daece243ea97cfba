"""The worker: the loop of one rank, which executes a program instruction by instruction.

A worker is a generator: it yields a `Pending` where it would wait, and a `Done` for each minibatch whose gradients are
in its weights. It decides nothing: order, messages and versions are in the verified program. Each instruction is
resolved to a method and its numbers before the run (`_Step`).
"""

from collections import deque
from collections.abc import Callable, Generator, Mapping
from functools import partial
from typing import Any, NamedTuple

from pipedream.core.errors import CaptureError, PipelineError, WorkerError
from pipedream.core.extensions import list_offers
from pipedream.core.plan.placement import Carries
from pipedream.core.schedule import moves
from pipedream.core.schedule.moves import Move, list_ends
from pipedream.core.schedule.op import Kind, Op
from pipedream.core.schedule.program import Instruction, Program, advance_instruction, count_indices
from pipedream.core.user_code import with_place
from pipedream.runtime.backward import BACKWARDS, BackwardRunner
from pipedream.runtime.comm.channel import Pending, Waiting
from pipedream.runtime.comm.message import Message, StopReason
from pipedream.runtime.data.source import Source
from pipedream.runtime.data.splitter import SINGLE_ADVICE, SINGLE_SAMPLE
from pipedream.runtime.forward import DataStream, ForwardRunner
from pipedream.runtime.links import WorkerChannels
from pipedream.runtime.rank_context import RankContext
from pipedream.runtime.recorder import Moment
from pipedream.runtime.results import Done, Output
from pipedream.runtime.scorer import Scorer
from pipedream.runtime.stage_passes import StagePasses
from pipedream.runtime.stage_state import StageState
from pipedream.runtime.updates import Updates

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
    SINGLE_SAMPLE: f"{SINGLE_ADVICE}, or train with fewer microbatches",
    "CUDA out of memory": (
        "if much memory is reserved but not allocated, set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True; otherwise "
        "use recomputation (--recompute), smaller microbatches or more workers"
    ),
}
"""Text of one of torch's errors -> what to do."""


class _Step(NamedTuple):
    """An instruction of a program's text, resolved.

    Attributes:
        run: called with `stage_or_channel` and the index; returns what it waits for, None if it is done.
        index: in the first period.
        advance: what each period adds to the index.
    """

    run: Callable[[int, int], Waiting[Any] | None]
    stage_or_channel: int
    index: int  # type: ignore[assignment]  # a field, not the method of tuples
    advance: int
    instruction: Instruction


_Actions = Mapping[Kind | Move, Callable[[int, int], Waiting[Any] | None]]


def _resolve_steps(program: Program, rank: int, actions: _Actions) -> tuple[list[_Step], list[_Step]]:
    """Returns the steps of the warm-up and of the period."""
    instructions = program.ranks[rank]
    warmup = [_resolve_step(program, instruction, actions) for instruction in instructions.warmup]
    return warmup, [_resolve_step(program, instruction, actions) for instruction in instructions.period]


def _resolve_step(program: Program, instruction: Instruction, actions: _Actions) -> _Step:
    advance = count_indices(instruction, program.cycle, program.updates)
    action, (_, stage_or_channel, index, *_) = actions[instruction.kind], instruction
    return _Step(action, stage_or_channel, index, advance, instruction)


class Worker:
    """One worker, or one of its ranks, which trains with one program.

    Args:
        evaluation: a program without backwards.
        stage_states: of the stages that are updated here.
        stage_passes: of the stages whose passes run here; a state, or passes on copies of the weights.

    Attributes:
        process: this rank among all ranks of the job.
        stream: that runs.
        input_updates: updates that the input stage has made with this program.
    """

    def __init__(
        self,
        context: RankContext,
        evaluation: Program,
        stage_states: dict[int, StageState],
        stage_passes: dict[int, StagePasses],
        channels: WorkerChannels,
        scorer: Scorer,
        updates: Updates,
    ) -> None:
        rank, program, recorder, activity = context.rank, context.program, context.recorder, context.activity
        self.rank = rank
        self.program = program
        self.process = context.process
        self.stage_states = stage_states
        self.stage_passes = stage_passes
        self._evaluation = evaluation
        self.senders, self.receivers = channels.senders, channels.receivers
        self.results, self._scorer = context.results, scorer
        self.updates = updates
        self.recorder = recorder
        self._activity = activity
        self.stop_requested: Callable[[], bool] = lambda: False
        self.stop_reason = StopReason.DATA
        self.done_minibatches = self.input_updates = 0
        self._replicas = program.placement.replicas
        self._waiting_stages = _find_waiting_stages(program)
        self._microbatches: int | None = None
        self._running: Program | None = None
        self._period = 0
        self.results.where = lambda: self.where
        self._mailbox = context.mailbox
        forwards = self._forwards = ForwardRunner(context, stage_passes, scorer, self._admit)
        backwards = self._backwards = BackwardRunner(context, forwards, lambda: self.stop_requested())
        self._actions: _Actions = {
            Kind.FORWARD: forwards.run,
            **{kind: partial(backwards.run, kind) for kind in BACKWARDS},
            Kind.UPDATE: self._update,
            moves.RECEIVE: self._receive,
            moves.SEND: self._send,
            moves.REPEAT: backwards.repeat_forward,
            moves.BEGIN_SUM: backwards.begin_sum,
            moves.BEGIN_UPDATE: updates.begin_thread,
            moves.JOIN_UPDATE: lambda s, n: updates.join(s, recorder, activity),
            **dict.fromkeys((moves.SYNC, moves.TIED, moves.NORM), _skip_sum),
            moves.AVERAGE: self._average,
            **{move: partial(run, self) for offer in list_offers("actions") for move, run in offer.ACTIONS.items()},
            **{move: partial(move.run or _wait_for_all, self) for move in program.moves},
        }
        self._steps = {
            True: _resolve_steps(program, rank, self._actions),
            False: _resolve_steps(evaluation, rank, self._actions),
        }
        self._begin_stream(DataStream(), None)

    def take_over(self, former: "Worker") -> None:
        """Continues where a worker with another program has drained."""
        for stage, stage_state in self.stage_states.items():
            stage_state.take_over(former.stage_states[stage], former.input_updates)
        self.updates.decision.norm_square = former.updates.decision.norm_square
        self.done_minibatches, self.stop_requested = former.done_minibatches, former.stop_requested
        former.close_parts()
        former.updates.thread.close(wait=True)
        former.stage_states.clear()  # frees tensors now: the rest of the worker refers to itself
        former.stage_passes.clear()

    def close_parts(self) -> None:
        """Ends what the parts of the stages have begun."""
        for passes in self._list_passes():
            for part in passes.parts:
                part.close()

    def _list_passes(self) -> list[StagePasses]:
        """Returns the states of the stages, and the passes on copies."""
        return list(dict.fromkeys([*self.stage_states.values(), *self.stage_passes.values()]))

    # -- training, evaluation, prediction -----------------------------------------------------------

    def train(self, data: Source | None, until: int | None) -> Generator[Pending[Any] | Done, None, None]:
        """Trains until the stream ends, and drains; sets `stop_reason`.

        Args:
            data: None except at the input stage.
            until: total of minibatches at which it drains; None for no limit.

        Raises:
            WorkerError: an op failed; names rank, stage, op and cause.
        """
        stream = DataStream(self.program.microbatches, self.done_minibatches * self.program.microbatches, trains=True)
        self._begin_stream(stream, data, self.program.round_minibatches, until)
        for passes in self._list_passes():
            passes.begin()
        yield from self.updates.begin(self.program.placement)
        yield from self._run(self.program)
        self.results.finish()
        yield from self.updates.decision.finish()
        for stage_state in self.stage_states.values():
            yield from stage_state.end()
        yield from self._collect(0)
        self.input_updates += self.program.updates.updates(0, self._microbatches or 0)
        begin = self.done_minibatches
        self.done_minibatches += (self._microbatches or 0) // self.program.microbatches
        peak_versions = max(stage_state.versions.peak for stage_state in self.stage_states.values())
        self.recorder.end_stream(begin, self.done_minibatches, peak_versions)

    def evaluate(self, data: Source | None, ema: bool) -> Generator[Pending[Any] | Done, None, None]:
        """Yields at the end one `Done` with the means over all minibatches; the stages are in evaluation mode."""
        self._begin_stream(DataStream(ema=ema), data)
        yield from self.updates.begin(self.program.placement)
        yield from self._run(self._evaluation)
        if self.rank in self._evaluation.placement.scorers:
            self.results.complete(0, self._scorer.close(0))
        yield (yield from self.results.collect(0, self.rate))

    def predict(self, data: Source | None, ema: bool) -> Generator[Pending[Any] | Output, None, None]:
        """Yields the outputs in order, at rank 0 only; the stages are in evaluation mode."""
        self._begin_stream(DataStream(predicts=True, ema=ema), data)
        yield from self.updates.begin(self.program.placement)
        yield from self._run(self._evaluation)
        while self.rank == 0 and self._forwards.received_outputs < (self._microbatches or 0):
            yield (yield from self._forwards.receive_output())

    @property
    def where(self) -> str:
        if self._running is None:
            return "the start"
        advance = self._period * self._running.cycle
        return self._running.describe(advance_instruction(self._instruction, advance, self._running.updates))

    @property
    def rate(self) -> float:
        """The learning rate, before the stages' factors."""
        return self.stage_states[min(self.stage_states)].optimizer.schedule.rate

    # -- the loop -----------------------------------------------------------------------------------

    def _run(self, program: Program) -> Generator[Any, None, None]:
        """Executes a program; yields each `Pending` and each `Done`."""
        steps, period_steps = self._steps[self.stream.trains]
        executed = 0
        self._running, self._period = program, 0
        try:
            while steps or period_steps:
                period = self._period
                for run, stage_or_channel, index, advance, self._instruction in steps:
                    executed += 1
                    waiting = run(stage_or_channel, index + period * advance)
                    if waiting is not None:
                        yield from waiting
                    if self._microbatches is not None:
                        break
                if self._microbatches is not None or not period_steps:
                    break
                self._period = 0 if steps is not period_steps else period + 1
                steps = period_steps
            if self._microbatches is not None:
                # Past the end of the data only some instructions exist.
                self._period = 0
                for instruction in program.instructions(self.rank, self._microbatches, executed):
                    self._instruction = instruction
                    step = _resolve_step(program, instruction, self._actions)
                    yield from step.run(step.stage_or_channel, step.index) or ()
        except CaptureError as error:
            raise WorkerError(self.process, self.where, str(error)) from error
        except (PipelineError, GeneratorExit, KeyboardInterrupt):
            raise
        except BaseException as error:
            advice = next((advice for words, advice in _ADVICE.items() if words in str(error)), "")
            raise WorkerError(self.process, self.where, with_place(error), advice) from error
        if self._data is not None:
            self._data.end()
        # The end arrives once on each channel that serves forwards; receive what is missing.
        while unread := self._mailbox.list_unended(program.channels):
            yield from self._receive(unread[0], self._microbatches or 0) or ()

    # -- data and update ----------------------------------------------------------------------------

    def _admit(self, index: int) -> Message | None:
        """Takes the next microbatch from the data; ends the stream after the last one."""
        assert self._data is not None
        if self.stream.trains and self._replicas[0] == 1 and self.stop_requested():
            self._data.stop(StopReason.INTERRUPT)
        self._activity.begin("loading data")
        messages = self._data.take(index)
        self._activity.end()
        if isinstance(messages, StopReason):
            self._end_stream(self._data.ended_at * self.stream.split, messages)
            return None
        inputs, targets = messages
        self._mailbox.put(Carries.INPUT, self.program.placement.stages - 1, targets)
        return inputs

    def _update(self, stage: int, index: int) -> Generator[Any, None, None]:
        stage_state, wait_start = self.stage_states[stage], self.recorder.mark()
        is_in_thread, prepared = self.updates.ask_thread(stage), None
        if not is_in_thread or self.updates.couples_stages or stage_state.observer.observes:
            stop_request = self._replicas[stage] > 1 and self.stop_requested()
            prepared = yield from self.updates.prepare(stage, float(stop_request))
            if stage in self._waiting_stages:
                self.recorder.note("wait", stage, index, wait_start)
        start = self.recorder.mark()
        self._activity.begin("an update")
        op = Op(Kind.UPDATE, stage, index)
        number = index + self.stream.offset // self.program.updates.per_update[stage]
        gradient_versions = stage_state.choose_version(self.program, op, self._microbatches)
        rate = self.rate  # read now: a thread's step may change it for a while
        present_share, stop_requests = prepared or (1.0, False)
        if is_in_thread:
            self.updates.overlap(stage, number, is_prepared=prepared is not None)
        else:
            stage_state.step(present_share)
        self._activity.end()
        for microbatch, *versions in gradient_versions:
            self.recorder.note_gradient_versions(stage, self.stream.offset + microbatch, *versions)
        self.recorder.note("U", stage, number, start)
        if stop_requests and self._data is not None:
            self._data.stop(StopReason.INTERRUPT)
        if stage == min(self.stage_states):
            done = _list_minibatches(self.program, op, self._microbatches, present_share)
            self._uncollected += ((minibatch, rate) for minibatch in done)
            if all(end.kind is not moves.AVERAGE for end in list_ends(self.program, self.rank, op)):
                yield from self._collect(self.results.delay)

    def _average(self, stage: int, index: int) -> Waiting[Any]:
        yield from self.stage_states[stage].average_replicas(self.recorder, stage, index)
        yield from self._collect(self.results.delay)

    def _collect(self, delay: int) -> Generator[Any, None, None]:
        """Yields the results of the minibatches that the weights contain, except the `delay` newest."""
        while self._uncollected and self._uncollected[0][0] + delay <= self._uncollected[-1][0]:
            minibatch, rate = self._uncollected.popleft()
            yield (yield from self.results.collect(minibatch, rate, self._microbatches))

    # -- messages -----------------------------------------------------------------------------------

    def _receive(self, number: int, index: int) -> Waiting[None] | None:
        start = self.recorder.mark()
        pending = self.receivers[number].receive()
        if not pending.ready():
            return self._finish_receive(pending, number, index, start)
        self._note_arrival(pending.result(), number, index, start)
        return None

    def _finish_receive(self, pending: Pending[Message], number: int, index: int, start: Moment) -> Waiting[None]:
        yield pending
        self._note_arrival(pending.result(), number, index, start)

    def _note_arrival(self, message: Message, number: int, index: int, start: Moment) -> None:
        ended = self._mailbox.accept(number, index, message)
        self.recorder.note("wait", self.program.channels[number].target, self.stream.offset + index, start)
        if ended is not None and self._microbatches is None:
            self._end_stream(*ended)

    def _send(self, number: int, index: int) -> None:
        start = self.recorder.mark()
        self._mailbox.send(number, index)
        self.recorder.note("send", self.program.channels[number].source, self.stream.offset + index, start)

    def _end_stream(self, total: int, stop_reason: StopReason) -> None:
        self._microbatches = total
        self.stop_reason = stop_reason
        self._mailbox.end(total, stop_reason)

    # -- streams ------------------------------------------------------------------------------------

    def _begin_stream(self, stream: DataStream, data: Source | None, cycle: int = 1, until: int | None = None) -> None:
        self._data, self.stream, self._microbatches = data, stream, None
        if data is not None:
            reader = self.program.placement.readers.index(self.rank)
            data.begin(stream.split, reader, stream.offset // stream.split, cycle, until)
        program = self.program if stream.trains else self._evaluation
        self._mailbox.begin(program.placement, trains=stream.trains)
        self._forwards.begin(program, stream)
        self._backwards.begin(stream)
        self.results.begin(stream.split if stream.trains else 0)
        self._uncollected: deque[tuple[int, float]] = deque()


def abandon(worker: Worker, *, wait: bool) -> None:
    """Drops a worker's channels after a failure, because messages under way keep connections open.

    `wait`: waits for the worker's last update, which writes weights.
    """
    worker._data = None
    worker.updates.thread.close(wait=wait)
    for channels in (worker.senders, worker.receivers, worker.results.senders, worker.results.receivers):
        channels.clear()


def _list_minibatches(program: Program, update: Op, total: int | None, present_share: float) -> range:
    """Returns the minibatches of an update of a rank's first stage, in which a share of its replicas takes part."""
    members = program.updates.members(update.stage, update.index, total)
    if program.updates.mean_of_rounds and total is None:
        # A round may be the last, and incomplete, before this worker has received the end.
        members = members[: round(present_share * program.placement.replicas[update.stage])]
    return range(members.start // program.microbatches, -(-members.stop // program.microbatches))


def _find_waiting_stages(program: Program) -> set[int]:
    """Returns the stages whose updates wait for other ranks."""
    return {
        stage
        for stage, replicas in enumerate(program.placement.replicas)
        if replicas > 1
        or any(stage in weights.stages for weights in program.plan.tied_weights)
        or (program.couples_updates and not program.norm_delay)
    }


def _wait_for_all(worker: Worker, number: int, index: int) -> Waiting[None]:
    """Waits until all workers do."""
    yield from worker.updates.meet()


def _skip_sum(number: int, index: int) -> None:
    """Runs an instruction of a sum, for which the update after it waits (`Updates.prepare`).

    A sum over replicas has begun inside the update's last backward (`BackwardRunner.begin_sum`). That is safe: the
    replicas of a stage have a group of their own, and all start their buckets in the same order.
    """
