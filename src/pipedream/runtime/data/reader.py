"""Reads a loader's minibatches in order over the epochs, and returns to a saved position.

Which of an iterable's draws decide the order is unknown, so all of them use the order's random state (`rng.py`). It is
left alone only where nothing can be drawn: switching takes 150 us.

A loader may write the next batch into the memory of the last one, through torch, NumPy or another process. So a batch
is adapted and copied before the loader runs again; copying 38 MB takes up to 50 ms.
"""

import copy
import warnings
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from types import ModuleType
from typing import Any, NamedTuple, Self

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, IterableDataset, IterDataPipe

from pipedream.core.errors import PipelineError, WorkerError
from pipedream.core.extensions import list_offers
from pipedream.runtime.comm.channel import Receiver
from pipedream.runtime.comm.message import ENDS_EPOCH, Content, Message, StopReason
from pipedream.runtime.comm.values import map_tensors, tensors_in
from pipedream.runtime.data.epochs import count_above, follow_epoch, set_epoch
from pipedream.runtime.data.rng import DataOrder, from_json, to_json

_KEPT_STATES = 3
_SAMPLERS = ("sampler", "batch_sampler", "base_sampler")
_SHARES = ("num_replicas", "num_processes", "world_size")
_END = object()
_OF_STORED: tuple[type, ...] = (type(iter([])), type(iter(())))


class Minibatch(NamedTuple):
    """One minibatch of a loader.

    Attributes:
        number: among those of all replicas.
        indices_crc32: checksum of its indices; 0 if they are not compared.
    """

    number: int
    epoch: int
    batch: Any
    ends_epoch: bool
    indices_crc32: int = 0


@dataclass(frozen=True)
class EpochRange:
    """Epochs first <= epoch < end, without what was read of the first in `skip` minibatches."""

    first: int = 0
    end: int = 1
    skip: int = 0


class Mark(NamedTuple):
    """A place in an epoch: batches and samples before it, and a checksum of their indices, or 0."""

    batches: int = 0
    samples: int = 0
    indices_crc32: int = 0


