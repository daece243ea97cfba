"""Measures what checkpoints cost a run, and decides when to make the next."""

import json
from collections import deque
from collections.abc import Callable
from math import ceil
from statistics import fmean, median

SHARE = 0.02
"""Largest share of the training time that checkpoints may cost."""

FIRST = 16
"""Minibatches before the first checkpoint."""

_KEPT_MINIBATCHES, _KEPT_CHECKPOINTS = 64, 5


class CheckpointCost:
    """Measures what checkpoints cost, and chooses the next one so that all of them cost at most `SHARE` of the time.

    The cost of a checkpoint is the extra time of the minibatches from the drain before it until it is written and the
    pipeline is full again, but at least that of the copy, during which training stops. Training waits for the first
    checkpoint, so its cost is known at once. None begins before the last one is written.

    Args:
        fill: minibatches until a drained pipeline is full again.
        gather: text -> all ranks' texts; the ranks use it to agree on when the next checkpoint is due.

    Attributes:
        spent_s: seconds that checkpoints have cost so far.
        every: minibatches from the last checkpoint to the next one.
    """

    def __init__(self, fill: int, gather: Callable[[str], list[str]]) -> None:
        self._fill, self._gather = fill, gather
        self.spent_s, self.every = 0.0, FIRST
        self._trained, self._due_at = 0, FIRST
        self._last_s: float | None = None
        self._minibatch_s: deque[float] = deque(maxlen=_KEPT_MINIBATCHES)
        self._costs_s: deque[float] = deque(maxlen=_KEPT_CHECKPOINTS)
        self._written: deque[int] = deque([0], maxlen=_KEPT_CHECKPOINTS)  # after how many minibatches
        self._unsettled: tuple[float, int] | None = None  # begin and minibatch of a checkpoint of unknown cost

    def finish_minibatch(self, now_s: float, is_saving: bool) -> bool:
        """Notes when a minibatch has ended; returns whether a checkpoint is due."""
        self._trained += 1
        if self._unsettled is not None:
            begin_s, trained = self._unsettled
            if not is_saving and self._trained - trained >= self._fill:
                self._settle(now_s - begin_s - (self._trained - trained) * median(self._minibatch_s))
                self._written.append(self._trained - trained)
        elif self._last_s is not None and not (is_saving and self._minibatch_s):
            self._minibatch_s.append(now_s - self._last_s)
        self._last_s = now_s
        return self._trained >= self._due_at

    @property
    def is_first(self) -> bool:
        return self._due_at == FIRST

    def note_checkpoint(self, begin_s: float, copy_s: float, end_s: float) -> None:
        """Notes a checkpoint, and chooses when the next one is due; every rank calls it.

        Args:
            begin_s, copy_s, end_s: when its drain began, its copy began, and training continues.
        """
        if self._unsettled is not None:  # the last one was not written yet
            earlier_begin_s, trained = self._unsettled
            self._settle(begin_s - earlier_begin_s - (self._trained - trained) * median(self._minibatch_s))
            self._written.append(2 * (self._trained - trained))
        self._unsettled = begin_s, self._trained
        cost_s = max(median(self._costs_s or [end_s - begin_s]), end_s - copy_s)
        local_row = self.spent_s, cost_s, max(self._written), median(self._minibatch_s)
        rows = [json.loads(row) for row in self._gather(json.dumps(local_row))]
        spent_s, cost_s, written, _ = map(max, zip(*rows, strict=True))
        allowed_s = SHARE * max(fmean(row[3] for row in rows), 1e-9)  # for each minibatch
        # The cost of this one is not measured yet, so it counts as cost_s, too.
        due = max(self._trained + max(written, cost_s / allowed_s), (spent_s + 2 * cost_s) / allowed_s)
        self._due_at = max(ceil(due), self._trained + 1)
        self.every = self._due_at - self._trained
        self._last_s = end_s

    def _settle(self, seconds: float) -> None:
        self._costs_s.append(seconds)
        self.spent_s = max(0.0, self.spent_s + seconds)
        self._unsettled = None
