"""How often snapshots are made, in runs whose clock is known."""

from __future__ import annotations

import json
from collections.abc import Callable
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipedream.training.snapshot_cost import FIRST, SHARE, SnapshotCost


class Run:
    """A run of some ranks: each minibatch takes a second, and longer while a snapshot is being written.

    Args:
        hold_s: that the copy of a snapshot holds training up.
        writing_s: that it is then being written.
        slower: of what a minibatch takes longer meanwhile.
        refill_s: that the first minibatch after a drain takes longer.
        noise: of each minibatch, and of what ranks measure.
    """

    def __init__(
        self, ranks: int, hold_s: float, writing_s: float, slower: float, refill_s: float, noise: float
    ) -> None:
        self.costs = [SnapshotCost(4, self._gather(rank)) for rank in range(ranks)]
        self.hold_s, self.writing_s, self.slower, self.refill_s, self.noise = hold_s, writing_s, slower, refill_s, noise
        self.now_s, self.written_s, self.refill, self.numbers = 0.0, 0.0, 0.0, list[int]()
        self._draw = Random(0)
        self._texts: dict[int, str] = {}

    def _gather(self, rank: int) -> Callable[[str], list[str]]:
        def gather(text: str) -> list[str]:
            spent_s, cost_s, minibatch_s = json.loads(text)
            # What the other ranks say; the same for all.
            draw = Random(len(self.numbers))
            others = [1 + self.noise * draw.random() for _ in self.costs]
            return [json.dumps([spent_s, cost_s * other, minibatch_s]) for other in others]

        return gather

    def train(self, minibatches: int) -> float:
        """Returns the share of the time that snapshots have cost."""
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
        for cost in self.costs:
            cost.save(begin_s, copy_s, self.now_s)


seconds = st.floats(0.01, 5.0)


@given(st.integers(1, 3), seconds, seconds, st.floats(0.0, 0.9), st.floats(0.0, 3.0))
def test_snapshots_cost_at_most_what_they_may(
    ranks: int, hold_s: float, writing_s: float, slower: float, refill_s: float
) -> None:
    """And no more than three times as rarely as they might."""
    run = Run(ranks, hold_s, writing_s, slower, refill_s, 0.0)
    share = run.train(6000)
    assert run.numbers[0] == FIRST - 1
    assert SHARE / 3 < share <= SHARE + 1e-9
    cost_s = (run.now_s - 6000) / len(run.numbers)
    assert run.costs[0].every == pytest.approx(cost_s / SHARE, rel=0.3, abs=3)
    assert run.costs[0].spent_s == pytest.approx(run.now_s - 6000, rel=0.1, abs=2 * cost_s)


@given(st.integers(2, 4), seconds, st.floats(0.0, 0.5))
def test_all_ranks_choose_the_same_whatever_they_measure(ranks: int, hold_s: float, noise: float) -> None:
    run = Run(ranks, hold_s, 1.0, 0.3, 0.5, noise)
    run.train(1000)
    assert len({cost.every for cost in run.costs}) == 1


def test_a_snapshot_that_costs_nothing_is_made_after_each_minibatch() -> None:
    run = Run(1, 0.0, 0.0, 0.0, 0.0, 0.0)
    run.train(100)
    assert run.numbers == list(range(FIRST - 1, 100))
