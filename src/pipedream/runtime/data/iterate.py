"""Reading a loader: its minibatches one after the other over the epochs, and the way back to a position.

This file reads what can only be iterated. Its draws, the data's own among them, are made in the order's state
(`order.py`), for it cannot be told which of them decide the order. A map-style DataLoader is read by `dealing.py`.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Self

import torch.distributed as dist
from torch.utils.data import IterDataPipe

from pipedream.core.errors import PipelineError, WorkerError
from pipedream.runtime.data.jsonable import from_json, to_json
from pipedream.runtime.data.order import DataOrder

__all__ = ["Extent", "Given", "Marked", "Reading", "WholeReading", "announce", "nothing_found", "share", "shut"]

_KEPT = 3
_END = object()


@dataclass(frozen=True)
class Given:
    """One minibatch of a loader.

    Attributes:
        number: since the reading began.
        epoch: from 0.
        batch: as the loader gave it.
        ends_epoch: it is the epoch's last one.
    """

    number: int
    epoch: int
    batch: Any
    ends_epoch: bool


@dataclass(frozen=True)
class Extent:
    """What of a loader is read: the epochs first_epoch <= epoch < epochs, without `skip` minibatches of the first."""

    first_epoch: int = 0
    epochs: int = 1
    skip: int = 0


class Reading(ABC):
    """Abstract: an iterator of `Given`, at its end one number, the count of minibatches."""

    def __iter__(self) -> Self:
        return self

    @abstractmethod
    def __next__(self) -> Given | int:
        """Returns the next minibatch that is for this reader, at the end the count of all."""

    @abstractmethod
    def exists(self, number: int) -> bool:
        """Tells whether there is a minibatch `number`, which is before the next one for this reader; loads nothing
        that is not needed anyway."""

    def close(self) -> None:
        """Ends the processes that load ahead."""
        return


class Marked(Reading):
    """Abstract: a reading that knows the way back to where it is.

    Args:
        loader: of the user.
        order: whose draws decide.
        extent: what is read.
        state: of `state`, to go on from; None to begin.
    """

    def __init__(self, loader: Any, order: DataOrder, extent: Extent, state: Mapping[str, Any] | None) -> None:
        self._loader, self._order, self._extent, self._from = loader, order, extent, state
        self._begin = extent.first_epoch
        if state:
            order.restore(state["order"], loader)
            self._begin = min(state["epoch"], extent.first_epoch)
        self._marks: dict[int, dict[str, Any]] = {}
        self._note(self._begin)

    def _note(self, epoch: int) -> None:
        """Keeps the state at the start of an epoch, of the last two."""
        self._marks[epoch] = {"epoch": epoch, "order": self._order.snapshot(self._loader)}
        while len(self._marks) > 2:
            del self._marks[min(self._marks)]

    def state(self, epoch: int, batches: int) -> dict[str, Any]:
        """Returns, as JSON has it, what is needed to go on after so many minibatches of an epoch.

        The order stands in it as it was at the start of that epoch, or of an earlier one: the minibatches up to
        the position are drawn again and left out.

        Raises:
            PipelineError: the reading is not at this position.
        """
        if self._from and (epoch, batches) == (self._extent.first_epoch, self._extent.skip):
            return dict(self._from)
        before = [known for known in self._marks if known <= epoch]
        if not before:
            raise PipelineError(
                f"the data's state was asked for at epoch {epoch}, minibatch {batches}, but the reading is at epoch "
                f"{max(self._marks)}; ask for the position at a drain"
            )
        return dict(self._marks[max(before)])


def announce(loader: Any, epoch: int) -> None:
    """Tells an epoch to those of loader, sampler and batch sampler that have ``set_epoch``."""
    batch_sampler = getattr(loader, "batch_sampler", None)
    parts: list[Any] = [
        getattr(loader, "sampler", None),
        getattr(batch_sampler, "sampler", None),
        batch_sampler,
        loader,
    ]
    for part in {id(part): part for part in parts}.values():
        if hasattr(part, "set_epoch"):
            part.set_epoch(epoch)


def nothing_found(epoch: int) -> WorkerError:
    """Returns the error for an epoch without minibatches."""
    return WorkerError(
        0,
        f"the loader, epoch {epoch}",
        "it yielded nothing",
        "give a loader that can be iterated once an epoch; a generator can be iterated only once",
    )


def shut(iterator: Any) -> None:
    """Ends the worker processes of a DataLoader's iterator, if it has any; twice does no harm."""
    end = getattr(iterator, "_shutdown_workers", None)
    if end is not None:
        with suppress(AttributeError):  # torch's own, where the iterator was not even made
            end()


