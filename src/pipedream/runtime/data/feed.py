"""One worker's minibatches, counted from the last drain."""

from __future__ import annotations

from pipedream.runtime.comm.message import StopReason
from pipedream.runtime.data.reader import Minibatch, MinibatchReader


class Feed:
    """Minibatches that enter the pipeline at one worker.

    `stopped`: why the stream ends before its next round. `ended_at`: its length, once it has ended.
    """

    def __init__(self, reader: MinibatchReader) -> None:
        self._reader = reader
        self._base = 0
        self.stopped: StopReason | None = None
        self.ended_at = 0
        self.begin()

    def begin(self, cycle: int = 1, until: int | None = None) -> None:
        """Gets ready for a stream.

        Args:
            cycle: drains come after a multiple of this number of minibatches, so that no stage's round is broken.
            until: minibatches before a drain, rounded up to whole cycles; None: all data.
        """
        self._cycle = cycle
        self._until = None if until is None else -(-until // cycle) * cycle

    def stop(self, stop_reason: StopReason) -> None:
        if self.stopped is None or stop_reason is StopReason.INTERRUPT:
            self.stopped = stop_reason

    def resume(self) -> None:
        """The next minibatch is number 0 again."""
        self._base += self.ended_at
        self.stopped = None

    def read(self, number: int, replica: int = 0) -> Minibatch | StopReason:
        """Returns minibatch `number`, or why the stream has ended; the numbers must grow."""
        if self._until is not None and number >= self._until:
            self.stop(StopReason.DRAIN)
        if self.stopped is not None and number % self._cycle == replica % self._cycle:
            # All replicas stop before the same round, unless the data ended in the one before.
            until = number - number % self._cycle
            if not until or self._exists(self._base + until - 1):
                self.ended_at = until
                return self.stopped
        if self._reader.count is None:
            for minibatch in self._reader:
                if minibatch.number == self._base + number:
                    return minibatch
        assert self._reader.count is not None, "the loader failed before"
        self.ended_at = self._reader.count - self._base
        return StopReason.DATA

    def _exists(self, number: int) -> bool:
        count = self._reader.count
        return self._reader.has_minibatch(number) if count is None else number < count
