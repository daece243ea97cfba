"""Sharding a map-style DataLoader: each replica of the input stage loads only its own minibatches.

Every replica runs the user's batch sampler with the same random state (`rng.py`) and loads its own index lists. From
the lists it knows, without loading, which minibatch ends the epoch; skipping them leads back to a position.
"""

from __future__ import annotations

import zlib
from array import array
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from functools import partial
from itertools import chain
from operator import length_hint
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from pipedream.core.seeds import layer_seed
from pipedream.runtime.data.generators import find_generators, find_sample_generators
from pipedream.runtime.data.reader import (
    EpochRange,
    LoaderReader,
    Mark,
    Minibatch,
    empty_epoch_error,
    shut_down_workers,
)
from pipedream.runtime.data.rng import DataOrder, RngStates, read_state, seed_generator, seeded_rng

_END = object()


def can_be_sharded(loader: Any) -> bool:
    """Returns whether a loader is a map-style DataLoader, iterated as torch's own is."""
    return (
        isinstance(loader, DataLoader)
        and all(getattr(type(loader), n) is getattr(DataLoader, n) for n in ("__iter__", "_get_iterator"))
        and not isinstance(loader.dataset, IterableDataset)
        and not hasattr(loader, "load_state_dict")
    )


def _is_torchs(sampler: Any) -> bool:
    """Returns whether a sampler and its inner one draw only from torch's generators."""
    inner = getattr(sampler, "sampler", None)
    return type(sampler).__module__.startswith("torch.utils.data.") and (inner is None or _is_torchs(inner))


