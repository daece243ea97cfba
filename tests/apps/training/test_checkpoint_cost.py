"""How often checkpoints are made, in runs whose clock is known."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from random import Random
from threading import Barrier
from typing import Any

import pytest
from hypothesis import given, strategies as st

from pipedream.apps.training.checkpoint_cost import FIRST, SHARE, CheckpointCost


@dataclass
class Run:
    """A run of some ranks: each minibatch takes a second, and longer while a checkpoint is being written."""

    ranks: int
    hold_s: float  # that the copy of a checkpoint holds training up
    writing_s: float  # that it is then being written
    slower: float  # of what a minibatch takes longer meanwhile
    refill_s: float  # that the first minibatch after a drain takes longer
    noise: float = 0.0  # of each minibatch, and of what each rank measures of a checkpoint

    def __post_init__(self) -> None:
        self.costs = [CheckpointCost(4, self._gather(rank)) for rank in range(self.ranks)]
        self.now_s, self.written_s, self.refill, self.numbers = 0.0, 0.0, 0.0, list[int]()
        self._draw, self._threads = Random(0), ThreadPoolExecutor(self.ranks)
        self._texts, self._all_here = [""] * self.ranks, Barrier(self.ranks, timeout=60.0)

    def _gather(self, rank: int) -> Callable[[str], list[str]]:
        def gather(text: str) -> list[str]:
            self._texts[rank] = text
            self._all_here.wait()
            texts = list(self._texts)
            self._all_here.wait()
            return texts

        return gather

    def train(self, minibatches: int) -> float:
        """Returns the share of the time that checkpoints have cost."""
        for number in range(minibatches):
            writes = self.now_s < self.written_s
            self.now_s += 1 + self.slower * writes + self.refill + self.noise * self._draw.random()
            self.refill = 0.0
            due = {cost.finish_minibatch(self.now_s, self.now_s < self.written_s) for cost in self.costs}
            assert len(due) == 1
            if due == {True}:
                self._save(number)
        return 1 - minibatches * (1 + self.noise / 2) / self.now_s

    def _save(self, number: int) -> None:
        begin_s, self.refill = self.now_s, self.refill_s
        self.now_s += max(0.0, self.written_s - begin_s)  # the one before
        copy_s = self.now_s
        self.now_s += self.hold_s
        if not self.numbers:
            self.now_s += self.writing_s
        self.written_s = self.now_s + self.writing_s * bool(self.numbers)
        self.numbers.append(number)
        ends = [self.now_s + self.noise * self._draw.random() for _ in self.costs]
        # Several wait for each other.
        run: Any = map if len(ends) == 1 else self._threads.map
        list(run(lambda cost, end_s: cost.note_checkpoint(begin_s, copy_s, end_s), self.costs, ends))


seconds = st.floats(0.01, 5.0)


@given(st.builds(Run, st.just(1), seconds, seconds, st.floats(0.0, 0.9), st.floats(0.0, 3.0)))
def test_checkpoints_cost_at_most_what_they_may(run: Run) -> None:
    """And no more than three times as rarely as they might."""
    share = run.train(6000)
    assert run.numbers[0] == FIRST - 1
    assert min(SHARE / 3, run.hold_s / 30) < share <= SHARE + 1e-9
    cost_s = (run.now_s - 6000) / len(run.numbers)
    assert run.costs[0].every == pytest.approx(max(run.writing_s * 1.2, cost_s / SHARE), rel=0.3, abs=6)
    assert run.costs[0].spent_s == pytest.approx(run.now_s - 6000, rel=0.1, abs=2 * cost_s)


@given(st.integers(2, 4), seconds, st.floats(0.0, 0.5))
def test_all_ranks_choose_the_same_whatever_they_measure(ranks: int, hold_s: float, noise: float) -> None:
    run = Run(ranks, hold_s, 1.0, 0.3, 0.5, noise)
    run.train(500)
    assert len({cost.every for cost in run.costs}) == 1
