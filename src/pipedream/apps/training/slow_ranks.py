"""Says which ranks compute for longer than was profiled, while a run trains."""

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence

from rich.console import Console

from pipedream.core.units import format_seconds
from pipedream.pipeline import Pipeline

_PIECE_S, _INTERVAL_S = 1.0, 10.0
_INTERVALS = 3
"""So many in a row make a rank slow: one may be another program's start."""
_TOLERANCE = 1.5


class SlowRanks:
    """Compares what each rank computes in a minibatch with the profile, over intervals of ten seconds.

    Every rank makes it and calls it, and rank 0 prints: a line for a rank that takes more than 1.5 times its seconds in
    three intervals in a row, and again once it was as fast as profiled in between.

    Args:
        profiled_s: of each rank, seconds of computing in a minibatch.
        clock: seconds.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        profiled_s: Sequence[float],
        console: Console,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._pipeline, self._profiled_s, self._console, self._clock = pipeline, profiled_s, console, clock
        self._slow_intervals = Counter[int]()
        self._begin_interval()
        self._begin_piece()

    def _begin_interval(self) -> None:
        self._busy_s, self._minibatches, self._elapsed_s = defaultdict[int, float](float), 0, 0.0

    def _begin_piece(self) -> None:
        self._begin_s, self._piece_minibatches, self._drains = self._clock(), 0, len(self._pipeline.drains)

    def finish_minibatch(self, trained: int) -> None:
        """Takes note of a minibatch."""
        self._piece_minibatches += 1
        piece_s = self._clock() - self._begin_s
        if piece_s < _PIECE_S:
            return
        status = self._pipeline.status()
        if len(self._pipeline.drains) == self._drains:  # else it has an evaluation or a save, too
            for rank, row in status.items():
                self._busy_s[rank] += row["busy_share"] * piece_s
            self._minibatches += self._piece_minibatches
            self._elapsed_s += piece_s
        self._begin_piece()
        if self._elapsed_s >= _INTERVAL_S:
            for rank, busy_s in self._busy_s.items():
                self._compare(rank, busy_s / self._minibatches)
            self._begin_interval()

    def _compare(self, rank: int, computed_s: float) -> None:
        profiled_s = self._profiled_s[rank]
        is_slow = computed_s > _TOLERANCE * profiled_s
        self._slow_intervals[rank] = self._slow_intervals[rank] + 1 if is_slow else 0
        if self._slow_intervals[rank] == _INTERVALS:
            self._console.print(
                f"rank {rank} computes for {format_seconds(computed_s)} in a minibatch, "
                f"{computed_s / profiled_s:.1f} times as long as profiled, for {_INTERVALS * _INTERVAL_S:.0f} s now: "
                "does other work take its cores, or is it throttled?"
            )