class Reader(ABC):
    """One worker's minibatches. `begin` starts a stream, which counts them from the last drain.

    Attributes:
        count: minibatches of all replicas, known at the loader's end.
        stopped: why the stream ends before its next round.
        ended_at: the stream's length, once it has ended.
    """

    count: int | None = None
    stopped: StopReason | None = None
    ended_at: int = 0
    _base: int = 0
    _cycle: int = 1
    _until: int | None = None
    _last: int = -1

    def begin(self, cycle: int = 1, until: int | None = None) -> None:
        """Gets ready for a stream.

        Args:
            cycle: drains come after a multiple of this number of minibatches, so that no stage's round is broken.
            until: minibatches before a drain, rounded up to whole cycles; None for all data.
        """
        self._cycle = cycle
        self._until = None if until is None else -(-until // cycle) * cycle

    def read(self, number: int, replica: int = 0) -> Minibatch | StopReason:
        """Returns minibatch `number` of the stream, or why the stream has ended; numbers must increase."""
        if self._until is not None and number >= self._until:
            self.stop(StopReason.DRAIN)
        if self.stopped is not None and number % self._cycle == replica % self._cycle:
            # All replicas stop before the same round, unless the data ended in the one before.
            until = number - number % self._cycle
            last = self._base + until - 1
            if not until or (self.has_minibatch(last) if self.count is None else last < self.count):
                self.ended_at = until
                return self.stopped
        if self.count is None:
            for minibatch in self:
                if minibatch.number == self._base + number:
                    return minibatch
        assert self.count is not None, "the loader failed before"
        self.ended_at = self.count - self._base
        return StopReason.DATA

    def stop(self, stop_reason: StopReason) -> None:
        if self.stopped is None or stop_reason is StopReason.INTERRUPT:
            self.stopped = stop_reason

    def resume(self) -> None:
        """Makes the next minibatch number 0 again."""
        self._base += self.ended_at
        self.stopped = None

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Minibatch:
        minibatch = self._next()
        self._last = minibatch.number
        return minibatch

    @abstractmethod
    def _next(self) -> Minibatch:
        """Raises StopIteration and sets `count` at the end."""

    def has_minibatch(self, number: int) -> bool:
        """Returns whether a minibatch before the worker's next one exists, without loading more."""
        while self._last < number:
            if next(self, None) is None:
                return False
        return True


class LoaderReader(Reader):
    """Reads a user's loader, from the start or from a `state`.

    Attributes:
        adapt: called once with each batch, before the loader makes the next one.
        begun: the last epoch that was begun.
    """

    begun = -1
    adapt: Callable[[Any], Any] = staticmethod(lambda batch: batch)
    _minibatches: Generator[Minibatch, None, None]
    _peeked: Minibatch | None = None
    _adapts_late = True  # once a batch is no longer the next one
    _is_fixed = False  # a batch has memory that is not written later

    def __init__(self, loader: Any, order: DataOrder, epochs: EpochRange, state: Mapping[str, Any] | None) -> None:
        _check_samplers(loader)
        self._loader = loader
        self._order = order
        self._epochs = epochs
        self._initial_state = state
        self._first_epoch = epochs.first
        follow_epoch(loader, epochs.first, epochs.skip, (state or {}).get("above", 0))
        if state:
            order.restore(state["order"], loader)
            self._first_epoch = min(state["epoch"], epochs.first)
        mark = Mark(*(state or {}).get("mark", ()))
        self._resumed_at = mark if mark.batches == epochs.skip else None  # earlier versions have saved none
        self._epoch_states: dict[int, dict[str, Any]] = {}
        self._marks: dict[int, deque[Mark]] = {}  # of each epoch, before and after its minibatches
        self.save_epoch_state(self._first_epoch)

    def _next(self) -> Minibatch:
        minibatch, self._peeked = self._peeked, None
        minibatch = minibatch or next(self._minibatches)
        return minibatch._replace(batch=self._adapt(minibatch.batch)) if self._adapts_late else minibatch

    def peek(self) -> Minibatch | None:
        """Returns the next minibatch, perhaps not adapted yet, which stays the next one; None at the end."""
        if self._peeked is None:
            self._peeked = next(self._minibatches, None)
        return self._peeked

    def close(self) -> None:
        """Ends the processes that load ahead."""
        self._minibatches.close()

    def state(self, epoch: int, batches: int) -> dict[str, Any]:
        """Returns what is needed to continue after `batches` minibatches of an epoch, as JSON values.

        It has the order at the start of that epoch or an earlier one; later minibatches are drawn again.
        """
        if self._initial_state and (epoch, batches) == (self._epochs.first, self._epochs.skip):
            return dict(self._initial_state)
        before = [start for start in self._epoch_states if start <= epoch]
        if not before:
            raise PipelineError(
                f"the data's state was requested at epoch {epoch}, minibatch {batches}, but the loader is being read "
                f"at epoch {max(self._epoch_states)}; ask for the position at a drain"
            )
        mark = self._marks[epoch][batches - self._marks[epoch][0].batches] if batches else Mark()
        return self._epoch_states[max(before)] | {"mark": list(mark)}

    def _adapt(self, batch: Any) -> Any:
        """Returns a batch adapted, in memory that is not written later."""
        fixed = {id(tensor): tensor for tensor in tensors_in(batch)} if self._is_fixed else {}
        return map_tensors(self.adapt(batch), _copy_tensor, replaced=fixed)

    def _begin_epoch(self, epoch: int) -> None:
        self.begun = epoch
        set_epoch(self._loader, epoch)
        self.save_epoch_state(epoch)

    def save_epoch_state(self, epoch: int) -> None:
        """Keeps the order at the start of an epoch."""
        self._epoch_states[epoch] = {"epoch": epoch, "order": self._order.snapshot(self._loader)}
        if above := count_above(self._loader):
            self._epoch_states[epoch]["above"] = above
        for by_epoch in (self._epoch_states, self._marks):
            while len(by_epoch) > 2:
                del by_epoch[min(by_epoch)]

    def is_before(self, epoch: int, mark: Mark) -> bool:
        """Returns whether the minibatch after a place was trained before."""
        if epoch != self._epochs.first or self._resumed_at is None:
            return (epoch, mark.batches) < (self._epochs.first, self._epochs.skip)
        return mark.samples < self._resumed_at.samples

    def begin_at(self, epoch: int, mark: Mark) -> deque[Mark]:
        """Begins an epoch after what was trained before. Warns, or raises a WorkerError, if that were other samples."""
        resumed_at = (self._resumed_at if epoch == self._epochs.first else None) or mark
        if mark.samples != resumed_at.samples:
            raise WorkerError(
                0,
                f"the loader, epoch {epoch}",
                f"{resumed_at.samples} samples of it were trained before, but now its batches end after {mark.samples}",
                f"give batches that add up to {resumed_at.samples}, or resume from a checkpoint at an epoch's end",
            )
        if mark.indices_crc32 != resumed_at.indices_crc32 and mark.indices_crc32 and resumed_at.indices_crc32:
            text = f"epoch {epoch} now begins with other samples than were trained, so some come twice and others never"
            advice = "give the same data set and sampler, or resume from a checkpoint at an epoch's end"
            warnings.warn(f"{text}; {advice}", stacklevel=2)
        self._marks[epoch] = deque([mark._replace(batches=resumed_at.batches)], 10_000)  # more than are read ahead
        return self._marks[epoch]


class IterableReader(LoaderReader):
    """Reads any iterable, one minibatch ahead to know which one ends the epoch.

    It returns to a position by loading and discarding minibatches, or by a loader's ``load_state_dict``.
    """

    count_samples: Callable[[Any, bool], int] = staticmethod(lambda batch, is_adapted: 1)

    def __init__(self, loader: Any, order: DataOrder, epochs: EpochRange, state: Mapping[str, Any] | None) -> None:
        super().__init__(loader, order, epochs, state)
        self._stateful = hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict")
        self._loader_states: dict[tuple[int, int], tuple[Any, dict[str, Any]]] = {}
        self._minibatches = self._read()
        self._iterator: Any = None

    def close(self) -> None:
        super().close()
        self._close_iterator()

    def state(self, epoch: int, batches: int) -> dict[str, Any]:
        state = super().state(epoch, batches)
        if (epoch, batches) in self._loader_states:
            loader_state, order = self._loader_states[epoch, batches]
            state["loader"] = {"epoch": epoch, "batches": batches, "state": to_json(loader_state), "order": order}
            state["loader"]["batch_size"] = getattr(self._loader, "batch_size", None)
        return state

    def _close_iterator(self) -> None:
        if not getattr(self._loader, "persistent_workers", False):
            shut_down_workers(self._iterator)
        self._iterator = None

    def _save_loader_state(self, epoch: int, batches: int) -> None:
        if self._stateful:
            state = copy.deepcopy(self._loader.state_dict())
            self._loader_states[epoch, batches] = (state, self._order.snapshot(self._loader))
            while len(self._loader_states) > _KEPT_STATES:
                del self._loader_states[next(iter(self._loader_states))]

    def _load_batch(self) -> Any:
        if self._is_fixed:
            return next(self._iterator, _END)
        with self._order.drawing():
            batch = next(self._iterator, _END)
            return batch if batch is _END else self._adapt(batch)

    def _start_epoch(self) -> None:
        with self._order.drawing():
            self._iterator = iter(self._loader)
        self._is_fixed = type(self._iterator) in _OF_STORED or _reads_in_processes(self._loader)  # and nothing draws
        self._adapts_late = self._is_fixed

    def _read(self) -> Generator[Minibatch, None, None]:
        if dist.is_initialized() and isinstance(getattr(self._loader, "dataset", None), IterDataPipe):
            raise WorkerError(
                0, "the loader", "an IterDataPipe distributes itself over all processes", "give an IterableDataset"
            )
        number = 0
        for epoch in range(self._first_epoch, self._epochs.end):
            self._begin_epoch(epoch)
            restored = self._restore_loader(epoch)
            if restored is None:
                self._start_epoch()
            batch = self._load_batch()
            if batch is _END and restored == 0:
                self._start_epoch()  # for loaders that do nothing before their first batch
                batch = self._load_batch()
            if batch is _END and not restored:
                raise empty_epoch_error(epoch)
            mark, marks = (restored and self._resumed_at) or Mark(restored or 0), deque[Mark]()
            while batch is not _END:
                if not (is_done := self.is_before(epoch, mark)) and not marks:
                    mark = (marks := self.begin_at(epoch, mark))[0]
                mark = Mark(mark.batches + 1, mark.samples + self.count_samples(batch, not self._is_fixed))
                if not is_done:
                    marks.append(mark)
                    self._save_loader_state(epoch, mark.batches)
                following = self._load_batch()
                if following is _END:
                    self.save_epoch_state(epoch + 1)
                    self._save_loader_state(epoch + 1, 0)
                if not is_done:
                    yield Minibatch(number, epoch, batch, following is _END)
                    number += 1
                batch = following
            if not marks:
                self.begin_at(epoch, mark)
        self.count = number

    def _restore_loader(self, epoch: int) -> int | None:
        """Returns the minibatches before the loader's own state; None if it has none."""
        loader_state = (self._initial_state or {}).get("loader")
        position, batch_size = (self._epochs.first, self._epochs.skip), getattr(self._loader, "batch_size", None)
        if (
            not self._stateful
            or loader_state is None
            or epoch != position[0]
            or (loader_state["epoch"], loader_state["batches"]) != position
            or (position[1] and loader_state.get("batch_size", batch_size) != batch_size)  # it may count batches
        ):
            return None
        self._loader.load_state_dict(from_json(loader_state["state"]))
        self._start_epoch()
        self._order.restore(loader_state["order"], self._loader)
        if not loader_state["batches"]:
            # An iterator that continues from the state at an epoch's end ends at once, and may have drawn for
            # the next epoch.
            self._close_iterator()
            self._start_epoch()
        return int(loader_state["batches"])


def _copy_tensor(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.grad_fn is not None:
        return tensor  # it is refused later
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


def _reads_in_processes(loader: Any) -> bool:
    """Returns whether the user's code for the next minibatch runs in other processes; it has no sampler."""
    return type(loader) is DataLoader and loader.num_workers > 0 and isinstance(loader.dataset, IterableDataset)


class _TeeReader(Reader):
    """Like itertools.tee, which would keep up to 57 minibatches that all readers have read."""

    def __init__(self, source: LoaderReader, queues: Sequence[deque[Minibatch]], queue: deque[Minibatch]) -> None:
        self._source = source
        self._queues = queues
        self._queue = queue

    def _next(self) -> Minibatch:
        if not self._queue:
            try:
                minibatch = next(self._source)
            except StopIteration:
                self.count = self._source.count
                raise
            for queue in self._queues:
                queue.append(minibatch)
        return self._queue.popleft()


class FollowingReader(Reader):
    """Reads the same minibatches as replica 0, whose notices alone say where a stream ends.

    At a request to drain, replicas are at different microbatches, so none could decide alone.
    """

    def __init__(self, reader: LoaderReader, receiver: Receiver, rank: int) -> None:
        self._reader = reader
        self._receiver = receiver
        self._rank = rank

    def _next(self) -> Minibatch:
        return next(self._reader)

    def read(self, number: int, replica: int = 0) -> Minibatch | StopReason:
        minibatch = self._reader.peek()  # loaded while replica 0 loads it; at a drain it is kept
        notice = self._receiver.receive().result()
        if notice.content is Content.END:
            self.ended_at = notice.microbatch
            return StopReason(notice.flags)
        if minibatch is None or make_notice(number, minibatch) != notice:
            raise WorkerError(
                self._rank,
                f"the loader, epoch {notice.epoch}",
                f"minibatch {number} of this stream has other samples here than at replica 0 of the input stage",
                "let its sampler draw from torch's generator or one of its own, and change it on all ranks alike",
            )
        return next(self)


def make_notice(number: int, minibatch: Minibatch) -> Message:
    """Returns the message by which replica 0 lets others read minibatch `number` of the stream."""
    return Message(
        number,
        Content.EMPTY,
        minibatch=minibatch.number,
        epoch=minibatch.epoch,
        flags=ENDS_EPOCH if minibatch.ends_epoch else 0,
        numbers=(float(minibatch.indices_crc32),),
    )


def tee(reader: LoaderReader, readers: int) -> Sequence[Reader]:
    """Returns readers that each see every minibatch."""
    if readers == 1:
        return [reader]
    queues: list[deque[Minibatch]] = [deque() for _ in range(readers)]
    return [_TeeReader(reader, queues, queue) for queue in queues]


def _check_samplers(loader: Any) -> None:
    """Raises WorkerError if a sampler, or a data set of Hugging Face, leaves samples to other processes."""
    parts, visited = [loader], list[Any]()
    while parts:
        part = parts.pop()
        if part is None or any(part is other for other in visited):
            continue
        visited.append(part)
        parts += [getattr(part, name, None) for name in _SAMPLERS]
    for part in [*visited[1:], getattr(getattr(loader, "dataset", None), "_distributed", None)]:
        shares = [getattr(part, name, None) for name in _SHARES]
        count = next((count for count in shares if isinstance(count, int) and count > 1), None)
        if count is not None:
            raise WorkerError(
                0,
                "the loader",
                f"its {type(part).__name__} gives each of {count} processes only a part of the samples, but the "
                "workers of a pipeline train on the same minibatches, and replicas divide them among themselves",
                "give a loader without it, such as DataLoader(dataset, shuffle=True)",
            )


def find_sharding(loader: Any) -> ModuleType | None:
    """Returns the extension by which each replica loads only its own minibatches of a loader; None if there is none."""
    return next((offer for offer in list_offers("sharded_reader") if offer.can_be_sharded(loader)), None)


def empty_epoch_error(epoch: int) -> WorkerError:
    """Returns the error for an epoch without minibatches."""
    return WorkerError(
        0,
        f"the loader, epoch {epoch}",
        "it yielded nothing",
        "give a loader that can be iterated once per epoch; a generator can be iterated only once",
    )


def shut_down_workers(iterator: Any) -> None:
    """Ends the worker processes of a DataLoader's iterator; may be called twice."""
    shut_down = getattr(iterator, "_shutdown_workers", None)
    if shut_down is not None:
        with suppress(AttributeError):  # raised by torch if the iterator was never completed
            shut_down()
