"""The worker: the loop of one rank. It reads a program and does what it says, one instruction after the other.

A worker is a generator. It yields a `Pending` where it would wait and a `Done` for each minibatch that its
own weights have taken in; what waiting means is a clock's business (`clock.py`), so the same worker runs in
one process with all the others, or alone over a network. It decides nothing: order, messages and versions
stand in the program, which was verified before.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from ..core.errors import PipelineError, WorkerError
from ..core.op import Kind, Op
from ..core.program import Instruction, Move, Program
from ..core.timeline import WORK, Span, Tag
from .batches import flatten, split, to_device, unflatten
from .channel import Pending, Receiver, Sender
from .feed import Admitted, Ending, Feed
from .losses import Loss, Metric, measure
from .message import Content, Message
from .optimize import Gradients, Optimizer
from .stage import Held, StageModule, outputs_of
from .stopwatch import Stopwatch
from .versions import Versions

__all__ = ["Done", "Output", "Seated", "Worker"]

_ENDS_EPOCH = 1
_MOST_SPANS = 200_000
_FORWARD = ("activation", "input")


@dataclass(frozen=True)
class Done:
    """One minibatch whose gradients are in the weights; equal on every rank.

    Attributes:
        number: of the minibatch, from 0 since the start of training.
        epoch: of the minibatch, from 0.
        ends_epoch: it was the epoch's last one.
        loss: mean over `weight`.
        weight: what the loss is a mean over (samples, tokens, ...).
        samples: in the minibatch.
        rate: learning rate, before the stages' factors.
        metrics: means.
    """

    number: int
    epoch: int
    ends_epoch: bool
    loss: float
    weight: float
    samples: int
    rate: float
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Output:
    """The model's output for one minibatch, at rank 0."""

    number: int
    value: Any


@dataclass
class Seated:
    """What lives on one seat of a rank: a stage replica with its weights and its optimizer."""

    module: StageModule
    versions: Versions
    gradients: Gradients
    optimizer: Optimizer
    next_forward: int = 0
    tags: list[tuple[int, int, int]] = field(default_factory=list)


@dataclass
class _Result:
    """Sums of a minibatch's losses and metrics, as far as one worker has them."""

    minibatch: int
    epoch: int
    flags: int
    samples: int = 0
    numbers: list[float] = field(default_factory=list)

    def add(self, numbers: list[float], samples: int) -> None:
        self.numbers = [a + b for a, b in zip(self.numbers, numbers, strict=True)] if self.numbers else list(numbers)
        self.samples += samples