class ShardedLoader:
    """The minibatches k of a user's DataLoader with k mod replicas = replica, loaded by a DataLoader of its own."""

    def __init__(self, loader: DataLoader[Any], replica: int = 0, replicas: int = 1) -> None:
        self.loader = loader
        self.replica = replica
        self.replicas = replicas
        self.seeded = False  # persistent workers draw one seed in their life
        self.alike = False  # other processes load the same minibatches
        self.epoch_seed = 0
        self._sampler: Any = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
        self._only_torch = _is_torchs(self._sampler)
        self.sample_generators = find_sample_generators(loader)
        self._own_sampler = _OwnSampler()
        self._drawn_again: list[Any] = []  # index lists, by the processes that load
        self._seeds = torch.Generator()
        self._own_loader: DataLoader[Any] | None = None

    def open(self, order: DataOrder, epochs: EpochRange, state: Mapping[str, Any] | None) -> ShardedReader:
        """Returns a reader of the replica's minibatches."""
        return ShardedReader(self, order, epochs, state)

    def begin_epoch(self, order: DataOrder) -> tuple[Iterator[Any], torch.Tensor]:
        """Draws what torch's DataLoader draws at the start of an epoch, in its order.

        Returns the index lists, and the generator state for the workers' seed: at replica 0 the one that the user's
        DataLoader would use; elsewhere another, or all replicas would augment alike.
        """
        user = self.loader
        with order.drawing(self._only_torch):
            lists = iter(self._sampler)
            source: torch.Generator | None = user.generator
            state = torch.get_rng_state() if source is None else source.get_state()
            if not self.seeded:
                self.epoch_seed = int(torch.empty((), dtype=torch.int64).random_(generator=source))
                if self.replica:
                    state = torch.Generator().manual_seed(self.epoch_seed + self.replica).get_state()
                if user.num_workers:
                    lists = iter(self._sampler)  # so does torch: a sampler may draw here
                self.seeded = user.persistent_workers
        return lists, state

    def next_indices(self, lists: Iterator[Any], order: DataOrder) -> Any:
        """Returns `_END` at the end."""
        with order.drawing(self._only_torch):
            indices = next(lists, _END)
        return list(indices) if isinstance(indices, list) else indices  # a sampler may use its list again

    def skip_indices(
        self, lists: Iterator[Any], order: DataOrder, is_before: Callable[[Mark], bool]
    ) -> tuple[Mark, list[Any]]:
        """Draws lists, switching the random state only once; returns where they end, and those of processes."""
        skipped: list[Any] = []
        # Without a batch sampler an index is a minibatch of unknown size: there must be as many.
        mark = Mark(indices_crc32=length_hint(self._sampler) if self.loader.batch_sampler is None else 0)
        with order.drawing(self._only_torch):
            while is_before(mark) and (indices := next(lists, _END)) is not _END:
                mark = self.advance(mark, indices)
                if self.loader.num_workers:
                    skipped.append(list(indices) if isinstance(indices, list) else indices)
        return mark, skipped

    def advance(self, mark: Mark, indices: Any) -> Mark:
        """Returns the place after a list of indices."""
        items = indices if self.loader.batch_sampler is not None and hasattr(indices, "__len__") else [indices]
        with suppress(TypeError, OverflowError):  # other indices than numbers have no checksum
            return Mark(mark.batches + 1, mark.samples + len(items), zlib.crc32(array("q", items), mark.indices_crc32))
        return Mark(mark.batches + 1, mark.samples + len(items))

    def load(self, epoch: _EpochIndices) -> Iterator[Any]:
        self._seeds.set_state(epoch.seeds)
        # Each process draws what it drew before a resume; the next list is the turn of the one whose turn it was.
        begin = self._own_loader is None or not self.loader.persistent_workers
        skipped, epoch.skipped = epoch.skipped if begin else [], []
        whole = len(skipped) - len(skipped) % max(self.loader.num_workers, 1)
        self._drawn_again[:] = skipped[:whole]
        self._own_sampler.indices = chain(skipped[whole:], epoch)
        if self._own_loader is None:
            self._own_loader = self._make_own_loader()
        iterator = iter(self._own_loader)
        self._drawn_again.clear()
        try:
            for _ in skipped[whole:]:
                next(iterator)
            while True:
                # The processes' generators may be equal or not: what the data set draws here depends on the minibatch.
                is_seeded = (self.replicas > 1 or self.alike) and not self.loader.num_workers and epoch.has_more
                seed = layer_seed(self.epoch_seed, epoch.position, "loader")
                with seeded_rng(seed, [*self.sample_generators.values()]) if is_seeded else nullcontext():
                    batch = next(iterator, _END)
                if batch is _END:
                    return
                yield batch
        finally:
            if not self.loader.persistent_workers:
                shut_down_workers(iterator)

    def close(self) -> None:
        if self._own_loader is not None:
            shut_down_workers(self._own_loader._iterator)
            self._own_loader = None

    def _make_own_loader(self) -> DataLoader[Any]:
        user = self.loader
        options: dict[str, Any] = {
            name: getattr(user, name)
            for name in ("num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn", "prefetch_factor",
                         "persistent_workers", "multiprocessing_context")
        }  # fmt: skip
        if user.pin_memory_device:
            options["pin_memory_device"] = user.pin_memory_device
        again = self._drawn_again, user.collate_fn, user.batch_sampler is not None
        options["worker_init_fn"] = partial(_begin_worker, user.worker_init_fn, self.replica > 0, *again)
        if user.batch_sampler is None:  # the data set gives a whole minibatch for an index
            return DataLoader(
                user.dataset, batch_size=None, sampler=self._own_sampler, generator=self._seeds, **options
            )
        return DataLoader(user.dataset, batch_sampler=self._own_sampler, generator=self._seeds, **options)


def _begin_worker(
    then: Callable[[int], object] | None,
    reseeds: bool,
    lists: Sequence[Any],
    collate: Any,
    is_listed: bool,
    number: int,
) -> None:
    """Begins a process that loads: another replica's with other generators, and after a resume with draws as before.

    Its share of the lists before is loaded again, or only the first one if nothing draws.
    """
    info: Any = get_worker_info()
    generators = find_generators({"dataset": info.dataset})
    if reseeds:
        for generator in generators.values():
            seed_generator(generator, info.seed)
    if then is not None:
        then(number)

    def read() -> list[Any]:
        return [RngStates.read().to_json(), *map(read_state, generators.values())]

    batched = getattr(info.dataset, "__getitems__", lambda keys: [info.dataset[key] for key in keys])
    for indices in lists[number :: info.num_workers]:
        before = read()
        collate(batched(indices) if is_listed else info.dataset[indices])
        if read() == before:
            return


class _OwnSampler:
    indices: Iterator[Any]

    def __iter__(self) -> Iterator[Any]:
        return self.indices


