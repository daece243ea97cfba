"""The input stage's side of the data: minibatches enter one after the other, by their number since the drain.

A feed stops where it is asked to: for a drain (it goes on afterwards) or by an interrupt (it does not).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pipedream.runtime.comm.message import Ending
from pipedream.runtime.comm.values import samples
from pipedream.runtime.data.iterate import Reading

__all__ = ["Admitted", "Feed"]


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
        reading: of the loader; it may pass over the minibatches of other replicas.
        take: batch -> (inputs, targets).
    """

    def __init__(self, reading: Reading, take: Callable[[Any], tuple[Any, Any]]) -> None:
        self._reading = reading
        self._take = take
        self._base = 0
        self._count: int | None = None
        self.stopped: Ending | None = None
        self.ended_at = 0
        self.begin()

    def begin(self, cycle: int = 1, until: int | None = None) -> None:
        """Gets ready for a stream.

        Args:
            cycle: minibatches of which a drain waits for a multiple, so that no stage's round is torn apart.
            until: minibatches of this stream at which it drains by itself, rounded up to a multiple of the cycle; None
                goes on to the end of the data.
        """
        self._cycle = cycle
        self._until = None if until is None else -(-until // cycle) * cycle

    def stop(self, ending: Ending) -> None:
        """Lets the stream end before the next round; an interrupt is not weakened to a drain."""
        if self.stopped is None or ending is Ending.INTERRUPT:
            self.stopped = ending

    def resume(self) -> None:
        """Goes on after a drain: the next minibatch is number 0 again."""
        self._base += self.ended_at
        self.stopped = None

    def admit(self, number: int, replica: int = 0) -> Admitted | Ending:
        """Returns minibatch `number` since the last drain, or why there is none; `ended_at` says then how
        many there were.

        Args:
            number: greater than any before.
            replica: of the input stage, that takes it.
        """
        if self._until is not None and number >= self._until:
            self.stop(Ending.DRAIN)
        if self.stopped is not None and number % self._cycle == replica % self._cycle:
            # All replicas stop before the same round, unless the data ended within the one before it.
            until = number - number % self._cycle
            if not until or self._exists(self._base + until - 1):
                self.ended_at = until
                return self.stopped
        while self._count is None:
            found = next(self._reading)
            if isinstance(found, int):
                self._count = found
            elif found.number == self._base + number:
                inputs, targets = self._take(found.batch)
                return Admitted(inputs, targets, samples(inputs), found.epoch, found.ends_epoch)
        self.ended_at = self._count - self._base
        return Ending.DATA

    def _exists(self, number: int) -> bool:
        return self._reading.exists(number) if self._count is None else number < self._count