class Worker:
    """One rank.

    Args:
        rank: of this worker.
        program: of the training, verified.
        evaluation: the program of forwards alone.
        seats: stage -> what lives here.
        senders, receivers: channel number -> its end, for the channels of the programs.
        result_senders, result_receivers: other rank -> channel, from each worker of the last stage to all.
        loss, metrics: of the user.
        device: where it computes.
        on_nan: 'error' or 'continue'.
    """

    def __init__(
        self,
        rank: int,
        *,
        program: Program,
        evaluation: Program,
        seats: dict[int, Seated],
        senders: dict[int, Sender],
        receivers: dict[int, Receiver],
        result_senders: dict[int, Sender],
        result_receivers: dict[int, Receiver],
        loss: Loss,
        metrics: Mapping[str, Metric],
        device: torch.device,
        on_nan: str = "error",
    ) -> None:
        self.rank = rank
        self.program = program
        self.seats = seats
        self._evaluation = evaluation
        self.senders = senders
        self.receivers = receivers
        self.result_senders = result_senders
        self.result_receivers = result_receivers
        self._loss = loss
        self._metrics = metrics
        self._device = device
        self._on_nan = on_nan
        self._last = program.placement.stages - 1
        self._watch = Stopwatch(device)
        self.spans: deque[tuple[str, int, int, Any, Any]] = deque(maxlen=_MOST_SPANS)
        self.tags: deque[Tag] = deque(maxlen=_MOST_SPANS)
        self.ending = Ending.DATA
        self.done_minibatches = 0
        self.where = "the start"
        self.wishes_to_stop: Callable[[], bool] = lambda: False
        self._feed: Feed | None = None
        self._looked: Any = None
        self._reset()

    # -- the three things a worker does -------------------------------------------------------------

    def train(self, feed: Feed | None) -> Generator[Pending[Any] | Done, None, None]:
        """Trains until the stream ends, and drains. `ending` says then why it ended.

        Args:
            feed: the data, at the workers of the input stage; None elsewhere.

        Raises:
            WorkerError: an op failed; names rank, stage, op and cause.
        """
        self._reset()
        self._feed = feed
        self._training = True
        for seat in self.seats.values():
            seat.next_forward = 0
        yield from self._run(self.program, self._train_op)
        for seat in self.seats.values():
            seat.versions.rewind()
        self.done_minibatches += self._total // self.program.microbatches if self._total else 0

    def evaluate(self, feed: Feed | None, ema: bool) -> Generator[Pending[Any] | Done, None, None]:
        """Runs forwards alone, and ends with one `Done` that holds the means over all minibatches."""
        self._begin_evaluation(feed, ema)
        total = _Result(0, 0, 0)
        self._totals = total
        flags = self._set_mode(False)
        try:
            yield from self._run(self._evaluation, self._forward_op)
        finally:
            _restore_mode(flags)
        if self._last in self.seats:
            self._announce(total)
        yield (yield from self._gather(0, range(min(len(self.program.placement.ranks[self._last]), self._total or 1))))

    def predict(self, feed: Feed | None, ema: bool) -> Generator[Pending[Any] | Output, None, None]:
        """Runs forwards alone, and yields the outputs in order, at rank 0 only."""
        self._begin_evaluation(feed, ema)
        self._predicting = True
        ahead = self.program.plan.in_flight[0]
        flags = self._set_mode(False)
        given = 0
        try:
            for _ in self._run_steps(self._evaluation, self._forward_op):
                if isinstance(_, Pending):
                    yield _
                elif self.rank == 0 and _.index - given >= ahead:
                    # Outputs are taken as they come, so that no worker has to keep many.
                    yield (yield from self._take_output(given))
                    given += 1
            while self.rank == 0 and given < (self._total or 0):
                yield (yield from self._take_output(given))
                given += 1
        finally:
            _restore_mode(flags)
            self._predicting = False

    # -- the loop -----------------------------------------------------------------------------------

    def _run(self, program: Program, do: Any) -> Generator[Pending[Any] | Done, None, None]:
        for event in self._run_steps(program, do):
            if not isinstance(event, Op):
                yield event

    def _run_steps(self, program: Program, do: Any) -> Generator[Any, None, None]:
        """Does the instructions of a program; yields what it would wait for, what is done, and each op."""
        for instruction in program.instructions(self.rank, lambda: self._total):
            self.where = self._describe(program, instruction)
            try:
                if isinstance(instruction, Op):
                    yield from do(instruction)
                    yield instruction
                elif instruction.kind is Move.RECEIVE:
                    yield from self._receive(program, instruction.channel, instruction.index)
                elif instruction.kind is Move.SEND:
                    self._send(program, instruction.channel)
            except PipelineError:
                raise
            except Exception as error:
                raise self._failed(program, instruction, error) from error
        # The end of a stream comes once on each channel that carries forwards; read those still unread.
        for number, channel in enumerate(program.channels):
            if channel.receiver == self.rank and channel.carries in _FORWARD and number not in self._ended:
                yield from self._receive(program, number, self._total or 0)

    def _train_op(self, op: Op) -> Generator[Any, None, None]:
        if op.kind is Kind.FORWARD:
            yield from self._forward_op(op)
        elif op.kind is Kind.BACKWARD:
            self._backward_op(op)
        elif op.kind is Kind.UPDATE:
            yield from self._update_op(op)
        else:
            raise NotImplementedError(f"this worker cannot do {op}")

    # -- forward ------------------------------------------------------------------------------------

    def _forward_op(self, op: Op) -> Generator[Any, None, None]:
        if op.stage == 0:
            message = self._admit(op)
            if message is None:
                return
        else:
            message = self._inbox.pop("activation")
        start = self._watch.mark()
        seat = self.seats[op.stage]
        if message.content is Content.EMPTY:
            result = message
            self._keep(op, Held(None, (), (), (), op.index))
            if op.stage == self._last and self._training:
                self._note_loss(op, message, [0.0] * (2 + 2 * len(self._metrics)), 0)
        else:
            result = self._forward_data(op, seat, message)
        if op.stage == self._last:
            self._inbox.pop("input", None)
        else:
            self._outbox["activation"] = result
        seat.next_forward = op.index + self.program.placement.replicas[op.stage]
        self._note("F", op.stage, self._number(op.index), start)
        if op.stage == self._last and self._training:
            self._announce_if_complete(op)
        yield from ()

    def _forward_data(self, op: Op, seat: Seated, message: Message) -> Message:
        number = self._number(op.index)
        if self._training:
            version = self.program.weights.forward_version(op.stage, op.index)
            weights = seat.versions.read(version)
            leaves = weights.leaves
            if op.stage == 0:
                value, entries = unflatten(message.structure, message.tensors), ()  # type: ignore[arg-type]
                value = to_device(value, self._device)
            else:
                value, entries = seat.module.enter(message.structure, message.tensors, message.gradients)
            output = seat.module.forward(value, leaves, number, op.stage == 0)
            if op.stage == self._last:
                self._finish_training(op, message, output, weights, entries)
                return message
            structure, tensors, wants = outputs_of(output)
            self._keep(op, Held(weights, entries, tensors, message.gradients, op.index))
            return _onward(message, structure, tensors, wants, weights.version)
        leaves = seat.optimizer.ema if self._ema else seat.versions.peek().leaves
        with torch.no_grad():
            value = to_device(unflatten(message.structure, message.tensors), self._device)  # type: ignore[arg-type]
            output = seat.module.forward(value, leaves, number, op.stage == 0)
            if op.stage == self._last:
                self._finish_evaluation(op, message, output)
                return message
            structure, tensors, _ = outputs_of(output)
            return _onward(message, structure, tensors, (False,) * len(tensors), 0)

    def _admit(self, op: Op) -> Message | None:
        """Takes the next microbatch from the data; ends the stream where there is none."""
        assert self._feed is not None
        m = self._split
        if op.index % m == 0:
            if self._training and self.program.placement.replicas[0] == 1 and self.wishes_to_stop():
                self._feed.stopped = Ending.INTERRUPT
            found = self._feed.admit(op.index // m, op.replica)
            if isinstance(found, Ending):
                self._end(self._feed.ended_at * m, found)
                return None
            self._admitted = found
            self._pieces = list(
                zip(
                    split(found.inputs, found.samples, m),
                    split(found.targets, found.samples, m),
                    _sizes(found.samples, m),
                    strict=True,
                )
            )
        admitted: Admitted = self._admitted
        inputs, targets, count = self._pieces[op.index % m]
        header = Message(
            microbatch=op.index,
            content=Content.DATA if count else Content.EMPTY,
            minibatch=self._base + op.index // m,
            epoch=admitted.epoch,
            samples=count,
            flags=_ENDS_EPOCH if admitted.ends_epoch else 0,
            share=count / admitted.samples,
        )
        target_structure, target_tensors = flatten(targets)
        straight = _onward(header, target_structure, target_tensors, (), 0) if count else header
        if self._last == 0:
            self._inbox["input"] = straight
        else:
            self._outbox["input"] = straight
        structure, tensors = flatten(inputs)
        return _onward(header, structure, tensors, (False,) * len(tensors), 0) if count else header

    def _finish_training(self, op: Op, message: Message, output: Any, weights: Any, entries: Any) -> None:
        targets = self._targets()
        value, weight, is_sum = self._loss(output, targets, message.samples, message.share)
        loss = float(value.detach())
        if loss != loss and weight and self._on_nan == "error":
            raise WorkerError(
                self.rank,
                self.where,
                f"the loss of minibatch {message.minibatch} is nan",
                "lower the learning rate, clip the gradients (clip_grad_norm=...), look at that minibatch's data, or "
                "go on regardless with on_nan='continue'",
            )
        if not weight:
            value, loss = sum((t.sum() * 0.0 for t in flatten(output)[1] if t.is_floating_point()), value * 0.0), 0.0
            value = torch.nan_to_num(value)
        if self.program.updates.mean_of_rounds:
            scale = 1.0 / weight if is_sum and weight else 1.0
        else:
            scale = 1.0 if is_sum else weight
        kept = Held(weights, entries, (value,), message.gradients, op.index, weight)
        self._keep(op, kept)
        self._scales[op.index] = scale
        numbers = [loss if is_sum else loss * weight, weight]
        for pair in measure(self._metrics, _detached(output), targets, message.samples):
            numbers.extend(pair)
        self._note_loss(op, message, numbers, message.samples)

    def _finish_evaluation(self, op: Op, message: Message, output: Any) -> None:
        if self._predicting:
            structure, tensors = flatten(output)
            answer = _onward(message, structure, tensors, (False,) * len(tensors), 0)
            if self.rank == 0:
                self._own_outputs[op.index] = answer
            else:
                self.result_senders[0].send(answer)
            return
        targets = self._targets()
        value, weight, is_sum = self._loss(output, targets, message.samples, message.share)
        loss = float(value)
        numbers = [(loss if is_sum else loss * weight) if weight else 0.0, weight]
        for pair in measure(self._metrics, output, targets, message.samples):
            numbers.extend(pair)
        self._totals.add(numbers, message.samples)

    def _targets(self) -> Any:
        message = self._inbox["input"]
        value = unflatten(message.structure, message.tensors)  # type: ignore[arg-type]
        return to_device(value, self._device)

    # -- backward and update ------------------------------------------------------------------------

    def _backward_op(self, op: Op) -> None:
        seat = self.seats[op.stage]
        held = self._held.pop((op.stage, op.index))
        message = self._inbox.pop("gradient") if op.stage < self._last else None
        start = self._watch.mark()
        back: list[torch.Tensor | None] = []
        if held.weights is not None:
            if message is None:
                weight = held.weight
                scale = self._scales.pop(op.index)
                given: list[torch.Tensor | None] = [torch.full_like(held.outputs[0], scale)]
            else:
                weight = message.weight
                arriving = iter(message.tensors)
                given = [next(arriving) if output.requires_grad else None for output in held.outputs]
            found, back = seat.module.backward(held, given)
            seat.gradients.add(found, weight)
            seat.tags.append((op.index, held.weights.version, held.weights.version))
            seat.versions.release(held.weights)
            held.weight = weight
        if op.stage:
            content = Content.EMPTY if held.weights is None else Content.DATA
            self._outbox["gradient"] = Message(op.index, content, tensors=tuple(back), weight=held.weight)
        self._note("B", op.stage, self._number(op.index), start)

    def _update_op(self, op: Op) -> Generator[Any, None, None]:
        seat = self.seats[op.stage]
        before = self._watch.mark()
        wish = self.program.placement.replicas[op.stage] > 1 and self.wishes_to_stop()
        prepared = seat.optimizer.prepare(seat.gradients, float(wish))
        waited = False
        try:
            while True:
                pending = next(prepared)
                waited = True
                yield pending
        except StopIteration as stop:
            share, wishes = stop.value
        if waited:
            self._note("wait", op.stage, op.index, before)
        start = self._watch.mark()
        newest = seat.versions.newest
        next_read = self.program.weights.forward_version(op.stage, seat.next_forward)
        seat.versions.begin_update(next_read)
        seat.optimizer.step(share)
        seat.versions.end_update()
        for microbatch, forward_version, backward_version in seat.tags:
            self.tags.append(Tag(op.stage, self._number(microbatch), forward_version, backward_version, newest))
        seat.tags.clear()
        self._note("U", op.stage, self._updates_before(op.stage) + op.index, start)
        if wishes and self._feed is not None:
            self._feed.stopped = Ending.INTERRUPT
        if op.stage == min(self.seats):
            m = self.program.microbatches
            members = self.program.updates.members(op.stage, op.index, self._total)
            for minibatch in range(members.start // m, -(-members.stop // m)):
                yield (yield from self._gather(minibatch, self._result_replicas(minibatch)))

    # -- results ------------------------------------------------------------------------------------

    def _note_loss(self, op: Op, message: Message, numbers: list[float], samples: int) -> None:
        minibatch = op.index // self.program.microbatches
        found = self._results.setdefault(
            minibatch, _Result(self._base + minibatch, message.epoch, message.flags & _ENDS_EPOCH)
        )
        found.add(numbers, samples)

    def _announce_if_complete(self, op: Op) -> None:
        """Sends a minibatch's sums to all ranks after this worker's last microbatch of it."""
        m = self.program.microbatches
        if (op.index + self.program.placement.replicas[self._last]) // m > op.index // m:
            self._announce(self._results.pop(op.index // m), op.index // m)

    def _announce(self, result: _Result, minibatch: int = 0) -> None:
        if not result.numbers:
            result.numbers = [0.0] * (2 + 2 * len(self._metrics))
        self._own_results[minibatch] = result
        message = Message(
            0,
            minibatch=result.minibatch,
            epoch=result.epoch,
            flags=result.flags,
            samples=result.samples,
            numbers=tuple(result.numbers),
        )
        for sender in self.result_senders.values():
            sender.send(message)

    def _result_replicas(self, minibatch: int) -> range | list[int]:
        m = self.program.microbatches
        count = self.program.placement.replicas[self._last]
        return sorted({k % count for k in range(minibatch * m, (minibatch + 1) * m)})

    def _gather(self, minibatch: int, replicas: range | list[int]) -> Generator[Any, None, Done]:
        total: _Result | None = None
        for replica in replicas:
            owner = self.program.placement.ranks[self._last][replica]
            if owner == self.rank:
                part = self._own_results.pop(minibatch)
            else:
                pending = self.result_receivers[owner].receive()
                if not pending.ready():
                    yield pending
                got = pending.result()
                part = _Result(got.minibatch, got.epoch, got.flags, got.samples, list(got.numbers))
            if total is None:
                total = part
            else:
                total.add(part.numbers, part.samples)
        assert total is not None
        loss, weight, *rest = total.numbers
        return Done(
            number=total.minibatch,
            epoch=total.epoch,
            ends_epoch=bool(total.flags & _ENDS_EPOCH),
            loss=loss / weight if weight else float("nan"),
            weight=weight,
            samples=total.samples,
            rate=self.seats[min(self.seats)].optimizer.rate,
            metrics={
                name: rest[2 * i] / rest[2 * i + 1] if rest[2 * i + 1] else float("nan")
                for i, name in enumerate(self._metrics)
            },
        )

    def _take_output(self, index: int) -> Generator[Any, None, Output]:
        owner = self.program.placement.rank_of(self._last, index)
        if owner == self.rank:
            message = self._own_outputs.pop(index)
        else:
            pending = self.result_receivers[owner].receive()
            if not pending.ready():
                yield pending
            message = pending.result()
        return Output(message.minibatch, unflatten(message.structure, message.tensors))  # type: ignore[arg-type]

    # -- messages -----------------------------------------------------------------------------------

    def _receive(self, program: Program, number: int, index: int) -> Generator[Any, None, None]:
        channel = program.channels[number]
        start = self._watch.mark()
        pending = self.receivers[number].receive()
        if not pending.ready():
            yield pending
        message = pending.result()
        self._note("wait", channel.target, self._number(index), start)
        if message.content is Content.END:
            self._ended.add(number)
            if self._total is None:
                self._end(message.microbatch, Ending(message.flags))
        elif message.microbatch != index:
            raise RuntimeError(f"expected microbatch {index} on the {channel.carries} channel, got {message.microbatch}")
        else:
            self._inbox[channel.carries] = message

    def _send(self, program: Program, number: int) -> None:
        channel = program.channels[number]
        start = self._watch.mark()
        message = self._outbox.pop(channel.carries)
        self.senders[number].send(message)
        self._note("send", channel.source, self._number(message.microbatch), start)

    def _end(self, total: int, ending: Ending) -> None:
        """Ends the stream at `total` microbatches and tells the stages behind."""
        self._total = total
        self.ending = ending
        for number, channel in enumerate(self.program.channels):
            if channel.sender == self.rank and channel.carries in _FORWARD:
                self.senders[number].send(Message(total, Content.END, flags=int(ending)))

    # -- small things -------------------------------------------------------------------------------

    def timeline_spans(self) -> list[Span]:
        """Returns the spans so far; on a GPU, waits for it."""
        resolve = self._watch.resolve()
        return [Span(self.rank, k, s, i, resolve(a), resolve(b)) for k, s, i, a, b in self.spans]

    def busy_share(self) -> float:
        """Returns the share of the time since the last call in which this worker computed."""
        now = self._watch.mark()
        resolve = self._watch.resolve()
        since, self._looked = self._looked, now
        if since is None:
            return 0.0
        begin, end = resolve(since), resolve(now)
        busy = 0.0
        for kind, _, _, a, b in reversed(self.spans):
            if resolve(b) < begin:
                break
            if kind in WORK:
                busy += resolve(b) - max(resolve(a), begin)
        return busy / (end - begin) if end > begin else 0.0

    def _reset(self) -> None:
        self._total: int | None = None
        self._training = False
        self._predicting = False
        self._ema = False
        self._split = self.program.microbatches
        self._base = self.done_minibatches
        self._inbox: dict[str, Message] = {}
        self._outbox: dict[str, Message] = {}
        self._held: dict[tuple[int, int], Held] = {}
        self._scales: dict[int, float] = {}
        self._results: dict[int, _Result] = {}
        self._own_results: dict[int, _Result] = {}
        self._own_outputs: dict[int, Message] = {}
        self._ended: set[int] = set()

    def _begin_evaluation(self, feed: Feed | None, ema: bool) -> None:
        self._reset()
        self._feed = feed
        self._split = 1
        self._base = 0
        self._ema = ema

    def _set_mode(self, training: bool) -> list[Any]:
        return [flag for seat in self.seats.values() for flag in seat.module.train(training)]

    def _keep(self, op: Op, held: Held) -> None:
        if self._training:
            self._held[op.stage, op.index] = held

    def _number(self, index: int) -> int:
        """Returns the number of a microbatch since the start of training."""
        return self._base * self._split + index

    def _updates_before(self, stage: int) -> int:
        return self._base * self.program.microbatches // self.program.updates.per_update[stage]

    def _note(self, kind: str, stage: int, index: int, start: Any) -> None:
        self.spans.append((kind, stage, index, start, self._watch.mark()))

    def _describe(self, program: Program, instruction: Instruction) -> str:
        if isinstance(instruction, Op):
            return f"stage {instruction.stage}, {instruction}"
        if instruction.kind is Move.SYNC:
            return f"stage {instruction.channel}, sum of update {instruction.index}"
        channel = program.channels[instruction.channel]
        verb = "receiving" if instruction.kind is Move.RECEIVE else "sending"
        stage = channel.target if instruction.kind is Move.RECEIVE else channel.source
        return f"stage {stage}, {verb} {channel.carries} of microbatch {instruction.index}"

    def _failed(self, program: Program, instruction: Instruction, error: Exception) -> WorkerError:
        text = str(error).strip() or repr(error)
        return WorkerError(self.rank, self.where, f"{type(error).__name__}: {text}")


def _onward(
    message: Message, structure: str, tensors: tuple[torch.Tensor, ...], wants: tuple[bool, ...], version: int
) -> Message:
    return Message(
        microbatch=message.microbatch,
        content=message.content,
        tensors=tensors,
        structure=structure,
        gradients=wants,
        minibatch=message.minibatch,
        epoch=message.epoch,
        samples=message.samples,
        version=version,
        flags=message.flags,
        weight=message.weight,
        share=message.share,
    )


def _sizes(count: int, parts: int) -> list[int]:
    return [count // parts + (i < count % parts) for i in range(parts)]


def _detached(value: Any) -> Any:
    structure, tensors = flatten(value)
    return unflatten(structure, tuple(tensor.detach() for tensor in tensors))


def _restore_mode(flags: list[tuple[torch.nn.Module, bool]]) -> None:
    for module, training in flags:
        module.training = training
