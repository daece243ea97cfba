"""Trains over the phases of a run; keeps its position, and results that the loop has yet to receive."""

import sys
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch._dynamo  # noqa: F401  # the first optimizer does so if not done here, where `pause_collection` helps

from pipedream.core.checkpoint import Checkpoint, Position
from pipedream.core.errors import PipelineError
from pipedream.runtime.comm.message import StopReason
from pipedream.runtime.comm.values import tensors_in
from pipedream.runtime.data.splitter import AdaptBatch
from pipedream.runtime.results import Done
from pipedream.runtime.session.phase_order import PhaseEnd, find_data_end, find_next_phase, find_phase
from pipedream.runtime.session.session import Session

_LATE = 100  # minibatches, more than are in flight when a rank that reads the data stops
_STOP_UNHEARD = (
    "should_stop was set on a rank that does not read the data, and is ignored there; set it on every rank, by numbers "
    "that are equal on all, as those that a callback's on_minibatch gets"
)


class Training:
    """The training stream of a session, which a change of phase drains.

    Args:
        ends: of all phases.
        on_done: called with each result before the loop gets it.
        on_phase: called with the number of the phase that begins.

    Attributes:
        is_interrupted: an interrupt was raised.
        is_running: from the first minibatch of `run` until its end, or a `finish`.
        number: minibatches done since the start of training.
        has_stopped: whether `should_stop` kept the last `run` from training more.
        epoch_batches: minibatches done in this epoch.
        drains: numbers of minibatches.
        ready: drained results that `run` has yet to yield.
    """

    def __init__(
        self,
        session: Session,
        ends: Sequence[PhaseEnd],
        on_done: Callable[[Done], None],
        on_phase: Callable[[int], None],
    ) -> None:
        self._workers_here = session.workers_here
        self._services = session.services
        self._streams = session.streams
        self._ends = ends
        self._on_done = on_done
        self._on_phase = on_phase
        self._segment: Iterator[Done] | None = None
        self._data_state: Mapping[str, Any] | None = None
        self._is_resumed = False
        self.stop_reason = StopReason.DATA
        self.is_running = self.is_interrupted = self.should_stop = self.has_stopped = False
        self.phase = self.number = self.epoch = self.epoch_batches = 0
        self.drains: list[int] = []
        self.ready: deque[Done] = deque()

    @property
    def position(self) -> tuple[int, int]:
        return self.epoch, self.epoch_batches

    def _count_epochs(self, epochs: int, until: int | None) -> int:
        """Returns how many epochs are left; after a `restore`, prints what that means."""
        is_resumed, self._is_resumed = self._is_resumed, False
        if until is not None:
            return max(until - self.epoch, 0)
        if is_resumed and self.number and self._workers_here.rank == 0:
            print(
                f"pipedream: resumed after minibatch {self.number}, in epoch {self.epoch + 1}: epochs={epochs} trains "
                f"{epochs} more, {self.epoch + epochs} in all; train(until_epoch={epochs}) trains {epochs} in all",
                file=sys.stderr,
                flush=True,
            )
        return epochs

    def begin(self) -> None:
        """Begins a `run`; warns of a stop that came too late for the last one."""
        if self.should_stop and not self.has_stopped and self._workers_here.rank == 0:
            text = "should_stop was set after the last minibatch of a train(), as by early stopping, and is ignored now"
            warnings.warn(f"{text}; before each train(), write: if pipeline.should_stop: break", stacklevel=3)
        self.is_running, self.should_stop = True, False

    def _warn_of_evaluation_mode(self) -> None:
        is_training = any(module.training for module in self._workers_here.model.modules())
        if self._workers_here.rank == 0 and not is_training:
            warnings.warn(
                "the whole model is in evaluation mode, as from_pretrained() leaves it, so that it trains without "
                "dropout and on the stored batch statistics; call model.train() before, unless that is meant",
                stacklevel=4,
            )

    def _refuse_frozen(self, adapt: AdaptBatch) -> AdaptBatch:
        """Returns what adapts batches, and if nothing is trained refuses them, as the backward of a plain loop does."""
        if any(parameter.requires_grad for parameter in self._workers_here.model.parameters()):
            return adapt

        def adapt_trained(batch: Any) -> tuple[Any, Any]:
            inputs, targets = adapt(batch)
            if not any(tensor.requires_grad for tensor in tensors_in(inputs)):
                raise PipelineError(
                    "nothing is trainable: all parameters of the model are frozen; call requires_grad_() on those to "
                    "train, and make a new Pipeline"
                )
            return inputs, targets

        return adapt_trained

    def run(
        self, loader: Any, adapt: AdaptBatch, epochs: int, until_epoch: int | None = None, *, continues: bool
    ) -> Iterator[Done]:
        """Yields each minibatch once its gradients are in the weights.

        Args:
            until_epoch: trains up to this number of epochs in all, instead of `epochs` more.
            continues: continues with the data after an earlier run.
        """
        self._warn_of_evaluation_mode()
        adapt = self._refuse_frozen(adapt)
        state, self._data_state = self._data_state, None
        if state is None and continues:
            state = self._streams.data_state(*self.position)
        until = self.epoch + self._count_epochs(epochs, until_epoch)
        opened_end, unheard = None, 0
        while True:
            end = find_data_end(self._ends[self.phase :], self.epoch, until)
            if end != opened_end:
                self._streams.open_feed(
                    loader, adapt, first_epoch=self.epoch, epochs=end, skip=self.epoch_batches, state=state
                )
                opened_end, state = end, None
            self._segment = self._streams.train(self._ends[self.phase].until)
            while self.ready or self._advance():
                done = self.ready.popleft()
                self._workers_here.activity.loop_minibatches = done.number + 1
                yield done
                if self.should_stop and not self._streams.stop(StopReason.STOP):
                    unheard += 1
                    if unheard == _LATE:
                        warnings.warn(_STOP_UNHEARD, stacklevel=3)
            is_stopped = self.stop_reason is StopReason.STOP
            is_last = self.stop_reason is StopReason.DATA and end == until
            if is_stopped or is_last or self.stop_reason is StopReason.INTERRUPT:
                break
            is_stopped = self._workers_here.any_rank(self.should_stop)  # set in the phase's last minibatch
            if is_stopped:
                break
            if self.stop_reason is StopReason.DRAIN:
                self._streams.resume()
        if 1 < unheard < _LATE and is_last and not is_stopped:
            warnings.warn(_STOP_UNHEARD, stacklevel=3)
        self._segment = None
        self.is_running = False
        self.should_stop |= is_stopped
        self.has_stopped = is_stopped and self.epoch < until
        if self.stop_reason is StopReason.INTERRUPT:
            self._streams.interrupts.is_interrupted = True  # also on ranks that got no signal
            self.raise_interrupt()

    def raise_interrupt(self) -> None:
        """Raises an interrupt that came outside of training; during training the stream ends first."""
        if self._streams.interrupts.is_interrupted and not self.is_running:
            self._streams.clear_interrupt()
            self.is_interrupted = True
            raise self._streams.interrupts.make_error()

    def _advance(self) -> bool:
        """Takes the next result, if any; returns whether there was one."""
        if self._segment is None:
            return False
        for service in self._services:
            service.check()
        done = next(self._segment, None)
        if done is None:
            if self.number not in self.drains:
                self.drains.append(self.number)
            self._segment = None
            self.stop_reason = self._streams.stop_reason
            self._enter(find_next_phase(self._ends, self.phase, self.number, self.epoch))
            return False
        self.number = done.number + 1
        self.epoch = done.epoch + 1 if done.ends_epoch else done.epoch
        self.epoch_batches = 0 if done.ends_epoch else self.epoch_batches + 1
        self.ready.append(done)
        self._on_done(done)
        return True

    def enter_phase_at(self, minibatches: int, epochs: int) -> None:
        """Begins the phase at a position, at a drain."""
        self._enter(find_phase(self._ends, minibatches, epochs))

    def _enter(self, phase: int) -> None:
        if phase != self.phase:
            self._workers_here.begin_phase(phase)
        self.phase = phase
        self._on_phase(phase)

    def drain(self) -> None:
        """Finishes the minibatches in flight, and switches to the weights that are evaluated."""
        self._end_stream()
        self._workers_here.switch_optimizers("eval")

    def _end_stream(self) -> None:
        if self._segment is not None:
            self._streams.stop()
            while self._advance():
                pass

    def finish(self) -> None:
        """Ends a stream that its loop has left."""
        self._end_stream()
        self.ready.clear()
        self.is_running = False

    def abandon(self) -> None:
        """Drops the stream, with the data that it holds, after a failure."""
        self._segment = None

    def seek(self, epoch: int, batches: int) -> None:
        """Continues at another position in the data, after a `finish`."""
        if (epoch, batches) != self.position:
            self.finish()
            self.epoch, self.epoch_batches, self._data_state = epoch, batches, None

    def save(self) -> Position:
        """Returns the position for a checkpoint."""
        data = self._data_state or self._streams.data_state(*self.position)  # nothing may have been read since a load
        return Position(self.number, *self.position, tuple(self.drains), data=data)

    def restore(self, manifest: Checkpoint) -> None:
        """Continues at the position of a checkpoint."""
        self.number = manifest.minibatches
        self.epoch = manifest.epoch
        self.epoch_batches = manifest.epoch_batches
        self.drains[:] = manifest.drains
        self._data_state = manifest.data
        self._is_resumed = True
