"""The input stage's side of the data: minibatches from a loader, one after the other over the epochs.

The feed looks one minibatch ahead, so that a minibatch knows whether it ends its epoch. It stops where it is
asked to: for a drain (it goes on afterwards) or by an interrupt (it does not).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from ..core.errors import WorkerError
from .batches import samples

__all__ = ["Admitted", "Ending", "Feed", "read"]


class Ending(IntEnum):
    """Why a stream of minibatches ended."""

    DATA = 0
    DRAIN = 1
    INTERRUPT = 2


@dataclass(frozen=True)
class Admitted:
    """One minibatch that enters the pipeline.

    Attributes:
        inputs: what the model's first layer takes.
        targets: what goes straight to the loss.
        samples: in the minibatch.
        epoch: from 0.
        ends_epoch: it is the epoch's last one.
    """

    inputs: Any
    targets: Any
    samples: int
    epoch: int
    ends_epoch: bool


class Feed:
    """Minibatches that enter at one worker of the input stage.

    Args:
        batches: pairs (epoch, batch), as from `read`.
        take: batch -> (inputs, targets).
        cycle: minibatches of which a drain waits for a multiple, so that no stage's round is torn apart.
    """

    def __init__(
        self, batches: Iterator[tuple[int, Any]], take: Callable[[Any], tuple[Any, Any]], cycle: int = 1
    ) -> None:
        self._cycle = cycle
        self._batches = batches
        self._take = take
        self._ahead: tuple[int, Any] | None = None
        self._started = False
        self._read = 0
        self._base = 0
        self.stopped: Ending | None = None
        self.ended_at = 0

    def resume(self) -> None:
        """Goes on after a drain: the next minibatch is number 0 again."""
        self._base += self.ended_at
        self.stopped = None

    def admit(self, number: int, replica: int = 0) -> Admitted | Ending:
        """Returns minibatch `number` since the last drain, or why there is none; `ended_at` says then how
        many there were.

        A replica of the input stage takes every so-manieth minibatch and passes over the others.
        """
        if self.stopped is not None and number % self._cycle == replica % self._cycle:
            # All replicas stop before the same round.
            self.ended_at = number - number % self._cycle
            return self.stopped
        if not self._started:
            self._started = True
            self._ahead = next(self._batches, None)
        while self._ahead is not None:
            epoch, batch = self._ahead
            self._ahead = next(self._batches, None)
            self._read += 1
            if self._read > self._base + number:
                inputs, targets = self._take(batch)
                return Admitted(inputs, targets, samples(inputs), epoch, self._ahead is None or self._ahead[0] != epoch)
        self.ended_at = self._read - self._base
        return Ending.DATA


def read(loader: Iterable[Any], *, first_epoch: int = 0, epochs: int = 1, skip: int = 0) -> Iterator[tuple[int, Any]]:
    """Yields (epoch, batch) of a loader over the epochs first_epoch <= epoch < epochs.

    An object with ``set_epoch`` (the loader, its sampler or its batch sampler) is told each epoch.

    Args:
        loader: an iterable that can be iterated once an epoch.
        first_epoch, epochs: which epochs.
        skip: minibatches of the first of them to leave out: they were trained on already.

    Raises:
        WorkerError: an epoch has no minibatch.
    """
    for epoch in range(first_epoch, epochs):
        parts: tuple[Any, ...] = (getattr(loader, "sampler", None), getattr(loader, "batch_sampler", None), loader)
        for part in parts:
            if hasattr(part, "set_epoch"):
                part.set_epoch(epoch)
        empty = True
        for number, batch in enumerate(loader):
            empty = False
            if epoch > first_epoch or number >= skip:
                yield epoch, batch
        if empty:
            raise WorkerError(
                0,
                f"the loader, epoch {epoch}",
                "it yielded nothing",
                "give a loader that can be iterated once an epoch; a generator can be iterated only once",
            )
