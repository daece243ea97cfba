"""Dealing out a map-style DataLoader: each replica of the input stage loads its own minibatches and no others.

Every replica runs the user's own batch sampler, in the same order state (`order.py`), and keeps the index lists
of its own minibatches; a DataLoader of its own over the same data set loads them. It looks ahead in the lists,
not in the data, so it is known without loading which minibatch ends the epoch and where the data ends, and a
position is found again by passing over lists. With one replica it is all of the data, read in the same way.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from pipedream.runtime.data.iterate import Extent, Given, Marked, announce, nothing_found, shut
from pipedream.runtime.data.order import DataOrder

__all__ = ["Dealer", "DealtReading", "can_be_dealt"]

_NOTHING = object()


def can_be_dealt(loader: Any) -> bool:
    """Tells whether a loader is a map-style DataLoader that is iterated as torch's own is."""
    return (
        isinstance(loader, DataLoader)
        and all(getattr(type(loader), n) is getattr(DataLoader, n) for n in ("__iter__", "_get_iterator"))
        and not isinstance(loader.dataset, IterableDataset)
        and not hasattr(loader, "load_state_dict")
    )


def _is_torchs(sampler: Any) -> bool:
    """Tells whether a sampler, and the one inside it, are torch's own, which draw from torch's generators only."""
    inner = getattr(sampler, "sampler", None)
    return type(sampler).__module__.startswith("torch.utils.data.") and (inner is None or _is_torchs(inner))


class Dealer:
    """One replica's own DataLoader beside the user's; kept for as long as the user's is read.

    Args:
        loader: the user's, which is never iterated.
        replica, replicas: whose minibatches are loaded: k of the stream where k mod replicas is replica.
    """

    def __init__(self, loader: DataLoader[Any], replica: int = 0, replicas: int = 1) -> None:
        self.loader = loader
        self.replica, self.replicas = replica, replicas
        self.seeded = False  # persistent workers draw one seed in their life
        self._sampler: Any = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
        self._only_torch = _is_torchs(self._sampler)
        self._hand = _Hand()
        self._seeds = torch.Generator()
        self._own: DataLoader[Any] | None = None

    def begin(self, order: DataOrder) -> tuple[Iterator[Any], torch.Tensor]:
        """Draws what torch's DataLoader draws at the start of an epoch, in its order.

        Returns: the index lists of the epoch; the generator state that the own DataLoader draws its workers' seed
            from. Replica 0 draws the same seed as the user's DataLoader would; the others have seeds of their own,
            or the augmentations of all replicas would be alike.
        """
        user = self.loader
        with order.drawing(self._only_torch):
            lists = iter(self._sampler)
            source: torch.Generator | None = user.generator
            state = torch.get_rng_state() if source is None else source.get_state()
            if not self.seeded:
                seed = int(torch.empty((), dtype=torch.int64).random_(generator=source))
                if self.replica:
                    state = torch.Generator().manual_seed(seed + self.replica).get_state()
                if user.num_workers:
                    lists = iter(self._sampler)  # so does torch: a sampler may draw here
                self.seeded = user.persistent_workers
        return lists, state

    def draw(self, lists: Iterator[Any], order: DataOrder) -> Any:
        """Returns the next index list, or `_NOTHING`."""
        with order.drawing(self._only_torch):
            found = next(lists, _NOTHING)
        return list(found) if isinstance(found, list) else found  # a sampler may use its list again

    def load(self, deal: _Deal, seeds: torch.Tensor) -> Iterator[Any]:
        """Yields the loaded minibatches of a deal's index lists."""
        self._seeds.set_state(seeds)
        self._hand.lists = deal
        if self._own is None:
            self._own = self._made()
        iterator = iter(self._own)
        try:
            yield from iterator
        finally:
            if not self.loader.persistent_workers:
                shut(iterator)

    def close(self) -> None:
        """Ends persistent workers."""
        if self._own is not None:
            shut(self._own._iterator)
            self._own = None

    def _made(self) -> DataLoader[Any]:
        user = self.loader
        options: dict[str, Any] = {
            name: getattr(user, name)
            for name in ("num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn", "prefetch_factor",
                         "persistent_workers", "multiprocessing_context")
        }  # fmt: skip
        if user.pin_memory_device:
            options["pin_memory_device"] = user.pin_memory_device
        if user.batch_sampler is None:  # no collation: a minibatch is what the data set gives for an index
            return DataLoader(user.dataset, batch_size=None, sampler=self._hand, generator=self._seeds, **options)
        return DataLoader(user.dataset, batch_sampler=self._hand, generator=self._seeds, **options)


