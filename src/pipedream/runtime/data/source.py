"""The data of a session: who of the input stage's workers reads the loader, and which random numbers decide its order.

- All workers in one process: one reading serves all of them.
- One replica, or a minibatch a microbatch and a map-style DataLoader: each replica loads its own (`dealing.py`).
  Where a run has several methods, this is so if all of them travel a minibatch at a time.
- Anything else: replica 0 reads and hands the others their parts (`intake.py`).
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
from pipedream.runtime.data.batch_adapter import Taking
from pipedream.runtime.data.feed import Feed
from pipedream.runtime.data.iterate import Extent, Marked, WholeReading, share
from pipedream.runtime.data.microbatches import Door, HandedDoor, OwnDoor
from pipedream.runtime.data.order import DataOrder, generators_of
from pipedream.runtime.data.sharded_loader import Dealer, DealtReading, can_be_dealt

__all__ = ["Supply"]


class Supply:
    """The data's side of the workers of one process.

    Args:
        programs: of the training, of each of its phases.
        ranks: of the workers of this process.
        group: of all ranks; None in a lone process.
        senders: other replica of the input stage -> channel, at replica 0 on several processes.
        receiver: from replica 0, at the others.
    """

    def __init__(
        self,
        programs: Sequence[Program],
        ranks: Iterable[int],
        group: dist.ProcessGroup | None = None,
        senders: Mapping[int, Sender] | None = None,
        receiver: Receiver | None = None,
    ) -> None:
        self._input = programs[0].placement.readers
        here = set(ranks)
        self._here = [rank for rank in self._input if rank in here]
        self._parts = max(program.microbatches for program in programs)
        self._group = group
        self._senders = dict(senders or {})
        self._receiver = receiver
        self._order = DataOrder()
        self._dealers: dict[bool, Dealer] = {}
        self._readings: dict[bool, Marked] = {}
        self._lent: list[tuple[torch.Generator, torch.Tensor]] = []

    def train_on(self, loader: Any, take: Taking, extent: Extent, state: Mapping[str, Any] | None) -> dict[int, Door]:
        """Opens a loader for training: rank -> door, for the workers of the input stage here.

        Args:
            loader: of the user.
            take: batch -> (inputs, targets).
            extent: what of it is read.
            state: of `state`, at the position where it begins; None goes on with the order as it is.
        """
        return self._open(loader, take, extent, state, self._order, training=True)

    def look_at(self, loader: Any, take: Taking) -> dict[int, Door]:
        """Opens a loader once, for forwards alone; the order of the training does not notice."""
        self._lent = [(generator, generator.get_state()) for generator in generators_of(loader).values()]
        return self._open(loader, take, Extent(), None, DataOrder(), training=False)

    def state(self, epoch: int, batches: int) -> dict[str, Any]:
        """Returns what is needed to go on reading the training data from a position; empty where it is not read.

        Raises:
            PipelineError: the reading is not there, or the loader's own state cannot be JSON.
        """
        reading = self._readings.get(True)
        return {} if reading is None else reading.state(epoch, batches)

    def end_looking(self) -> None:
        """Ends what `look_at` began, and puts the loader's generators back: they may be those of the training."""
        self._end(False)
        for generator, state in self._lent:
            generator.set_state(state)
        self._lent = []

    def close(self) -> None:
        """Ends all processes that load."""
        for training in (True, False):
            self._end(training)
            if training in self._dealers:
                self._dealers.pop(training).close()

    def _end(self, training: bool) -> None:
        if training in self._readings:
            self._readings.pop(training).close()

    def _open(
        self,
        loader: Any,
        take: Taking,
        extent: Extent,
        state: Mapping[str, Any] | None,
        order: DataOrder,
        training: bool,
    ) -> dict[int, Door]:
        self._end(training)
        if self._group is not None and len(self._input) > 1:
            return self._open_apart(loader, take, extent, state, order, training)
        if not self._here:
            return {}
        shared = share(self._whole(loader, order, extent, state, training), len(self._here))
        feeds = [Feed(reading, take) for reading in shared]
        return {rank: OwnDoor(feed) for rank, feed in zip(self._here, feeds, strict=True)}

    def _open_apart(
        self,
        loader: Any,
        take: Taking,
        extent: Extent,
        state: Mapping[str, Any] | None,
        order: DataOrder,
        training: bool,
    ) -> dict[int, Door]:
        """Opens a loader where the replicas of the input stage are processes; replica 0 says how it is read."""
        replicas = len(self._input)
        replica = self._input.index(self._here[0]) if self._here else -1
        word = ""
        if replica == 0:
            dealt = can_be_dealt(loader) and (self._parts == 1 or not training)
            if dealt and not state:
                seeded = self._dealer(loader, training, 0, replicas).seeded
                state = {"epoch": extent.first_epoch, "order": order.snapshot(loader), "seeded": seeded}
            word = json.dumps([dealt, state])
        words = gather_texts(word, self._group)
        if replica < 0:
            return {}
        rank, first = self._here[0], self._input[0]
        dealt, state = json.loads(words[first])
        if dealt and not can_be_dealt(loader):
            raise WorkerError(
                rank,
                "the loader",
                f"it is a {type(loader).__name__}, but rank {first} has a DataLoader over a map-style data set",
                "let every rank make the same loader",
            )
        if dealt:
            reading = DealtReading(self._dealer(loader, training, replica, replicas), order, extent, state)
            self._readings[training] = reading
            return {rank: OwnDoor(Feed(reading, take))}
        if replica:
            assert self._receiver is not None
            return {rank: HandedDoor(self._receiver)}
        (whole,) = share(self._whole(loader, order, extent, state, training), 1)
        return {rank: OwnDoor(Feed(whole, take), self._senders)}

    def _whole(
        self, loader: Any, order: DataOrder, extent: Extent, state: Mapping[str, Any] | None, training: bool
    ) -> Marked:
        """Opens a reading of all minibatches."""
        if can_be_dealt(loader):
            reading: Marked = DealtReading(self._dealer(loader, training, 0, 1), order, extent, state)
        else:
            reading = WholeReading(loader, order, extent, state)
        self._readings[training] = reading
        return reading

    def _dealer(self, loader: Any, training: bool, replica: int, replicas: int) -> Dealer:
        """Returns the dealer of a loader: the one before where it is the same, for its workers may live on."""
        known = self._dealers.get(training)
        if known is None or known.loader is not loader or known.replicas != replicas:
            if known is not None:
                known.close()
            known = self._dealers[training] = Dealer(loader, replica, replicas)
        return known
