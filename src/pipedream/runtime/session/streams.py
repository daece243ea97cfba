"""Runs a session's workers: data in, results out."""

from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from pipedream.core.errors import ArtifactError, DeadlockError, PipelineError, WorkerError
from pipedream.core.user_code import with_place
from pipedream.runtime.activity import Interrupts
from pipedream.runtime.comm.channel import LocalChannel, Pending, Receiver, Sender, drain
from pipedream.runtime.comm.message import StopReason
from pipedream.runtime.data.reader import EpochRange
from pipedream.runtime.data.source import Source
from pipedream.runtime.data.splitter import AdaptBatch
from pipedream.runtime.results import Done, Output
from pipedream.runtime.session.local_workers import LocalWorkers
from pipedream.runtime.session.service import SessionService
from pipedream.runtime.stage.stage_module import evaluating
from pipedream.runtime.worker import abandon

LOOP = "the training loop"


class Streams:
    """The streams of minibatches of one process: training, evaluations, predictions.

    Life of a training stream: `open_feed`, then `train` until its end; after a drain, `resume` and `train` again.
    Every rank makes the same calls.
    """

    def __init__(self, workers_here: LocalWorkers, services: Sequence[SessionService]) -> None:
        self.interrupts = Interrupts(patient=workers_here.distributed)
        self._workers_here = workers_here
        self._services = services
        self._sources: dict[int, Source] = {}
        self._raised_interrupts = 0
        for worker in workers_here.workers:
            worker.stop_requested = self._is_stop_requested
        workers_here.activity.interrupts = self.interrupts
        workers_here.activity.doing = LOOP

    @property
    def stop_reason(self) -> StopReason:
        """Why the last stream ended."""
        return self._workers_here.lead.stop_reason

    def open_feed(
        self,
        loader: Any,
        adapt: AdaptBatch,
        *,
        first_epoch: int = 0,
        epochs: int = 1,
        skip: int = 0,
        state: Mapping[str, Any] | None = None,
    ) -> None:
        """Prepares to read a loader for training.

        A map-style DataLoader continues at a position without loading earlier batches, a loader with a state_dict by
        that; other iterables are iterated up to the position.

        Args:
            adapt: batch -> (inputs, targets).
            first_epoch, epochs: reads first_epoch <= epoch < epochs.
            skip: finished minibatches of the first epoch.
            state: from `data_state` for this position; None keeps the data's order.
        """
        workers_here = self._workers_here
        settings = {"epochs": f"{first_epoch} to {epochs}", "finished minibatches of the epoch": str(skip)}
        data = {"the training data": loader} if workers_here.data.uses_loader else {}
        workers_here.await_same_call(settings | data)
        try:
            self._sources = workers_here.data.open_training(loader, adapt, EpochRange(first_epoch, epochs, skip), state)
        except PipelineError as error:
            raise workers_here.report(error) from error.__cause__
        except Exception as error:
            if state is None:
                raise
            text = f"the data cannot continue from the saved position: {type(error).__name__}: {error}"
            raise workers_here.report(
                ArtifactError(f"{text}; give the loader that was saved, or another checkpoint")
            ) from error

    def data_state(self, epoch: int, batches: int) -> dict[str, Any]:
        """Returns, as JSON, what `open_feed` needs to continue after `batches` minibatches of an epoch.

        Called at a drain; the result of the input stage's first rank counts.
        """
        with self._workers_here.reporting():
            return self._workers_here.data.state(epoch, batches)

    def train(self, until: int | None = None) -> Iterator[Done]:
        """Trains until the data ends, `stop`, or a total of `until` minibatches; see `Worker.train`."""
        workers_here = self._workers_here
        workers_here.switch_optimizers("train")
        for service in self._services:
            service.begin_stream(self._sources)
        for done in self._run([worker.train(self._sources.get(worker.rank), until) for worker in workers_here.workers]):
            with workers_here.reporting():
                for service in self._services:
                    service.take_result(done)
            yield done
        with workers_here.reporting():
            for service in self._services:
                service.end_stream()

    def stop(self, stop_reason: StopReason = StopReason.DRAIN) -> bool:
        """Ends the stream after the minibatches in flight; does nothing at ranks that do not read the data.

        Returns whether this rank reads it.
        """
        for source in self._sources.values():
            source.stop(stop_reason)
        return bool(self._sources)

    def resume(self) -> None:
        for source in self._sources.values():
            source.resume()

    def close(self, failed: bool) -> None:
        self.interrupts.stop()
        self._workers_here.data.close()
        self._sources = {}
        for worker in self._workers_here.workers if failed else ():
            abandon(worker, wait=not self._workers_here.distributed)  # elsewhere a GPU may wait for another rank

    def evaluate(self, loader: Iterable[Any], adapt: AdaptBatch, ema: bool = False) -> Done:
        """Returns the means over a loader, equal on every rank."""
        with self._evaluate(loader, adapt) as sources:
            streams = [worker.evaluate(sources.get(worker.rank), ema) for worker in self._workers_here.workers]
            return [event for event in self._run(streams) if isinstance(event, Done)][-1]

    def predict(self, loader: Iterable[Any], adapt: AdaptBatch, ema: bool = False) -> Iterator[Output]:
        """Yields the outputs, at rank 0 only."""
        with self._evaluate(loader, adapt) as sources:
            streams = [worker.predict(sources.get(worker.rank), ema) for worker in self._workers_here.workers]
            for output in self._run(streams, lead=0):
                if self._workers_here.rank == 0:
                    yield output

    @contextmanager
    def _evaluate(self, loader: Any, adapt: AdaptBatch) -> Iterator[dict[int, Source]]:
        """Context in evaluation mode, with an open loader."""
        workers_here = self._workers_here
        try:
            with workers_here.reporting():
                sources = workers_here.data.open_evaluation(loader, adapt)
            passes = [passes for worker in workers_here.workers for passes in worker.stage_passes.values()]
            with evaluating(stage_passes.module for stage_passes in passes):
                yield sources
        finally:
            workers_here.data.close_evaluation()
            for end in self._list_channel_ends():
                if isinstance(end, LocalChannel):  # messages may be left after an error or an early end
                    end.clear()

    def _run(self, streams: Sequence[Generator[Any, None, None]], lead: int | None = None) -> Iterator[Any]:
        """Yields the results of the worker `lead`, by default of the first one that reads data."""
        workers_here = self._workers_here
        events: Iterator[Any] = streams[0]
        if len(streams) > 1:
            events = run_in_process(streams, workers_here.program.placement.readers if lead is None else (lead,))
        workers_here.activity.doing = None
        try:
            for event in events:
                workers_here.activity.doing = LOOP
                yield event
                workers_here.activity.doing = None
            drain(self._list_channel_ends())  # leaves no message and no posted receive
        except PipelineError as error:
            raise workers_here.report(error) from error.__cause__
        except GeneratorExit:
            raise
        except BaseException as error:  # e.g. of the user's loader
            if isinstance(error, KeyboardInterrupt) and not workers_here.distributed and self.interrupts.may_raise:
                raise
            raise workers_here.report(
                WorkerError(workers_here.rank, workers_here.lead.where, with_place(error))
            ) from error
        finally:
            workers_here.activity.doing = LOOP

    def _list_channel_ends(self) -> list[Sender | Receiver]:
        ends: list[Sender | Receiver] = list(self._workers_here.data.channels.all)
        for worker in self._workers_here.workers:
            ends += [*worker.senders.values(), *worker.results.senders.values()]
            ends += [*worker.receivers.values(), *worker.results.receivers.values()]
        return ends

    def _is_stop_requested(self) -> bool:
        # A signal may have been sent to one worker only, perhaps one that does not read the data.
        return self.interrupts.is_interrupted or self._workers_here.guard.interrupts > self._raised_interrupts

    def clear_interrupt(self) -> None:
        """Clears an interrupt that was raised, as the caller may still want to evaluate or save."""
        self.interrupts.is_interrupted = False
        self._raised_interrupts = self._workers_here.guard.interrupts


