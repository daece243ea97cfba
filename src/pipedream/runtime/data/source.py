"""Which workers of the input stage read the loader, and with which random state.

- All workers in one process: one reader serves all of them.
- One replica, or a map-style DataLoader and no split minibatches: each replica loads its own.
- Anything else: replica 0 reads and sends the others theirs (`microbatches.py`).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from pipedream.core.errors import WorkerError
from pipedream.core.schedule.program import Program
from pipedream.runtime.comm.channel import Receiver, Sender
from pipedream.runtime.comm.process_group import gather_texts
from pipedream.runtime.data.batch_adapter import AdaptBatch
from pipedream.runtime.data.batches import BatchDim
from pipedream.runtime.data.feed import Feed
from pipedream.runtime.data.microbatches import LocalMicrobatches, Microbatches, ReceivedMicrobatches
from pipedream.runtime.data.reader import EpochRange, IterableReader, LoaderReader, tee
from pipedream.runtime.data.rng import DataOrder, find_torch_generators
from pipedream.runtime.data.sharded_loader import ShardedLoader, ShardedReader, can_be_sharded


class DataSource:
    """The data for the workers of one process.

    Args:
        programs: one for each phase of the training.
        group: None in a single process.
        senders: at replica 0 of the input stage, to the others.
        receiver: at the others.
        batch_dim: of the model's inputs.
    """

    def __init__(
        self,
        programs: Sequence[Program],
        ranks: Iterable[int],
        group: dist.ProcessGroup | None = None,
        senders: Mapping[int, Sender] | None = None,
        receiver: Receiver | None = None,
        batch_dim: BatchDim = 0,
    ) -> None:
        self._input_ranks = programs[0].placement.readers
        self._ranks_here = [rank for rank in self._input_ranks if rank in set(ranks)]
        self._splits = max(program.microbatches for program in programs) > 1
        self._group = group
        self._senders = dict(senders or {})
        self._receiver = receiver
        self._batch_dim = batch_dim
        self._training = _OpenLoader()
        self._evaluation = _OpenLoader()
        self._borrowed: list[tuple[torch.Generator, torch.Tensor]] = []

    def open_training(
        self, loader: Any, adapt: AdaptBatch, epochs: EpochRange, state: Mapping[str, Any] | None
    ) -> dict[int, Microbatches]:
        """Returns rank -> microbatches for the workers here; without a `state` the order continues."""
        return self._open(self._training, self._splits, loader, adapt, epochs, state)

    def open_evaluation(self, loader: Any, adapt: AdaptBatch) -> dict[int, Microbatches]:
        """Opens a loader for one epoch; the training's order stays as it is."""
        self._borrowed = [(generator, generator.get_state()) for generator in find_torch_generators(loader).values()]
        self._evaluation.order = DataOrder()
        return self._open(self._evaluation, False, loader, adapt, EpochRange(), None)

    def close_evaluation(self) -> None:
        """Restores the loader's generators, which may be the training's."""
        self._evaluation.close_reader()
        for generator, state in self._borrowed:
            generator.set_state(state)
        self._borrowed = []

    def state(self, epoch: int, batches: int) -> dict[str, Any]:
        """Returns what is needed to continue reading; empty where the loader is not read."""
        reader = self._training.reader
        return {} if reader is None else reader.state(epoch, batches)

    def close(self) -> None:
        self._training.close()
        self._evaluation.close()

    def _open(
        self,
        target: _OpenLoader,
        splits: bool,
        loader: Any,
        adapt: AdaptBatch,
        epochs: EpochRange,
        state: Mapping[str, Any] | None,
    ) -> dict[int, Microbatches]:
        target.close_reader()
        if self._group is None or len(self._input_ranks) == 1:
            if not self._ranks_here:
                return {}
            readers = tee(target.open(loader, epochs, state), len(self._ranks_here))
            return {
                rank: LocalMicrobatches(Feed(reader), adapt, batch_dim=self._batch_dim)
                for rank, reader in zip(self._ranks_here, readers, strict=True)
            }
        # Replica 0 decides how all replicas read.
        replicas = len(self._input_ranks)
        replica = self._input_ranks.index(self._ranks_here[0]) if self._ranks_here else None
        text = ""
        if replica == 0:
            sharded = can_be_sharded(loader) and not splits
            if sharded and not state:
                state = target.initial_state(loader, epochs, replicas)
            text = json.dumps([sharded, state])
        texts = gather_texts(text, self._group)
        if replica is None:
            return {}
        rank, first = self._ranks_here[0], self._input_ranks[0]
        sharded, state = json.loads(texts[first])
        if sharded and not can_be_sharded(loader):
            raise WorkerError(
                rank,
                "the loader",
                f"it is a {type(loader).__name__}, but rank {first} has a DataLoader over a map-style data set",
                "create the same loader on every rank",
            )
        if sharded:
            reader = target.open(loader, epochs, state, replica, replicas)
            return {rank: LocalMicrobatches(Feed(reader), adapt, batch_dim=self._batch_dim)}
        if replica == 0:
            reader = target.open(loader, epochs, state)
            return {rank: LocalMicrobatches(Feed(reader), adapt, self._senders, self._batch_dim)}
        assert self._receiver is not None
        return {rank: ReceivedMicrobatches(self._receiver)}


class _OpenLoader:
    def __init__(self) -> None:
        self.order = DataOrder()
        self.reader: LoaderReader | None = None
        self._sharded: ShardedLoader | None = None

    def open(
        self, loader: Any, epochs: EpochRange, state: Mapping[str, Any] | None, replica: int = 0, replicas: int = 1
    ) -> LoaderReader:
        if can_be_sharded(loader):
            self.reader = ShardedReader(self._shard(loader, replica, replicas), self.order, epochs, state)
        else:
            self.reader = IterableReader(loader, self.order, epochs, state)
        return self.reader

    def initial_state(self, loader: Any, epochs: EpochRange, replicas: int) -> dict[str, Any]:
        """Replica 0's, with which all replicas begin."""
        seeded = self._shard(loader, 0, replicas).seeded
        return {"epoch": epochs.first, "order": self.order.snapshot(loader), "seeded": seeded}

    def close_reader(self) -> None:
        if self.reader is not None:
            self.reader.close()
            self.reader = None

    def close(self) -> None:
        self.close_reader()
        if self._sharded is not None:
            self._sharded.close()
            self._sharded = None

    def _shard(self, loader: Any, replica: int, replicas: int) -> ShardedLoader:
        """The same object for the same loader, whose workers may live on."""
        sharded = self._sharded
        if sharded is None or sharded.loader is not loader or sharded.replicas != replicas:
            if sharded is not None:
                sharded.close()
            sharded = self._sharded = ShardedLoader(loader, replica, replicas)
        return sharded