class WholeReading(Marked):
    """Reads any iterable; one minibatch ahead within an epoch, to know which one ends it.

    A position is found again by iterating and throwing away, which loads what is thrown away. A loader with
    ``state_dict`` and ``load_state_dict`` is asked for its state before each read instead, so that its state as of
    any count of minibatches given out is known although one was read ahead.
    """

    def __init__(self, loader: Any, order: DataOrder, extent: Extent, state: Mapping[str, Any] | None) -> None:
        super().__init__(loader, order, extent, state)
        self._stateful = hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict")
        self._kept: dict[tuple[int, int], tuple[Any, dict[str, Any]]] = {}
        self._items = self._run()
        self._iterator: Any = None

    def __next__(self) -> Given | int:
        return next(self._items)

    def exists(self, number: int) -> bool:
        raise NotImplementedError("read through `share`")

    def close(self) -> None:
        self._items.close()
        self._shut()

    def _shut(self) -> None:
        if not getattr(self._loader, "persistent_workers", False):
            shut(self._iterator)
        self._iterator = None

    def state(self, epoch: int, batches: int) -> dict[str, Any]:
        found = super().state(epoch, batches)
        if (epoch, batches) in self._kept:
            state, order = self._kept[epoch, batches]
            found["loader"] = {"epoch": epoch, "batches": batches, "state": to_json(state), "order": order}
        return found

    def _keep(self, epoch: int, batches: int) -> None:
        if self._stateful:
            state = copy.deepcopy(self._loader.state_dict())
            self._kept[epoch, batches] = (state, self._order.snapshot(self._loader))
            while len(self._kept) > _KEPT:
                del self._kept[next(iter(self._kept))]

    def _next(self) -> Any:
        with self._order.drawing():
            return next(self._iterator, _END)

    def _start(self) -> None:
        with self._order.drawing():
            self._iterator = iter(self._loader)

    def _run(self) -> Generator[Given | int, None, None]:
        if dist.is_initialized() and isinstance(getattr(self._loader, "dataset", None), IterDataPipe):
            raise WorkerError(
                0, "the loader", "an IterDataPipe shares itself out over all processes", "give an IterableDataset"
            )
        number, skip = 0, self._extent.skip
        for epoch in range(self._begin, self._extent.epochs):
            announce(self._loader, epoch)
            self._note(epoch)
            count = self._resume(epoch)
            resumed = count is not None
            if count is None:
                count = 0
                self._start()
            ahead = self._next()
            if ahead is _END and resumed and count == 0:
                self._start()  # as in `_resume`, where nothing happens before the first minibatch is asked for
                ahead = self._next()
            if ahead is _END and count == 0:
                raise nothing_found(epoch)
            while ahead is not _END:
                count += 1
                self._keep(epoch, count)
                behind = self._next()
                if behind is _END:
                    self._note(epoch + 1)
                    self._keep(epoch + 1, 0)
                if epoch > self._extent.first_epoch or (epoch == self._extent.first_epoch and count > skip):
                    yield Given(number, epoch, ahead, behind is _END)
                    number += 1
                ahead = behind
        yield number

    def _resume(self, epoch: int) -> int | None:
        """Lets a loader go on from its own state; returns the minibatches behind it, None where it cannot."""
        own = (self._from or {}).get("loader")
        here = (self._extent.first_epoch, self._extent.skip)
        if not self._stateful or own is None or epoch != here[0] or (own["epoch"], own["batches"]) != here:
            return None
        self._loader.load_state_dict(from_json(own["state"]))
        self._start()
        self._order.restore(own["order"], self._loader)
        if not own["batches"]:
            # The state of an epoch's end: what goes on from it ends at once, and may have drawn for the next epoch.
            self._shut()
            self._start()
        return int(own["batches"])


class _Cursor(Reading):
    """One of several readers of one reading; each minibatch is loaded once."""

    def __init__(self, items: Iterator[Given | int], source: Reading) -> None:
        self._items = items
        self._source = source
        self._last = -1
        self._count: int | None = None

    def __next__(self) -> Given | int:
        if self._count is not None:
            return self._count  # `exists` came to the end
        found = next(self._items)
        if isinstance(found, int):
            self._count = found
        else:
            self._last = found.number
        return found

    def exists(self, number: int) -> bool:
        while self._last < number and self._count is None:
            next(self)  # another reader's
        return self._last >= number

    def close(self) -> None:
        self._source.close()


def share(reading: Reading, readers: int) -> list[Reading]:
    """Returns one reading for each of several readers, of which each sees every minibatch."""
    waiting: list[deque[Given | int]] = [deque() for _ in range(readers)]
    return [_Cursor(_shared(reading, waiting, own), reading) for own in waiting]


def _shared(
    source: Iterator[Given | int], waiting: Sequence[deque[Given | int]], own: deque[Given | int]
) -> Iterator[Given | int]:
    """Yields what a reader has not had yet. Not itertools.tee: that keeps up to 57 minibatches that all have had."""
    while True:
        if not own:
            try:
                found = next(source)
            except StopIteration:
                return
            for other in waiting:
                other.append(found)
            del found
        yield own.popleft()