def run_in_process(workers: Sequence[Generator[Any, None, None]], input_ranks: Sequence[int]) -> Iterator[Any]:
    """Runs all workers of one process in turn in one thread, deterministically; yields the lead worker's results.

    Args:
        input_ranks: of the input stage, the lead first. After a result the others wait until the lead has yielded the
            same one, so that a drain reaches all at the same point.

    Raises:
        DeadlockError: no worker can continue. (The verifier excludes this.)
    """
    waiting: dict[int, Pending[Any] | None] = dict.fromkeys(range(len(workers)))
    lead, yielded = input_ranks[0], dict.fromkeys(input_ranks, 0)
    while waiting:
        has_progressed = False
        for number in list(waiting):
            pending = waiting[number]
            if (pending is not None and not pending.ready()) or yielded.get(number, 0) > yielded[lead]:
                continue
            has_progressed = True
            for event in workers[number]:
                if isinstance(event, Pending):
                    waiting[number] = event
                    if not event.ready():
                        break
                elif number in yielded:
                    yielded[number] += 1
                    if number == lead:
                        yield event
                    elif yielded[number] > yielded[lead]:
                        waiting[number] = None
                        break
            else:
                del waiting[number]
        if not has_progressed:
            raise DeadlockError(f"workers {sorted(waiting)} wait for each other")