class _EpochIndices:
    """One replica's index lists of one epoch; always knows whether another one follows.

    Args:
        reader: knows which lists were trained on already.
        first: number of the first list after those.

    Attributes:
        seeds: generator state for the loading processes.
        skipped: the replica's lists that were trained on already, if processes load.
        number: of the next list of all replicas.
        drawn: lists of the epoch so far.
        position: lists of the epoch before the replica's next one.
        loading: (number, ends the epoch, checksum of the indices).
    """

    def __init__(self, epoch: int, loader: ShardedLoader, order: DataOrder, reader: LoaderReader, first: int) -> None:
        self.epoch = epoch
        self.number = first
        self.position = 0
        self.loading: deque[tuple[int, bool, int]] = deque()
        self._loader = loader
        self._order = order
        self._reader = reader
        self._lists, self.seeds = loader.begin_epoch(order)
        mark, skipped = loader.skip_indices(self._lists, order, partial(reader.is_before, epoch))
        self.skipped = skipped[(loader.replica - first + len(skipped)) % loader.replicas :: loader.replicas]
        self._marks, self.drawn = reader.begin_at(epoch, mark), mark.batches
        self._ahead = self._seek()

    @property
    def has_more(self) -> bool:
        return self._ahead is not None

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if self._ahead is None:
            raise StopIteration
        number, indices = self._ahead
        self._ahead = self._seek()
        ends_epoch = self._ahead is None and self.number == number + 1
        self.loading.append((number, ends_epoch, zlib.crc32(str(indices).encode()) if self._loader.alike else 0))
        return indices

    def _seek(self) -> tuple[int, Any] | None:
        while (indices := self._loader.next_indices(self._lists, self._order)) is not _END:
            self.drawn += 1
            self._marks.append(self._loader.advance(self._marks[-1], indices))
            number = self.number
            self.number += 1
            if number % self._loader.replicas == self._loader.replica:
                self.position = self.drawn - 1
                return number, indices
        self._reader.save_epoch_state(self.epoch + 1)
        return None


class ShardedReader(LoaderReader):
    """Reads a replica's minibatches."""

    def __init__(
        self, sharded: ShardedLoader, order: DataOrder, epochs: EpochRange, state: Mapping[str, Any] | None
    ) -> None:
        self._sharded = sharded
        if state:
            sharded.seeded = bool(state.get("seeded", False))
        super().__init__(sharded.loader, order, epochs, state)
        self._next_epoch = self._first_epoch
        self._number = 0  # lists of the epochs that have ended
        self._open_epochs: deque[_EpochIndices] = deque()
        self._minibatches = self._read()
        self._is_fixed = sharded.loader.num_workers > 0  # other processes use no memory again

    def state(self, epoch: int, batches: int) -> dict[str, Any]:
        """Has the current states of generators that make samples, because earlier samples are not loaded again."""
        while batches and self._next_epoch <= epoch:  # whose minibatches so far are of other replicas
            self._open_epoch()
        state = super().state(epoch, batches)
        now = {path: read_state(generator) for path, generator in self._sharded.sample_generators.items()}
        order = state["order"]
        return state | {"order": order | {"generators": order["generators"] | now}}

    def has_minibatch(self, number: int) -> bool:
        while number >= self._drawn:
            if self._open_epochs and self._open_epochs[-1].has_more:
                return True  # the replica's next one comes after it
            if not self._open_epoch():
                return False
        return True

    def save_epoch_state(self, epoch: int) -> None:
        super().save_epoch_state(epoch)
        self._epoch_states[epoch]["seeded"] = self._sharded.seeded

    @property
    def _drawn(self) -> int:
        return self._open_epochs[-1].number if self._open_epochs else self._number

    def _open_epoch(self) -> bool:
        """Returns whether there is another epoch."""
        epoch = self._next_epoch
        if epoch >= self._epochs.end:
            return False
        first = self._drawn
        self._next_epoch += 1
        self._begin_epoch(epoch)
        indices = _EpochIndices(epoch, self._sharded, self._order, self, first)
        if not indices.drawn:
            raise empty_epoch_error(epoch)
        self._open_epochs.append(indices)
        return True

    def _read(self) -> Generator[Minibatch, None, None]:
        while self._open_epochs or self._open_epoch():
            indices = self._open_epochs[0]
            if indices.has_more:
                for batch in self._sharded.load(indices):
                    number, ends_epoch, indices_crc32 = indices.loading.popleft()
                    yield Minibatch(number, indices.epoch, batch, ends_epoch, indices_crc32)
            self._number = indices.number
            self._open_epochs.popleft()
        self.count = self._number