class _Hand:
    """The sampler of an own DataLoader: gives the lists of one deal, however often they are asked for."""

    lists: _Deal

    def __iter__(self) -> Iterator[Any]:
        return self.lists


class _Deal:
    """One epoch's index lists; gives those of one replica, and knows the next of them before it gives one.

    Args:
        draw: returns the next list of all, or `_NOTHING`.
        skip: lists to leave out: they were trained on already.
        number: of the first list after those, in the stream.
        own: tells whether a number is the replica's.
        ended: called once, when the last list has been drawn.
    """

    def __init__(
        self,
        draw: Callable[[], Any],
        skip: int,
        number: int,
        own: Callable[[int], bool],
        ended: Callable[[], None],
    ) -> None:
        self._draw, self._skip, self._own, self._ended = draw, skip, own, ended
        self.number = number
        self.marks: deque[tuple[int, bool]] = deque()
        self.empty = True
        self._ahead = self._seek()

    @property
    def has_more(self) -> bool:
        """Tells whether a list of the replica is to come."""
        return self._ahead is not None

    def _seek(self) -> tuple[int, Any] | None:
        while (found := self._draw()) is not _NOTHING:
            self.empty = False
            if self._skip:
                self._skip -= 1
                continue
            number = self.number
            self.number += 1
            if self._own(number):
                return number, found
        self._ended()
        return None

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if self._ahead is None:
            raise StopIteration
        number, found = self._ahead
        self._ahead = self._seek()
        self.marks.append((number, self._ahead is None and self.number == number + 1))
        return found


class DealtReading(Marked):
    """Reads a replica's minibatches of a map-style DataLoader.

    Args:
        dealer: of the replica.
        order, extent, state: as in `Marked`.
    """

    def __init__(self, dealer: Dealer, order: DataOrder, extent: Extent, state: Mapping[str, Any] | None) -> None:
        self._dealer = dealer
        if state:
            dealer.seeded = bool(state.get("seeded", False))
        super().__init__(dealer.loader, order, extent, state)
        self._next_epoch = self._begin
        self._number = 0  # lists of the stream that have been seen
        self._deals: deque[tuple[int, _Deal, torch.Tensor]] = deque()
        self._items = self._run()

    def __next__(self) -> Given | int:
        return next(self._items)

    def exists(self, number: int) -> bool:
        while number >= self._seen:
            if self._deals and self._deals[-1][1].has_more:
                return True  # the replica's next one lies behind it
            if not self._open_epoch():
                return False
        return True

    def close(self) -> None:
        self._items.close()

    def _note(self, epoch: int) -> None:
        super()._note(epoch)
        self._marks[epoch]["seeded"] = self._dealer.seeded

    @property
    def _seen(self) -> int:
        return self._deals[-1][1].number if self._deals else self._number

    def _open_epoch(self) -> bool:
        """Draws what begins the next epoch and deals it; tells whether there is one."""
        epoch, extent, dealer = self._next_epoch, self._extent, self._dealer
        if epoch >= extent.epochs:
            return False
        number = self._seen
        self._next_epoch += 1
        announce(self._loader, epoch)
        self._note(epoch)
        lists, seeds = dealer.begin(self._order)
        deal = _Deal(
            draw=lambda: dealer.draw(lists, self._order),
            skip=sys.maxsize if epoch < extent.first_epoch else extent.skip if epoch == extent.first_epoch else 0,
            number=number,
            own=lambda number: number % dealer.replicas == dealer.replica,
            ended=lambda: self._note(epoch + 1),
        )
        if deal.empty:
            raise nothing_found(epoch)
        self._deals.append((epoch, deal, seeds))
        return True

    def _run(self) -> Generator[Given | int, None, None]:
        while self._deals or self._open_epoch():
            epoch, deal, seeds = self._deals[0]
            if deal.has_more:
                for batch in self._dealer.load(deal, seeds):
                    number, ends = deal.marks.popleft()
                    yield Given(number, epoch, batch, ends)
            self._number = deal.number
            self._deals.popleft()
        yield self._number
